"""``datatrove-ckpt status``: the state of a whole run, and ``batches``. Imports no datatrove."""

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence

from datatrove_ckpt.checkpoint.rank_summary import describe_chunk
from datatrove_ckpt.cli import step_status
from datatrove_ckpt.cli.open_run import open_run, steps_of
from datatrove_ckpt.cli.printing import say, wrapped
from datatrove_ckpt.common.formatting import (
    duration,
    figure,
    filled_cells,
    percent,
    plural,
    ranges,
)
from datatrove_ckpt.run_folder import status_text
from datatrove_ckpt.run_folder.run_location import RunNotStarted, cancel_batch
from datatrove_ckpt.run_folder.run_state import (
    RankStatus,
    RunState,
    read_run_state,
    to_json,
    wanted_files,
)


def status(arguments: argparse.Namespace) -> int:
    try:
        steps = steps_of(arguments)
        if steps:
            return step_status.status(steps, arguments)
        with open_run(arguments, wanted_files) as location:
            state = read_run_state(location)
            lines = list(describe(state))
    except RunNotStarted as waiting:
        state = RunState(arguments.what, False, time.time())
        lines = [str(waiting)]
    if arguments.json:
        say(to_json(state).decode())
    else:
        if sys.stdout.isatty():
            lines = list(wrapped(lines, shutil.get_terminal_size().columns))
        if arguments.all and state.ranks:
            lines += ["", *table(state.all_ranks, state.read_at)]
        say("\n".join(lines))
    return int(state.is_damaged)


def batches(arguments: argparse.Namespace) -> int:
    with open_run(arguments, wanted_files) as location:
        state = read_run_state(location)
        opened = list(status_text.open_batches(state))
        for rank, batch in opened:
            say(status_text.describe_batch(rank, batch, state.read_at))
        if not opened:
            say("No batch is open.")
        if arguments.action == "list" or not opened:
            return 0
        problems = []
        for rank, batch in opened:
            problem = cancel_batch(location, rank.folder, batch)
            if problem is not None:
                problems.append(problem)
                continue
            say(f"The provider has forgotten {batch.id}. The next run pays for its requests again.")
    if problems:
        say(
            "\n".join(filter(None, problems))
            or "All are being canceled; the run still collects them."
        )
    return int(any(problems))


MAX_TROUBLED = 20
"""Most reasons shown for one trouble; the other tasks show only their numbers."""
_BAR = 24
_REST = "░"
_LABEL = 10


def describe(state: RunState) -> Iterator[str]:
    yield f"{state.what}: {status_text.ranks_of(state)}; {status_text.age(state)}"
    share = 1.0 if state.is_finished else state.totals.position.share
    bar = ""
    if share is not None:
        bar = f"{filled_cells(share, _BAR, _REST)} "
    yield f"  {bar}{status_text.progress_of(state)}"
    for topic, text in status_text.status_lines(state):
        yield f"  {topic:<{_LABEL}} {text}"
    yield ""
    yield from _describe_trouble(state)
    if not state.is_at_work:
        yield from _what_next(state)


def _what_next(state: RunState) -> Iterator[str]:
    if state.is_damaged:
        yield ("Nothing runs, and `run` refuses to start, unless a mirror has what is missing.")
        return
    if state.is_finished:
        return
    command = state.command or "the command that started it"
    reached = state.limits.reached(state.run_totals)
    if reached is not None:
        yield f"Nothing runs. {reached} The last command: {command}"
        return
    failed = [rank.rank for rank in state.ranks if rank.state == "failed"]
    if failed:
        log = ""
        if state.logs:
            log = f" Log: {state.logs}/logs/task_{failed[0]:05d}.log."
        yield (
            f"Nothing runs. First correct what ended {plural(len(failed), 'task')} "
            f"({ranges(failed)}).{log} To resume: {command}"
        )
    else:
        yield (
            "Nothing runs now, and the run is not finished. To resume, unless a queue or another "
            f"node will: {command}"
        )


def _describe_trouble(state: RunState) -> Iterator[str]:
    troubled = state.troubled
    if troubled:
        yield (
            f"{status_text.counted(len(troubled), 'task')} "
            f"{'needs' if len(troubled) == 1 else 'need'} attention:"
        )
    for trouble in dict.fromkeys(rank.trouble for rank in troubled):
        ranks = [rank for rank in troubled if rank.trouble == trouble]
        alike: dict[tuple[str, str], list[RankStatus]] = {}
        for rank in ranks:
            alike.setdefault((rank.root, rank.reason), []).append(rank)
        groups = list(alike.values())
        for group in groups[:MAX_TROUBLED]:
            first = group[0]
            places = describe_chunk(first.root, first.rank)
            if len(group) > 1:
                places = f"{first.root}, tasks {ranges([rank.rank for rank in group])}"
            reason = first.reason.replace("\n", "\n    ")
            yield f"  {places.removeprefix(', ')}: {trouble}: {reason}"
        further = [rank for group in groups[MAX_TROUBLED:] for rank in group]
        if further:
            yield (
                f"  also {trouble}: {status_text.counted(len(further), 'task')}: "
                f"{ranges([rank.rank for rank in further])}"
            )
    done = state.together.done
    if 2 * done.dead > done.read >= 20:
        often = "".join(f", most often {cause}" for cause, _ in state.causes.most_common(1))
        yield (
            f"Over half of the documents are dead letters{often}. Correct that, and retry them "
            "at the end."
        )
    elif not troubled:
        yield "No task needs attention."


_TABLE_BAR = 10


def table(ranks: Sequence[RankStatus], now: float) -> Iterator[str]:
    yield (
        f"{'task':>6}  {'state':<11}  {'input':<{_TABLE_BAR + 8}}  {'documents':>11}  "
        f"{'per second':>10}  {'left':>8}  {'changed':>8}  notes"
    )
    for rank in ranks:
        name = f"{rank.root}/{rank.rank}".lstrip("/")
        state = rank.trouble or rank.state
        share = 1.0 if rank.state == "finished" else rank.position.share
        done = rate = remaining = word = ""
        if share is not None:
            done = f"{filled_cells(share, _TABLE_BAR, _REST)} {percent(share):>7}"
        if rank.state == "running" and rank.rates.documents:
            rate = figure(rank.rates.documents)
        if rank.time_left is not None:
            remaining = duration(rank.time_left)
        if rank.last_word is not None and rank.state != "finished":
            word = duration(max(1.0, now - rank.last_word))
        notes = rank.reason.partition("\n")[0]
        if not notes and rank.state == "running":
            notes = rank.process
        numbers = f"{rank.documents:>11,}  {rate:>10}  {remaining:>8}  {word:>8}"
        yield f"{name:>6}  {state:<11}  {done:<{_TABLE_BAR + 8}}  {numbers}  {notes}".rstrip()
