"""What people do to a job. Each operation draws its details from its own seed and from the world as
it is then.

So any part of a sequence can be carried out without the rest, and a failure can be reduced to what
it needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tests.people.world import World

Action: TypeAlias = Callable[[World, random.Random], str]
"""Does something, and says what it did; "" if there was nothing to do it to."""


@dataclass(frozen=True)
class Operation:
    """One step of a sequence. Its name and its seed say all."""

    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name}:{self.seed}"

    @classmethod
    def parse(cls, text: str) -> Operation:
        name, _, seed = text.partition(":")
        return cls(name, int(seed or 0))

    def apply(self, world: World) -> str:
        return ACTIONS[self.name](world, random.Random(f"{self.name} {self.seed}"))


ACTIONS: dict[str, Action] = {}
RUNS: list[str] = []
"""Names of the operations that run the job."""
WEIGHTS: dict[str, int] = {}
"""How often an operation is chosen, relative to the others of its sort."""


def action(weight: int = 2, run: bool = False) -> Callable[[Action], Action]:
    def register(function: Action) -> Action:
        name = function.__name__
        ACTIONS[name], WEIGHTS[name] = function, weight
        if run:
            RUNS.append(name)
        return function

    return register
