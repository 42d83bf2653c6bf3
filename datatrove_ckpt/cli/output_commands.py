"""The commands that read a run's output: ``show``, ``export``, ``run --sample``, ``report``,
``verify`` and ``repair``.
"""

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.checkpoint.compare import mixed_settings
from datatrove_ckpt.cli import step_status
from datatrove_ckpt.cli.open_run import open_run, steps_of
from datatrove_ckpt.cli.printing import say, say_result, wrapped, write_page
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import plural, plural_or_no
from datatrove_ckpt.errors import ConfigError, printable
from datatrove_ckpt.process.task_errors import log_disabled
from datatrove_ckpt.run_folder import verify as checks
from datatrove_ckpt.run_folder.documents import ShownDocument, read_dead_letters, read_documents
from datatrove_ckpt.run_folder.documents import export as write_export
from datatrove_ckpt.run_folder.queries import is_damaged
from datatrove_ckpt.run_folder.repair import apply_repair, check_output_folder, make_plan
from datatrove_ckpt.run_folder.report.page import report_page
from datatrove_ckpt.run_folder.run_location import RunLocation, open_location, restored, upload
from datatrove_ckpt.run_folder.run_state import check_idle, read_run_state, wanted_files
from datatrove_ckpt.run_folder.steps import StepFolder, outdated

if TYPE_CHECKING:
    from datatrove_ckpt.run_folder.sample import SentSample

_MOST = 600  # characters of a text; an answer may have twice as many


def show(arguments: argparse.Namespace) -> int:
    """Prints each document as soon as it is found."""
    if arguments.sql is not None:
        steps = steps_of(arguments)
        if not steps:
            raise ConfigError("--sql: give the run folder of a run with steps.")
        return step_status.show(steps, arguments)
    printed = 0
    max_length = _MOST if arguments.id is None else None
    with open_run(arguments, output=arguments.output) as location:
        found = read_dead_letters(location) if arguments.dead else read_documents(location)
        wanted = (arguments.grep or "").casefold()
        documents = (
            document
            for document in found
            if arguments.id in (None, document.id)
            and (wanted in document.text.casefold() or wanted in document.answer.casefold())
        )
        for printed, document in enumerate(islice(documents, arguments.n), 1):
            say(described(printed, document, "text", max_length))
        if printed and not arguments.dead:
            say(f"Columns: {', '.join(map(printable, document.columns))}.")
        # The next match may be far away.
        if arguments.grep is None and next(documents, None) is not None:
            say(f"There are more; --n {2 * arguments.n} prints them.")
    if not printed and arguments.dead:
        say("There is no such dead letter.")
    elif not printed:
        say(
            "The output files have no such document. `datatrove-ckpt status` counts documents in "
            "unfinished chunks, dropped ones and dead letters."
        )
    return int(not printed)


def export(arguments: argparse.Namespace) -> int:
    with open_run(arguments, output=arguments.output) as location:
        count, report = write_export(location, arguments.target)
    limitation = ""
    if report.unfinished or {"corrupt", "rank"} & {problem.kind for problem in report.problems}:
        limitation = ". The run is not finished: these are its complete chunks"
    noun = "row" if report.sums.numbers.rows else "document"
    say(f"{plural(count, noun)} in {arguments.target}{limitation}.")
    return 0


def sample(executor: PipelineExecutor, number: int) -> int:
    with tempfile.TemporaryDirectory(prefix="datatrove-ckpt-") as folder:
        _, code = show_sample(executor, number, Path(folder))
    return code


def show_sample(
    executor: PipelineExecutor,
    number: int,
    folder: Path,
    share: float | None = 1.0,
    writes_rows: bool = False,
    ordinals: Sequence[int] | None = None,
) -> tuple["SentSample", int]:
    """Sends a sample, and prints it. Returns it, and the exit code.

    Args:
        share: the whole input is so many times the input that is there; None: unknown.
        folder, writes_rows, ordinals: see ``take_sample``.
    """
    from datatrove_ckpt.process import signals
    from datatrove_ckpt.run_folder.environment_checks import check_prompts
    from datatrove_ckpt.run_folder.run_plan import RunPlan
    from datatrove_ckpt.run_folder.sample import draw_input, estimate_lines, take_sample

    # The run's own lines would promise a resume.
    quiet = log_disabled("datatrove_ckpt.generation.rank")
    plan = RunPlan(executor)
    with signals.Interruption(signals.STOP_SIGNALS), quiet:
        drawn = draw_input(plan, number)
        sent = take_sample(plan.runners[0], drawn, folder, writes_rows, ordinals)
        documents = sent.documents
        location = RunLocation(str(folder), sent.checkpoints, [str(folder)])
        outcomes = []
        odd = ""
        if documents:
            odd = read_run_state(location).totals.done.odd_answers
            outcomes = [*read_documents(location), *read_dead_letters(location)]
    if sent.whole is not None:
        sent.whole = None if share is None else sent.whole.times(share)
    failed = 0
    dropped = 0
    for index, (document, requests) in enumerate(documents, 1):
        name = str(document.id)
        text = document.text
        outcome = min(
            (outcome for outcome in outcomes if outcome.id in (name, f"{name}/0")),  # exploded
            key=lambda outcome: outcome.text != text,
            default=None,
        )
        title = "answer"
        question = requests[0].question
        if outcome is None:
            dropped += 1
            title = "dropped"
            question = requests[-1].question
            answers = [each.answer_text for each in requests if each.question == question]
            shown = ShownDocument(name, question, "\n\n".join(answers))
        else:
            outcomes.remove(outcome)
            failed += outcome.is_dead
            shown = outcome._replace(text=question, location="")
        say(described(index, shown, "question", _MOST, title))
    prompts = [requests[0].prompt for _, requests in documents]
    for finding in check_prompts(prompts, plan.runners[0].step.model.servers):
        say(f"{finding.what}: {finding.message}")
    for line in estimate_lines(sent, plan.runners[0].step):
        say(line)
    if odd:
        say(odd.strip())
    counted = f"{len(documents) - failed} of {plural(len(documents), 'document')} processed"
    if dropped:
        counted = f"{counted}, {dropped} of them dropped"
    reuse = "The run sends these requests again"
    if sent.is_kept:
        reuse = "The run takes these answers for the same requests"
    say(f"{counted}. {reuse}.")
    return sent, int(failed == len(documents))


def described(
    number: int,
    document: ShownDocument,
    title: str,
    max_length: int | None,
    outcome: str = "answer",
) -> str:
    document = document.safe(max_length)
    head = f"{number}. {document.id}".rstrip()
    if document.location:
        head = f"{head}  ({document.location})"
    if document.is_dead:
        outcome = "failed"
    width = shutil.get_terminal_size().columns - 2
    shown = [f"{outcome}: {document.answer}"]
    if document.text:
        shown.insert(0, f"{title}: {document.text}")
    texts = wrapped(shown, width)
    return "\n".join([head, *(f"  {line}".rstrip() for line in texts), ""])


def report(arguments: argparse.Namespace) -> int:
    with open_run(arguments, wanted_files) as location:
        state = read_run_state(location)
        page = report_page(state)
        return write_page(arguments.output, location.folder, page, plural(len(state.ranks), "task"))


def verify(arguments: argparse.Namespace) -> int:
    steps = steps_of(arguments)
    if steps:
        return _verify_steps(steps, arguments)
    with open_run(arguments, output=arguments.output) as location:
        fields, lines = _verified(location, arguments.full)
    say_result(arguments.json, fields, lines)
    return int(fields["exit_code"])


def _verified(location: RunLocation, full: bool) -> tuple[JsonObject, list[str]]:
    report = checks.verify(location, full)
    code = 0
    if report.problems:
        code = 1
    elif report.unfinished and report.goal is None:
        code = 3
    lines = [*map(str, report.problems), *map(str, report.unfinished)]
    runs = [report.job, *(rank.run for rank in report.ranks)]
    accepted = (change for run in runs for change in run.get("accepted_changes", []))
    for name, old, new in mixed_settings(accepted):
        lines.append(f"accept_changes: {name} was {old} for some documents, and {new} for others.")
    sums = report.sums
    counts = sums.counts
    summary = plural_or_no(len(report.problems), "problem")
    if report.unfinished:
        summary += f", {plural(len(report.unfinished), 'thing')} not finished"
    if report.unfinished and report.goal is not None:
        summary += " (until is reached)"
    checked = "sizes; --full also compares contents"
    if report.full:
        checked = "sizes and contents"
    if report.uncounted:
        checked += f"; rows of {', '.join(sorted(report.uncounted))} cannot be counted"
    lines.append(
        f"{summary}: {plural(sums.ranks, 'task')}, {plural(counts.read, 'document')} "
        f"({counts.written} written, {counts.dropped} dropped, "
        f"{plural(counts.dead, 'dead letter')}) in {plural(sums.numbers.files, 'file')} of "
        f"{report.output} (checked: {checked})"
    )
    totals = {**counts.fields(), "lengths": counts.lengths.percentiles}
    fields = {
        "checkpoints": str(report.checkpoints),
        "output": report.output,
        "full": report.full,
        "exit_code": code,
        "totals": {**totals, "files": sums.numbers.files},
        "problems": [asdict(problem) for problem in report.problems],
        "unfinished": [asdict(unfinished) for unfinished in report.unfinished],
    }
    return fields, lines


def _verify_steps(steps: Mapping[str, StepFolder], arguments: argparse.Namespace) -> int:
    """Returns the worst exit code."""
    stale = outdated(steps)
    results: JsonObject = {}
    lines: list[str] = []
    for name, step in steps.items():
        result: JsonObject = {"exit_code": 0}
        said: list[str] = []
        if step.has_begun:
            with open_location(str(step.folder)) as location:
                result, said = _verified(location, arguments.full)
        elif step.rows is None:
            result = {"exit_code": 3}
            said = ["not finished"]
        elif is_damaged(step.rows):
            result = {"exit_code": 1}
            said = [f"{step.rows.folder} is damaged. Remove the folder, and run again."]
        if name in stale:
            result["exit_code"] = 1
            said.append(f"the rows of {stale[name]} have changed. Run again: it says what to do.")
        results[name] = result
        lines += [f"{name}: {line}" for line in said]
    codes = [result["exit_code"] for result in results.values()]
    code = 1 if 1 in codes else max(codes)
    lines.append(f"{plural(len(steps), 'step')} verified.")
    say_result(arguments.json, {"exit_code": code, "stale": stale, "steps": results}, lines)
    return code


def repair(arguments: argparse.Namespace) -> int:
    with (
        open_run(arguments, output=arguments.output) as named,
        log_disabled("datatrove_ckpt.mirror"),
        restored(named) as location,
    ):
        report = checks.verify(location, arguments.full)
        check_output_folder(report)
        plan = make_plan(report, arguments.logging_dir or location.logging_dir)
        lines = list(plan.describe())
        is_needed = plan.ranks or plan.markers
        if plan.unrepaired and not is_needed:
            lines.append("Repair can do nothing.")
        elif not is_needed:
            lines.append("There is nothing to repair.")
        for line in lines:
            say(line)
        if is_needed and arguments.dry_run:
            say("Nothing was done (--dry-run).")
        elif is_needed:
            if location.is_copy:
                check_idle(named, plan.ranks)
            apply_repair(plan, report)
            upload(location, plan.ranks)
            again = "Run the pipeline again to process these chunks"
            if plan.ranks and all(rank.root for rank in plan.ranks):
                again += ", as a retry of dead letters"
            numbers = sorted({rank.number for rank in plan.ranks})
            markers = ""
            if numbers and plan.logging_dir is None:
                names = ", ".join(f"LOGGING_DIR/completions/{number:05d}" for number in numbers)
                markers = f" Now remove {names}, or repair again with --logging-dir LOGGING_DIR."
            say(f"Done.{markers} {again}.")
    return int(bool(plan.unrepaired))
