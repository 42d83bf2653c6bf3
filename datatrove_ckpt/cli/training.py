"""``status``, ``show``, ``report``, ``verify`` and ``doctor`` of a training's checkpoints; and
``plan``: how often a training should save, and how much time is lost then.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median

from datatrove_ckpt.cli.printing import say, say_result, write_page
from datatrove_ckpt.common.formatting import byte_size, duration, figure, plural, plural_or_no
from datatrove_ckpt.config.monitoring import name_of_folder
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.run_folder.report.page import clock, page, table
from datatrove_ckpt.torch import policies
from datatrove_ckpt.torch.training_history import (
    HISTORY,
    TrainingState,
    read_events,
    read_training,
)

_BARS = "▁▂▃▄▅▆▇█"


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


def report(arguments: argparse.Namespace) -> int:
    state = read_training(Path(arguments.what), full=False)
    signs = [
        [str(sign["rank"]), str(sign["step"]), clock(sign["at"]), sign["host"]]
        for sign in state.ranks
    ]
    written = page(
        name_of_folder(state.folder),
        state.folder,
        "",
        "running" if state.writer else "stopped",
        time.time(),
        _size(state).capitalize(),
        _topics(state),
        [
            table("Steps", _COLUMNS, [*_rows(state)]),
            table("Ranks", ("rank", "step", "last heartbeat", "host"), signs),
        ],
    )
    return write_page(arguments.output, Path(state.folder), written, "a training")


def verify(arguments: argparse.Namespace) -> int:
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
    checks = [
        {"state": verdict, "what": subject, "message": text}
        for verdict, subject, text in _find(state)
    ]
    problems = sum(check["state"] == "problem" for check in checks)
    lines = [f"{check['state']:<8} {check['what']}: {check['message']}" for check in checks]
    lines.append(f"{plural_or_no(problems, 'problem')} in {state.folder}")
    say_result(arguments.json, {"exit_code": int(problems > 0), "checks": checks}, lines)
    return int(problems > 0)


def _find(state: TrainingState) -> Iterator[tuple[str, str, str]]:
    """Yields a state (ok, warning or problem), what was checked, and what was found."""
    for step in state.damaged:
        yield "warning", step.folder, step.damage
    restored = state.restored
    if restored is None:
        yield "problem", "restore", _restore(state)
        return
    yield "ok", "restore", _restore(state)
    free = f"{byte_size(state.free_bytes)} are free"
    if state.free_bytes < restored.bytes:
        yield "problem", "disk", f"{free}, and a step needs {byte_size(restored.bytes)}. Make room."
    else:
        yield "ok", "disk", f"{free}."
    if state.writer:
        yield "warning", "lock", f"{state.writer} saves there now: another training cannot."


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
    for name in dict.fromkeys(name for _, row in state.curve for name in row):
        values = [(step, row.get(name)) for step, row in state.curve]
        points = [(at, value) for at, value in values if value is not None and math.isfinite(value)]
        if points:
            yield name, _plot(points)
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
        f"{len(signs)} of {first['ranks']}, the last heartbeat {newest} ago; the oldest {oldest} "
        f"ago at step {first['step']}, rank {first['rank']} on {first['host']}",
    )
    variables = {f"{each}={value}" for sign in signs for each, value in sign["variables"].items()}
    if variables:
        yield "NCCL", " ".join(sorted(variables))


def _plot(points: Sequence[tuple[int, float]]) -> str:
    """Draws a curve in at most 48 cells: their means, between the least and the greatest mean."""
    values = [value for _, value in points]
    count = min(48, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    least = min(means)
    span = (max(means) - least) or 1.0
    drawn = "".join(_BARS[int((mean - least) / span * (len(_BARS) - 1))] for mean in means)
    ends = ", ".join(f"{figure(value)} at {step}" for step, value in (points[0], points[-1]))
    return f"{drawn} {ends}; least {figure(min(values))}"


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


def plan(arguments: argparse.Namespace) -> int:
    """Prints the intervals by the model in ``torch/policies.py``.

    A save costs the ``pause_seconds`` in which the training stops, not the time of writes beside
    it.

    Raises:
        ConfigError: there is no history, or it lacks a figure that no flag gives.
    """
    save_cost = arguments.save_cost
    mtbf = arguments.mtbf
    if arguments.folder is not None:
        folder = Path(arguments.folder)
        path = folder / HISTORY
        if not path.is_file():
            raise ConfigError(
                f"{path}: there is no such file, so nothing can be measured. Give --save-cost and "
                "--mtbf."
            )
        events = list(read_events(folder))
        pauses = [event["pause_seconds"] for event in events if event["event"] == "saved"]
        restarts = [event["at"] for event in events if event["event"] == "restored"]
        if pauses:
            save_cost = save_cost or median(pauses)
        if len(restarts) >= 3:
            mtbf = mtbf or (restarts[-1] - restarts[0]) / (len(restarts) - 1)
    if not save_cost:
        raise ConfigError(
            "--save-cost is missing: how long a save stops training, such as 140s; or give FOLDER."
        )
    if not mtbf:
        raise ConfigError(
            "--mtbf is missing: the mean time between two losses, such as 6h. 3 restarts show it."
        )
    best = policies.daly(save_cost, mtbf)
    figures = {
        "save_cost": save_cost,
        "mtbf": mtbf,
        "young": policies.young(save_cost, mtbf),
        "daly": best,
    }
    figures["lost"] = 1 - policies.efficiency(best, save_cost, mtbf)
    lines = [
        f"training: a save takes {duration(save_cost)}; a loss every {duration(mtbf)}",
        f"  save every {figure(figures['young'])} s (Young)",
        f"  save every {figure(best)} s (Daly): {100 * figures['lost']:.2f} % of all time is lost",
    ]
    say_result(arguments.json, figures, lines)
    return 0
