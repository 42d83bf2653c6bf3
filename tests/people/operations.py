"""What people do to a job. Each operation draws its details from its own seed and from the world as
it is then.

So any part of a sequence can be carried out without the rest, and a failure can be reduced to what
it needs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

"""Does something, and says what it did; "" if there was nothing to do it to."""


@dataclass(frozen=True)
class Operation:
    """One step of a sequence. Its name and its seed say all."""

    name: str
    seed: int

    def __str__(self):
        return f"{self.name}:{self.seed}"

    @classmethod
    def parse(cls, text):
        name, _, seed = text.partition(":")
        return cls(name, int(seed or 0))

    def apply(self, world):
        return ACTIONS[self.name](world, random.Random(f"{self.name} {self.seed}"))


ACTIONS = {}
RUNS = []
"""Names of the operations that run the job."""
WEIGHTS = {}
"""How often an operation is chosen, relative to the others of its sort."""


def action(weight=2, run=False):
    def register(function):
        name = function.__name__
        ACTIONS[name], WEIGHTS[name] = function, weight
        if run:
            RUNS.append(name)
        return function

    return register
