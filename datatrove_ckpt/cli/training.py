"""``status``, ``show``, ``verify`` and ``doctor`` of the folder of a training's checkpoints."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

from datatrove_ckpt.cli.printing import say, say_result, takes_unicode
from datatrove_ckpt.common.formatting import byte_size, duration, figure, plural, plural_or_no
from datatrove_ckpt.run_folder.training import (
    SavedStep,
    TrainingState,
    examine_training,
    plotted,
    read_training,
)

_BARS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-=*#"


def status(arguments: argparse.Namespace) -> int:
    state = read_training(Path(arguments.what), full=False)
    say_result(arguments.json, state.to_json(), _describe(state))
    return int(state.restored is None)


def show(arguments: argparse.Namespace) -> int:
    """Prints a line for each step."""
    state = read_training(Path(arguments.what), full=False)
    rows = [_row(step, step is state.restored) for step in state.steps]
    say("\n".join([f"{'step':>12}  {'saved':<19}  {'size':>9}  metrics", *rows]))
    return int(not state.steps)


def verify(arguments: argparse.Namespace) -> int:
    """Reads all files of all steps."""
    state = read_training(Path(arguments.what), full=True)
    code = int(bool(state.damaged))
    lines = [f"{step.folder}: {step.damage}" for step in state.damaged]
    size = byte_size(sum(step.bytes for step in state.steps))
    count = plural_or_no(len(lines), "problem")
    lines.append(f"{count}: {plural(len(state.steps), 'step')}, {size} read. {_restore(state)}")
    say_result(arguments.json, state.to_json() | {"exit_code": code}, lines)
    return code


def doctor(arguments: argparse.Namespace) -> int:
    state = read_training(Path(arguments.config), full=True)
    findings = list(examine_training(state))
    problems = sum(finding.state == "problem" for finding in findings)
    lines = [f"{each.state:<8} {each.what}: {each.message}" for each in findings]
    lines.append(f"{plural_or_no(problems, 'problem')} in {state.folder}")
    content = {"exit_code": int(problems > 0), "checks": [each._asdict() for each in findings]}
    say_result(arguments.json, content, lines)
    return int(problems > 0)


def _restore(state: TrainingState) -> str:
    step = state.restored
    if step is None:
        return "No step is whole, so a restore fails."
    age = duration(max(1.0, time.time() - step.at))
    return f"A restore takes step {step.step}, saved {age} ago."


def _describe(state: TrainingState) -> Iterator[str]:
    size = byte_size(sum(step.bytes for step in state.steps))
    yield f"{state.folder}: a training, {plural(len(state.steps), 'step')}, {size}"
    yield f"  restore    {_restore(state)}"
    yield f"  steps      {', '.join(str(step.step) for step in state.steps)}"
    if state.saved:
        pause = duration(state.saved["pause_seconds"])
        written = duration(state.saved["write_seconds"])
        yield f"  saves      the last one stopped the training for {pause}, and took {written}"
    yield f"  disk       {byte_size(state.free_bytes)} free"
    if state.writer:
        yield f"  writer     {state.writer}"
    yield from _ranks(state)
    names = dict.fromkeys(name for _, row in state.curve for name in row)
    for name in names:
        yield from _plot(state, name)
    for step in state.damaged:
        yield f"  damaged    {step.damage}"


def _ranks(state: TrainingState) -> Iterator[str]:
    signs = sorted(state.ranks, key=itemgetter("at"))
    if not signs:
        return
    ages = [duration(max(1.0, time.time() - sign["at"])) for sign in signs]
    oldest = ages[0]
    newest = ages[-1]
    first = signs[0]
    yield (
        f"  ranks      {len(signs)} of {first['ranks']}, the last sign {newest} ago; the oldest "
        f"{oldest} ago at step {first['step']}, rank {first['rank']} on {first['host']}"
    )
    variables = {f"{each}={value}" for sign in signs for each, value in sign["variables"].items()}
    if variables:
        yield f"  NCCL       {' '.join(sorted(variables))}"


def _plot(state: TrainingState, name: str) -> Iterator[str]:
    found = [(step, row.get(name)) for step, row in state.curve]
    points = [(step, value) for step, value in found if value is not None and math.isfinite(value)]
    if points:
        values = [value for _, value in points]
        bars = _BARS if takes_unicode() else _ASCII
        drawn = plotted(values, bars)
        ends = ", ".join(f"{figure(value)} at {step}" for step, value in (points[0], points[-1]))
        yield f"  {name:<10} {drawn} {ends}; least {figure(min(values))}"


def _row(step: SavedStep, is_restored: bool) -> str:
    at = time.strftime("%F %T", time.localtime(step.at)) if step.at else ""
    known = {name: value for name, value in step.metrics.items() if value is not None}
    notes = " ".join(f"{name}={figure(value)}" for name, value in known.items())
    if is_restored:
        notes += "  <- a restore takes it"
    if step.damage:
        notes += f"  damaged: {step.damage}"
    number = f"{step.step}{''.join(step.folder.partition('.')[1:])}"
    return f"{number:>12}  {at:<19}  {byte_size(step.bytes):>9}  {notes.strip()}".rstrip()
