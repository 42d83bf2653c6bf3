"""``datatrove-ckpt plan`` for training: how often a loop should save, from what saves, steps and losses cost.

The model is that of ``checkpoint/interval.py``. The work does stop during a save here, for its ``pause_seconds``; what
is written beside the training is not in the model. ``cli/run.py`` prints the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from datatrove_ckpt.checkpoint.interval import daly, efficiency, young
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import duration, figure, plural, short

HISTORY = "history.jsonl"
_KEYS = {"saved": ("at", "step", "pause_seconds", "bytes"), "restored": ("at", "seconds")}


def measure(folder: Path) -> dict[str, float]:
    """What the training's history tells of the fields of ``Training``: medians, and the mean time between its starts.

    Raises:
        ConfigError: there is no history, or a line of it is none.
    """
    events = list(_events(folder / HISTORY))
    saved = [event for event in events if "step" in event]
    starts = [event for event in events if "step" not in event]
    pause = median([event["pause_seconds"] for event in saved] or [0.0])
    # With no start between two saves, both are of one process. A pause is in the time between them.
    pairs = [(one, two) for one, two in pairwise(events) if two.get("step", 0) > one.get("step", math.inf)]
    steps = [(two["at"] - one["at"] - pause) / (two["step"] - one["step"]) for one, two in pairs]
    return {
        "save_cost": pause,
        "mtbf": (starts[-1]["at"] - starts[0]["at"]) / (len(starts) - 1) if len(starts) >= 3 else 0.0,
        "step": median([seconds for seconds in steps if seconds > 0] or [0.0]),
        "restart": median([event["seconds"] for event in starts] or [0.0]),
        "state_size": median([event["bytes"] for event in saved] or [0.0]),
    }


def _events(path: Path) -> Iterator[dict[str, float]]:
    """The numbers of each save, and of each start; only the first have a "step". The last line may be torn."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file, so nothing can be measured. Give --save-cost and --mtbf.")
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            event = json.loads(line)
            numbers = {key: float(event[key]) for key in _KEYS.get(event["event"], ())}
            if not all(0 <= value < 1e18 for value in numbers.values()):
                raise ValueError(f"{numbers}")
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith(b"\n"):
                return
            raise ConfigError(f"{path}, line {number}: is no event of a training: {error!r}.") from error
        if numbers:
            yield numbers


@dataclass(frozen=True)
class Training:
    """What is known, in seconds and bytes; 0: not known. The names are those of the flags.

    Raises:
        ConfigError: the cost of a save, or the mtbf, is not known.
    """

    save_cost: float = 0.0
    mtbf: float = 0.0
    step: float = 0.0
    restart: float = 0.0
    state_size: float = 0.0
    nodes: int = 1
    keep: int = 0

    def __post_init__(self) -> None:
        if self.save_cost <= 0:
            raise ConfigError("--save-cost is missing: how long a save stops training, such as 140s; or give CONFIG.")
        if self.mtbf <= 0:
            raise ConfigError("--mtbf is missing: the mean time between two losses, such as 6h. 3 restarts tell it.")
        if self.keep and not self.state_size:
            raise ConfigError("--keep: --state-size is missing, such as 12GB.")

    def plan(self) -> dict[str, float]:
        """Intervals in seconds, and what the best one gives: shares of all time, from 0 to 1, and saves per day."""
        mtbf = self.mtbf / self.nodes
        best = max(daly(self.save_cost, mtbf), self.step)
        useful = efficiency(best, self.save_cost, mtbf, self.restart)
        saves, restarts = useful * self.save_cost / best, -math.expm1(-self.restart / mtbf)
        found = {"young": young(self.save_cost, mtbf), "daly": daly(self.save_cost, mtbf), "interval": best}
        found |= {"efficiency": useful, "lost": 1 - useful, "saves": saves, "restarts": restarts}
        return found | {"again": 1 - useful - saves - restarts, "saves_per_day": 86400 * useful / best}

    def describe(self) -> Iterator[str]:
        """All of it as lines of text."""
        plan, loss = self.plan(), duration(self.mtbf / self.nodes)
        if self.nodes > 1:
            loss += f" ({duration(self.mtbf)} of one node, divided by {self.nodes:,} nodes)"
        costs = {"save": self.save_cost, "step": self.step, "restart": self.restart}
        told = ", ".join(f"a {name} takes {duration(seconds)}" for name, seconds in costs.items() if seconds)
        yield f"training: {told}; a loss every {loss}"
        for name in ("young", "daly"):
            steps = f" = {plural(max(1, round(plan[name] / self.step)), 'step')}" if self.step else ""
            yield f"  save every {figure(plan[name])} s{steps} ({name.capitalize()})"
        lost, saves, again, restarts = (f"{100 * plan[name]:.2f} %" for name in ("lost", "saves", "again", "restarts"))
        yield f"  lost at Daly's: {lost} of all time (saves {saves}, work {again}, restarts {restarts})"
        yield f"  efficiency {100 * plan['efficiency']:.2f} %; {figure(plan['saves_per_day'])} checkpoints per day"
        if size := self.state_size:
            yield f"  {short(size)}B each, {short(size * plan['saves_per_day'])}B per day"
        if kept := self.keep:
            yield f"  {short(kept * size)}B on disk ({kept} kept), {short((kept + 1) * size)}B during a save"
