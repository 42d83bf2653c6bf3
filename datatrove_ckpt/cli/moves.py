"""``datatrove-ckpt relocate``, ``fork``, ``reshard`` and ``migrate``: each says what it changes, changes it, and says
what is next.

Exit codes: 0 done (with --dry-run: would be); 1 a rank is running, or something is damaged, missing or changed; 2 a
mistake in a file or on the command line.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from datatrove_ckpt import operations
from datatrove_ckpt.checkpoint.commits import repair_command
from datatrove_ckpt.checkpoint.identity import of_model
from datatrove_ckpt.checkpoint.job import name_tasks
from datatrove_ckpt.cli import slurm_submit
from datatrove_ckpt.cli.printing import announce, as_json, say
from datatrove_ckpt.cli.short_form import make_executor
from datatrove_ckpt.cli.what import place_of
from datatrove_ckpt.config.paths import is_script, start_command
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import byte_size, plural, safe_repr, safe_text
from datatrove_ckpt.jobs_executor import JobsPipelineExecutor
from datatrove_ckpt.maintenance import fork as forks
from datatrove_ckpt.maintenance import verify as checks
from datatrove_ckpt.maintenance.read_state import read_run_state
from datatrove_ckpt.maintenance.relocate import FOLDER, Relocation, carry_out, plan_relocation
from datatrove_ckpt.maintenance.run_state import RunState
from datatrove_ckpt.maintenance.verify import Problem
from datatrove_ckpt.maintenance.where import Place, is_config, restored, upload
from datatrove_ckpt.operations import NOT_ABOUT_IT, NewRun, forking
from datatrove_ckpt.preflight.migrated_rank import LACKS, Rank
from datatrove_ckpt.preflight.migration import Findings
from datatrove_ckpt.preflight.reshard.run import Resharded
from datatrove_ckpt.preflight.reshard.run import reshard as deal_out
from datatrove_ckpt.preflight.run_plan import RunPlan
from datatrove_ckpt.process.task_errors import log_disabled

_SHOWN, _OTHERS_SHOWN, _MOVED_SHOWN = 20, 5, 5


# relocate -------------------------------------------------------------------------------------------------------------


def relocate(arguments: argparse.Namespace) -> int:
    """Compares the files, prints what it changes, and changes it. Returns the exit code."""
    with place_of(arguments, trusted=True) as named, restored(named) as place:
        output = arguments.output or place.output
        if output is None:
            raise ConfigError(
                "--output: name the folder, or the URL, where the output files are now. A YAML file of the run at the "
                "new place as WHAT tells it, too."
            )
        report = checks.verify(place.folder, output, not arguments.sizes_only, place.given)
        plan = plan_relocation(report, is_mirror=place.is_copy)
        if plan.obstacles:
            shown = [line.replace(report.redo_advice, "") for line in _shown(plan.obstacles, _SHOWN)]
            found = f"{plural(len(plan.obstacles), 'problem')}: the copy is not complete, so nothing was changed."
            say(place.said("\n".join([*shown, f"{found} {_way_out(plan, place)}"])))
            return 1
        lines = map(place.said, _describe_relocation(plan, arguments.sizes_only))
        announce(lines, None if plan.is_done else partial(_relocate, plan, place), arguments.dry_run)
    return 0


def _relocate(plan: Relocation, place: Place) -> str:
    carry_out(plan)
    upload(place, plan.ranks)  # a process that still works on them stops when it sees the new owner
    where = f"checkpoints_remote_dir: {place.what}" if place.is_copy else f"checkpoints_local_dir: {place.folder}"
    return (
        f"Done. Run the pipeline with {where} and output_folder: {plan.where}, and the same input. Do not go on with "
        "the original as well: both would process the rest."
    )


def _way_out(plan: Relocation, place: Place) -> str:
    if any(problem.kind == "rank" for problem in plan.obstacles):
        return "Finish what is half done at the old place, copy these files and folders again, and relocate again."
    repair = repair_command(*place.given, output=plan.report.output)
    again = "Copy these files again, and relocate again."
    return f"{again} What is lost at the old place, too, can be made again: {repair}, then relocate, then run."


def _shown(problems: list[Problem], most: int) -> list[str]:
    more = [f"... and {len(problems) - most} more"] if len(problems) > most else []
    return [*map(str, problems[:most]), *more]


def _describe_relocation(plan: Relocation, sizes_only: bool) -> list[str]:
    report = plan.report
    compared = "names and sizes" if sizes_only else "names, sizes and contents"
    files, ranks = plural(report.sums.files, "file"), plural(len(report.ranks), "rank")
    size = byte_size(sum(file.size for chunk in report.chunks for file in chunk.files))
    lines = [f"{plan.where}: {files}, {size}: {compared} are those of the commits of {ranks}."]
    if report.not_started:
        lines.append(
            f"{name_tasks(report.not_started)}: nothing here shows a start. If there was one, copy what it saved, too, "
            "and relocate again before you run: what is not here is paid again."
        )
    if plan.is_done:
        return [*lines, f"{report.checkpoints} names this folder already. There is nothing to do."]
    lines += [f"{FOLDER}: {old} -> {plan.where}" for old in plan.old]
    if plan.others:
        verify = shlex.join(["datatrove-ckpt", "verify", str(report.checkpoints), "--output", report.output])
        lines += _shown(plan.others, _OTHERS_SHOWN)
        lines.append(f"{plural(len(plan.others), 'problem')} that the place has nothing to do with: {verify}")
    return lines


# fork -----------------------------------------------------------------------------------------------------------------


def fork(arguments: argparse.Namespace) -> int:
    """Says what is kept and what the new run costs, and makes it. Returns the exit code."""
    new, command = _new_run(arguments)
    if new.name is not None:
        arguments.overrides = []  # they are the new run's
    with place_of(arguments, trusted=True) as named, forking(named, new, not arguments.no_answers) as made:
        place, run, found, folder = made
        state = read_run_state(replace(place, mirror=None))
        lines = _costs(place.what, run, found, state, new, arguments)
        announce(lines, partial(_put_in_place, folder, new, command), arguments.dry_run)
    return 0


def _new_run(arguments: argparse.Namespace) -> tuple[NewRun, str]:
    """The new run, and the command that starts it if there is a file of it."""
    if not is_config(arguments.new):
        return NewRun(Path(arguments.new)), ""
    with log_disabled(*NOT_ABOUT_IT):
        executor = make_executor(arguments.new, arguments.overrides)
    return NewRun.of(executor, arguments.new), start_command([arguments.new, *arguments.overrides])


def _costs(
    what: str, run: forks.Source, found: forks.Fork, state: RunState, new: NewRun, arguments: argparse.Namespace
) -> Iterator[str]:
    totals = state.totals
    yield f"{what}: {plural(found.ranks, 'task')}, {plural(totals.documents, 'finished document')}"
    names = [change.field for change in new.changes]
    if new.name is not None:
        none = "nothing that decides about answers"
        if run.is_unstarted:
            none = f"not known, because {what} is a fork that has not started"
        said = ", ".join(name for name in names if not name.startswith("output_"))
        yield f"changed: {said or none}"
    yield (
        f"input: {plural(found.positions, 'position')} in it kept, with the fingerprint of the document there: the new "
        "run stops if it reads another input"
    )
    if arguments.no_answers:
        yield "answers: none is kept (--no-answers)"
    for why, ranks in found.unusable.items():
        whose = "answers: none" if ranks == found.ranks else f"answers of {ranks} of {plural(found.ranks, 'task')}"
        yield f"{whose} can{'' if ranks == found.ranks else 'not'} be used: {why}"
    if not arguments.no_answers and found.unusable.total() < found.ranks:
        yield f"answers: {_kept(run, found, new, arguments)}"
    dropped = totals.counts.read - found.committed
    yield f"not kept: results, and the answers of {plural(dropped, 'committed document')}"
    total, how = _documents(state)
    if not totals.documents:
        yield f"cost: not known, because no document is finished in {what}"
        return
    done = totals.done
    sums = (done.requests, done.prompt_tokens, done.completion_tokens)
    requests, prompt, completion = (round(number * total / totals.documents) for number in sums)
    yield (
        f"cost: {how} {plural(total, 'document')}, if each takes what it took before: "
        f"{_amount(requests, prompt, completion, arguments)}, less what is not paid again"
    )


def _kept(run: forks.Source, found: forks.Fork, new: NewRun, arguments: argparse.Namespace) -> str:
    if not found.requests:
        return "none; the old run has saved none of documents that it has not committed"
    saved = _amount(found.requests, found.prompt_tokens, found.completion_tokens, arguments)
    names = [change.field for change in new.changes if of_model(change.field).startswith(_MAKES_PAYLOADS)]
    doubt = f". It may be none, because what payloads are made of changed: {', '.join(names)}"
    return (
        f"{found.requests} of {plural(found.documents, 'document')} kept. One is used if the final payload of "
        f"a request is equal, so at most {saved} are not paid again{doubt if names and not run.is_unstarted else ''}"
    )


_MAKES_PAYLOADS = ("rollout_fn", "shared_context", "imports.", "default_generation_params", "seed")


def _documents(state: RunState) -> tuple[int, str]:
    """How many documents the input has, and how well that is known."""
    documents, share = state.totals.documents, state.totals.position.share
    if state.is_finished:
        return documents, "for"
    return (round(documents / share), "for about") if share else (documents, "for at least")


def _amount(requests: int, prompt: int, completion: int, arguments: argparse.Namespace) -> str:
    text = f"{plural(requests, 'request')}, {prompt:,} prompt and {completion:,} completion tokens"
    if arguments.price_per_million_tokens is None:
        return text
    prices = arguments.price_per_million_tokens
    return f"{text} ({(prompt * prices[0] + completion * prices[1]) / 1e6:,.2f})"


def _put_in_place(folder: Path, new: NewRun, command: str) -> str:
    new.put_in_place(folder)
    if command:
        where = " and ".join(str(one) for one in (new.folder, new.mirror) if one is not None)
        return f"Made {where}. Start the new run: {command}"
    return (
        f"Made {new.folder}. Start the new run with checkpoints_local_dir: {new.folder}, and with an output_folder and "
        "a logging_dir of its own."
    )


# reshard --------------------------------------------------------------------------------------------------------------


def reshard(arguments: argparse.Namespace) -> int:
    """Prints the sums. Returns the exit code."""
    if not is_config(arguments.what):
        raise ConfigError(
            f"reshard: {arguments.what} is no YAML file and no script. What is left of the input is read through the "
            "steps of the run's pipeline, which only these name."
        )
    executor = make_executor(arguments.what, arguments.overrides)
    if slurm_submit.submits(executor) and not arguments.dry_run:
        slurm_submit.refuse_queued(executor)
    if isinstance(executor, JobsPipelineExecutor) and not arguments.dry_run:
        executor.refuse_running()
    found = deal_out(executor, arguments.tasks, arguments.dry_run)
    for line in _describe_reshard(found, arguments.dry_run):
        say(line)
    if not arguments.dry_run:
        settings = {"executor.tasks": str(found.after)}
        if found.mirror is not None:
            index = RunPlan(executor).only_runner("reshard").index
            settings[f"pipeline.{index}.checkpoints_remote_dir"] = found.mirror
        overrides = [one for one in arguments.overrides if one.removeprefix("--").partition("=")[0] not in settings]
        again = start_command([arguments.what, *overrides])
        flags = shlex.join(f"--{name}={value}" for name, value in settings.items())
        named = " and ".join(f"{name.rpartition('.')[2]}: {value}" for name, value in settings.items())
        on = f"Go on with {again} {flags}, or set {named} in the file."
        say(f"Set {named}, and go on with {again}" if is_script(arguments.what) else on)
    return 0


def _describe_reshard(found: Resharded, dry_run: bool) -> list[str]:
    """What was done, or would be, in sentences."""
    if found.resumed:
        return [f"{found.before} -> {plural(found.after, 'task')}: the interrupted change is carried out."]
    lines = [
        f"{found.before} -> {plural(found.after, 'task')}: {plural(found.documents, 'finished document')} and "
        f"{plural(found.answers, 'saved answer')} are kept."
    ]
    if found.moved_documents or found.moved_answers:
        lines.append(
            f"{plural(found.moved_documents, 'finished document')} and {plural(found.moved_answers, 'saved answer')} "
            "of tasks that will no longer exist go to other tasks."
        )
    if found.lost_answers:
        lines.append(
            f"{plural(found.lost_answers, 'answer')} of them will be requested again: with seed, a request depends on "
            "the number of its document in the task."
        )
    total = sum(found.dealt)
    if not total:
        return [*lines, "Nothing of the input is left."]
    lines.append(
        f"{byte_size(int(total))} of the input are left. The largest task had {_share(found.left)} of them, and "
        f"{'would have' if dry_run else 'has'} {_share(found.dealt)} now; {plural(found.cuts, 'cut')} through files."
    )
    return lines


def _share(sizes: list[float]) -> str:
    return f"{100 * max(sizes, default=0) / (sum(sizes) or 1):.0f} %"


# migrate --------------------------------------------------------------------------------------------------------------


def migrate(arguments: argparse.Namespace) -> int:
    """Prints what is done, or would be. Returns the exit code."""
    executor = make_executor(arguments.config, arguments.overrides, arguments.folder or arguments.source)
    try:
        flags = arguments.lacking_are_dropped, arguments.any_text, arguments.dry_run
        findings = operations.migrate(executor, arguments.folder or arguments.source, arguments.logging_dir, *flags)
    except OSError as error:
        from datatrove_ckpt.cli.execution import explain  # slow to import

        raise explain(error, RunPlan(executor)) from None
    if arguments.json:
        say(as_json({"dry_run": arguments.dry_run, **findings.to_json()}))
    else:
        say("\n".join([*_describe_migration(findings), *_close_migration(findings, arguments)]))
    return 0


def _describe_migration(findings: Findings) -> Iterator[str]:
    for rank in findings.ranks:
        if rank.done:
            yield f"rank {rank.rank}: taken over before, or started here"
        else:
            yield from _rank_lines(rank)
        if rank.aside:
            names = ", ".join(map(safe_text, rank.aside[:_MOVED_SHOWN]))
            more = f" and {len(rank.aside) - _MOVED_SHOWN} more" if len(rank.aside) > _MOVED_SHOWN else ""
            yield f"  moved aside: {plural(len(rank.aside), 'output file')}: {names}{more}"
    yield from (f"warning: {safe_text(warning)}" for warning in findings.warnings)


def _rank_lines(rank: Rank) -> Iterator[str]:
    finished = [chunk for chunk in rank.chunks if chunk.finished]
    written, dropped = (sum(getattr(chunk.counts, name) for chunk in finished) for name in ("written", "dropped"))
    if finished:
        yield (
            f"rank {rank.rank}: {plural(len(finished), 'finished chunk')} with {plural(written + dropped, 'document')} "
            f"({written} written, {dropped} dropped) {'stays as it is' if len(finished) == 1 else 'stay as they are'}"
        )
    else:
        yield f"rank {rank.rank}: no finished chunk"
    for chunk in rank.chunks:
        if chunk.finished or not (chunk.kept or chunk.problems or chunk.redone):
            continue
        yield (
            f"  chunk {chunk.index}: {chunk.kept} of {plural(chunk.counts.read, 'document')} kept, "
            f"{len(chunk.left) - len(chunk.redone)} not finished, {len(chunk.redone)} processed again"
        )
        yield from (f"    {safe_text(problem)}" for problem in chunk.problems)
        yield from (f"    again: document {one.ordinal} {safe_repr(one.id)}: {one.why}" for one in chunk.redone)


def _close_migration(findings: Findings, arguments: argparse.Namespace) -> Iterator[str]:
    new = [rank for rank in findings.ranks if not rank.done]
    chunks = [chunk for rank in new for chunk in rank.chunks]
    again = [left for chunk in chunks for left in chunk.redone]
    if new:
        yield (
            f"{plural(len(new), 'rank')}: {plural(sum(chunk.kept for chunk in chunks), 'document')} kept, "
            f"{plural(len(again), 'document')} processed again{' for the reasons above' if again else ''}"
        )
        yield "Requests of documents that datatrove's run had not finished are sent again."
    else:
        yield "Every rank was taken over before."
    if any(left.why == LACKS for left in again):
        yield "If your rollout drops documents (it returns None), --lacking-are-dropped counts them as dropped."
    command = start_command([*([arguments.config] if arguments.config else []), *arguments.overrides])
    yield "Nothing was changed (--dry-run)." if arguments.dry_run else f"To continue: {command}"
