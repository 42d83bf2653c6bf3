"""``datatrove-ckpt fork``: says what a new run keeps and costs, then makes its checkpoint folder.

Exit codes: 0 made (with --dry-run: would be); 1 the other run is damaged or running, or the disk refused something; 2 a
mistake in a file or on the command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from datatrove_ckpt.checkpoint.fields import RunIdentity
from datatrove_ckpt.checkpoint.identity import Change, compare
from datatrove_ckpt.cli.overrides import make_executor
from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.cli.what import place_of
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.maintenance import repair_mirror
from datatrove_ckpt.maintenance.fork import (
    Fork,
    built,
    check_mirror,
    check_source,
    check_target,
    is_made,
    put_in_place,
    upload,
)
from datatrove_ckpt.maintenance.fork_source import Source, real_place
from datatrove_ckpt.maintenance.inspect import find_ranks
from datatrove_ckpt.maintenance.read_state import read_run_state
from datatrove_ckpt.maintenance.run_state import RankState, RunState
from datatrove_ckpt.maintenance.where import Place, is_config
from datatrove_ckpt.preflight.run_plan import RunnerPlan, RunPlan
from datatrove_ckpt.process.task_errors import log_disabled


@dataclass
class NewRun:
    """The run to start.

    Attributes:
        folder: its ``checkpoints_local_dir``.
        config: its YAML file; None: only the folder was given.
        runner: its runner, if there is a file.
        logging_dir: likewise, its executor's.
    """

    folder: Path
    config: str | None = None
    runner: RunnerPlan | None = None
    logging_dir: str = ""
    changes: list[Change] = field(default_factory=list)

    @property
    def mirror(self) -> str | None:
        """Its ``checkpoints_remote_dir``, if there is a file that names one."""
        return None if self.runner is None else self.runner.step.checkpoints_remote_dir

    @cached_property
    def identity(self) -> RunIdentity | None:
        """What it will be; None without a file."""
        return None if self.runner is None else self.runner.identity


def fork(arguments: argparse.Namespace) -> int:
    """Says what is kept and what the new run costs, and makes it. Returns the exit code."""
    new = _new_run(arguments)
    with _place_of(arguments, new) as place:
        if not place.is_copy:
            return _fork(arguments, place, new)
        with repair_mirror.restored(place) as copy:
            return _fork(arguments, copy, new)


def _new_run(arguments: argparse.Namespace) -> NewRun:
    if not is_config(arguments.new):
        return NewRun(Path(arguments.new))
    with log_disabled(*_NOT_ABOUT_IT):
        executor = make_executor(argparse.Namespace(config=arguments.new, overrides=arguments.overrides))
    plan = RunPlan.of(executor)
    kept = [runner for runner in plan.runners if runner.step.checkpoints_local_dir]
    if len(kept) != 1:
        raise ConfigError(
            f"{arguments.new}: {len(kept)} of its steps keep a checkpoint. Name the new checkpoint folder instead of "
            "the file."
        )
    logs = plan.logging_dir.resolve_paths("")
    return NewRun(kept[0].step.checkpoints_root, arguments.new, kept[0], str(logs))


def _place_of(arguments: argparse.Namespace, new: NewRun) -> AbstractContextManager[Place]:
    """The other run. The overrides are the new run's, if it has a file."""
    overrides = [] if new.config is not None else arguments.overrides
    return place_of(argparse.Namespace(what=arguments.what, overrides=overrides), trusted=True)


def _fork(arguments: argparse.Namespace, place: Place, new: NewRun) -> int:
    source = place.what if place.is_copy else str(place.folder.absolute())
    check_source(place.folder)
    run = Source.read(place.folder, find_ranks(place.folder))
    if new.identity is not None:
        new.changes = compare(run.settings, new.identity)
        _check_new(new, run, place)
    if not arguments.no_answers and is_made(new.folder, source):
        say(f"{new.folder} is this fork already, and has not started. To make it anew, remove it first.")
        say(_what_next(new))
        return 0
    check_target(place.folder, new.folder)
    why = None if arguments.no_answers else run.why_unusable(new.identity)
    with log_disabled(*_NOT_ABOUT_IT), built(place.folder, source, new.folder, why) as (found, folder):
        state = read_run_state(replace(place, mirror=None))
        for line in _costs(place.what, run, found, state, new, arguments):
            say(line)
        if arguments.dry_run:
            say("Nothing was done (--dry-run).")
            return 0
        if new.mirror is not None:
            upload(folder, new.mirror)
        put_in_place(folder, new.folder)
    say(_what_next(new))
    return 0


def _check_new(new: NewRun, run: Source, place: Place) -> None:
    """
    Raises:
        ConfigError: the new run has a folder of the other one, or another number of tasks.
    """
    changed = {change.field: change for change in new.changes}
    if "tasks" in changed:
        raise ConfigError(
            f"{new.config}: tasks: {changed['tasks'].shown_old} -> {changed['tasks'].shown_new}. Each task's share of "
            "the input would be another one, so nothing could be kept. Leave tasks as they are, or start a new run; or "
            "fork first, start each task once, then deal the rest out with `datatrove-ckpt reshard`."
        )
    settings = {} if new.identity is None else new.identity.fields
    output = str(settings["output_folder"])
    if (real_place(output), settings["output_filename"]) in run.outputs:
        raise ConfigError(
            f"{new.config}: output_folder: {output} is that of {place.what}. Choose another one: the new run would "
            "write over the other one's files."
        )
    if _is_used(new.logging_dir, place.logging_dir):
        raise ConfigError(
            f"{new.config}: logging_dir: {new.logging_dir} is another run's: datatrove skips the tasks that it marks "
            "as complete there. Choose another one."
        )
    if new.mirror is not None:
        check_mirror(new.mirror)


def _is_used(logging_dir: str, other: str | None) -> bool:
    """Whether it is the other run's, as far as a file tells that, or has markers of finished tasks."""
    here = real_place(logging_dir)
    if other is not None and here == real_place(other):
        return True
    markers = Path(here, "completions")
    return "://" not in here and markers.is_dir() and any(markers.iterdir())


def _costs(
    what: str, run: Source, found: Fork, state: RunState, new: NewRun, arguments: argparse.Namespace
) -> Iterator[str]:
    totals = state.totals
    yield f"{what}: {plural(found.ranks, 'task')}, {plural(totals.documents, 'finished document')}"
    if new.config is not None:
        yield f"changed: {_changed(what, run, new)}"
    yield (
        f"input: {plural(found.positions, 'position')} in it kept, with the fingerprint of the document there: the new "
        "run stops if it reads another input"
    )
    answers = found.answers
    if arguments.no_answers:
        yield "answers: none is kept (--no-answers)"
    for why, ranks in found.unusable.items():
        whose = "answers: none" if ranks == found.ranks else f"answers of {ranks} of {plural(found.ranks, 'task')}"
        yield f"{whose} can{'' if ranks == found.ranks else 'not'} be used: {why}"
    if not arguments.no_answers and found.unusable.total() < found.ranks:
        yield f"answers: {_kept(run, found, state, new, arguments)}"
    dropped = totals.counts.read - answers.committed
    yield f"not kept: results, and the answers of {plural(dropped, 'committed document')}"
    total, how = _documents(found, state)
    if not totals.documents:
        yield f"cost: not known {how} {plural(total, 'document')}, because none is finished in {what}"
        return
    more, each = _rollouts(run, new)
    sums = (getattr(totals.counts, name) + getattr(totals.unfinished, name) for name in _SUMS)
    requests, prompt, completion = (round(number * more * total / totals.documents) for number in sums)
    yield (
        f"cost: {how} {plural(total, 'document')}, if each {each}: {_amount(requests, prompt, completion, arguments)}, "
        "less what is not paid again"
    )


def _kept(run: Source, found: Fork, state: RunState, new: NewRun, arguments: argparse.Namespace) -> str:
    answers = found.answers
    if answers.requests:
        saved = _amount(answers.requests, answers.prompt_tokens, answers.completion_tokens, arguments)
        return (
            f"{answers.requests} of {plural(answers.documents, 'document')} kept. One is used if the final payload of "
            f"a request is equal, so at most {saved} are not paid again{_but(run, new)}"
        )
    if not state.totals.not_started and all(rank.state == "finished" for rank in state.ranks):
        return "none; the old run has committed all its documents"
    return "none; the old run has saved none of documents that it has not committed"


def _but(run: Source, new: NewRun) -> str:
    """What changes payloads, so that their answers may not be used."""
    names = [change.field for change in new.changes if change.field.startswith(_MAKES_PAYLOADS)]
    if run.is_unstarted or not names:
        return ""
    return f". It may be none, because what payloads are made of changed: {', '.join(names)}"


def _rollouts(run: Source, new: NewRun) -> tuple[float, str]:
    """How many times as many rollouts there will be, and what is taken to cost as much as before."""
    old = run.settings.get(_ROLLOUTS)
    wanted = old if new.identity is None else new.identity.fields.get(_ROLLOUTS)
    if not old or not wanted or old == wanted:
        return 1.0, "takes what it took before"
    return wanted / old, f"rollout takes what it took before, {wanted} per document instead of {old}"


def _changed(what: str, run: Source, new: NewRun) -> str:
    names = [change.field for change in new.changes if not change.field.startswith("output_")]
    if run.is_unstarted:
        return ", ".join(names) or f"not known, because {what} is a fork that has not started"
    return ", ".join(names) or "nothing that decides about answers"


_ROLLOUTS = "rollouts_per_document"
_NOT_ABOUT_IT = ("datatrove", "datatrove_ckpt")  # these logs are about the other run, or about a copy of it
_MAKES_PAYLOADS = ("rollout_fn", "shared_context", "imports.", "default_generation_params", "seed")
_SUMS = ("requests", "prompt_tokens", "completion_tokens")


def _documents(found: Fork, state: RunState) -> tuple[int, str]:
    """How many documents the input has, and how well that is known. Unknown ranks have as many as others."""
    finished = {rank.rank: rank.documents for rank in state.ranks if rank.state == "finished"} | found.documents
    others = [rank for rank in state.ranks if rank.rank not in finished]
    if not others and not state.totals.not_started:
        return sum(finished.values()), "for"
    guessed = {rank.rank: guess for rank in others if (guess := _guess(rank))}
    if not (known := finished | guessed):
        return state.totals.documents, "for at least"
    mean = round(sum(known.values()) / len(known))
    rest = sum(max(mean, rank.documents) for rank in others if rank.rank not in guessed)
    return sum(known.values()) + rest + mean * state.totals.not_started, "for about"


def _guess(rank: RankState) -> int | None:
    """From its position in the input, and the documents that were done then."""
    done = rank.attempt.documents if rank.attempt is not None else None
    if not done or not rank.position.done or not rank.position.total:
        return None
    return max(rank.documents, round(done * rank.position.total / rank.position.done))


def _amount(requests: int, prompt: int, completion: int, arguments: argparse.Namespace) -> str:
    text = f"{plural(requests, 'request')}, {prompt:,} prompt and {completion:,} completion tokens"
    if arguments.price_per_million_tokens is None:
        return text
    prices = arguments.price_per_million_tokens
    return f"{text} ({(prompt * prices[0] + completion * prices[1]) / 1e6:,.2f})"


def _what_next(new: NewRun) -> str:
    if new.config is not None:
        where = f"{new.folder} and {new.mirror}" if new.mirror is not None else str(new.folder)
        return f"Made {where}. Start the new run: datatrove-ckpt run {new.config}, with the same overrides."
    return (
        f"Made {new.folder}. Start the new run with checkpoints_local_dir: {new.folder}, and with an output_folder and "
        "a logging_dir of its own."
    )
