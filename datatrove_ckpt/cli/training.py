"""``status``, ``show`` and ``verify`` of a training's checkpoints."""

import argparse
import math
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

from datatrove_ckpt.cli.printing import say, say_result
from datatrove_ckpt.common.formatting import byte_size, duration, figure, plural, plural_or_no
from datatrove_ckpt.torch.training_history import (
    TrainingState,
    read_training,
)


def status(arguments: argparse.Namespace) -> int:
    state = read_training(Path(arguments.what), full=False)
    lines = [f"{state.folder}: {_size(state)}"]
    lines += [f"  {topic:<10} {text}" for topic, text in _topics(state)]
    say_result(arguments.json, state.to_json(), lines)
    return int(state.restored is None)


def show(arguments: argparse.Namespace) -> int:
    state = read_training(Path(arguments.what), full=False)
    for number, at, size, notes in [_COLUMNS, *_rows(state)]:
        say(f"{number:>12}  {at:<19}  {size:>9}  {notes}".rstrip())
    return int(not state.steps)


def verify(arguments: argparse.Namespace) -> int:
    state = read_training(Path(arguments.what), full=True)
    code = int(bool(state.damaged))
    lines = [f"{step.folder}: {step.damage}" for step in state.damaged]
    size = byte_size(sum(step.bytes for step in state.steps))
    count = plural_or_no(len(lines), "problem")
    lines.append(f"{count}: {plural(len(state.steps), 'step')}, {size} read. {_restore(state)}")
    say_result(arguments.json, state.to_json() | {"exit_code": code}, lines)
    return code


def _restore(state: TrainingState) -> str:
    step = state.restored
    if step is None:
        return "No step is whole, so a restore fails."
    age = duration(max(1.0, time.time() - step.at))
    return f"A restore takes step {step.step}, saved {age} ago."


def _size(state: TrainingState) -> str:
    size = byte_size(sum(step.bytes for step in state.steps))
    return f"a training, {plural(len(state.steps), 'step')}, {size}"


def _topics(state: TrainingState) -> Iterator[tuple[str, str]]:
    yield "restore", _restore(state)
    yield "steps", ", ".join(str(step.step) for step in state.steps)
    if state.saved:
        pause = duration(state.saved["pause_seconds"])
        written = duration(state.saved["write_seconds"])
        yield "saves", f"the last save stopped the training for {pause}, and took {written}"
    yield "disk", f"{byte_size(state.free_bytes)} free"
    if state.writer:
        yield "writer", state.writer
    yield from _ranks(state)
    newest = {name: (value, at) for at, row in state.curve for name, value in row.items()}
    for name, (value, at) in newest.items():
        if value is not None and math.isfinite(value):
            yield name, f"{figure(value)} at {at}"
    for step in state.damaged:
        yield "damaged", step.damage


def _ranks(state: TrainingState) -> Iterator[tuple[str, str]]:
    signs = sorted(state.ranks, key=itemgetter("at"))
    if not signs:
        return
    ages = [duration(max(1.0, time.time() - sign["at"])) for sign in signs]
    oldest = ages[0]
    newest = ages[-1]
    first = signs[0]
    yield (
        "ranks",
        f"{len(signs)} of {first['ranks']}, last heartbeat {newest} ago; oldest {oldest} ago at "
        f"step {first['step']}, rank {first['rank']} on {first['host']}",
    )
    variables = {f"{each}={value}" for sign in signs for each, value in sign["variables"].items()}
    if variables:
        yield "NCCL", " ".join(sorted(variables))


_COLUMNS = ("step", "saved", "size", "metrics")


def _rows(state: TrainingState) -> Iterator[tuple[str, str, str, str]]:
    for step in state.steps:
        at = time.strftime("%F %T", time.localtime(step.at)) if step.at else ""
        metrics = {name: value for name, value in step.metrics.items() if value is not None}
        notes = " ".join(f"{name}={figure(value)}" for name, value in metrics.items())
        if step is state.restored:
            notes += "  <- a restore takes it"
        if step.damage:
            notes += f"  damaged: {step.damage}"
        number = f"{step.step}{''.join(step.folder.partition('.')[1:])}"
        yield number, at, byte_size(step.bytes), notes.strip()
