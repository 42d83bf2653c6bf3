"""Searches for sequences that break a promise, and reduces each to the operations that it needs."""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.people import editing, running, tampering  # noqa: F401 (they register their operations)
from tests.people.commands import error_of
from tests.people.operations import ACTIONS, RUNS, WEIGHTS, Operation
from tests.people.oracle import Failure
from tests.people.world import Tally, World

_TRIES = 4  # runs within which a job in order must finish
_ALWAYS = ("put_back", "start_over", "do_what_it_says", "run")


@dataclass
class Found:
    """A broken promise.

    Attributes:
        seed: of the world: its settings and its input at first.
        operations: what was done to it.
        steps: the same, in words, with what came of it.
    """

    seed: int
    operations: list[Operation]
    steps: list[str]
    failure: Failure

    def __str__(self):
        replay = " ".join(map(str, self.operations))
        steps = "\n".join(f"  {step}" for step in self.steps)
        return f'{steps}\n  -> {self.failure}\n  python -m tests.people --seed {self.seed} --replay "{replay}"'


def sequence(seed):
    """The operations of a sequence: four in ten run the job, the others are of a few kinds, so that
    each kind meets worlds that others have not disturbed (swarm testing; Groce et al. 2012). Half
    begin with a run, because most operations need one.
    """
    chance = random.Random(f"sequence {seed}")
    others = [name for name in ACTIONS if name not in RUNS and name not in _ALWAYS]
    runs = [name for name in RUNS if name not in _ALWAYS]
    kinds = [*chance.sample(others, chance.randint(2, 6)), "put_back", "start_over"]
    ways = [*chance.sample(runs, chance.randint(0, 3)), "run", "do_what_it_says"]
    operations = (
        [Operation(chance.choice(ways), chance.randrange(1000))] if chance.random() < 0.5 else []
    )
    for _ in range(chance.randint(4, 12)):
        names = ways if chance.random() < 0.4 else kinds
        (name,) = chance.choices(names, [WEIGHTS[name] for name in names])
        operations.append(Operation(name, chance.randrange(1000)))
    return [*operations, Operation("run", 0)]


def try_sequence(commands, seed, operations, tally=None):
    """Carries out the operations in a new world, then puts it in order.

    Returns the first broken promise, if any.
    """
    tally = tally or Tally()
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="datatrove-ckpt-people-"))
    steps = []
    done = []
    tally.sequences += 1
    try:
        with World(folder / "world", commands, random.Random(f"world {seed}"), tally) as world:
            steps.append(str(world))
            for operation in operations:
                tally.operations += 1
                steps.append(operation.name)  # replaced by what it did, if it returns
                done.append(operation)
                steps[-1] = operation.apply(world)
                if not steps[-1]:
                    steps.pop()
                    done.pop()
            _finish(world, steps)
    except Failure as failure:
        return Found(seed, done, steps, failure)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def _finish(world, steps):
    """Puts back what a job needs, and lets it finish."""
    if not world.must_finish():
        return
    steps.append("put everything back")
    world.put_back()
    for _ in range(_TRIES):
        (ended,) = world.run()
        steps.append(f"run: exit {ended.code}")
        if ended.code == 0:
            world.tally.finished_in_order += 1
            return
    raise Failure(
        "stuck",
        f"settings, input and endpoint are put back, and {_TRIES} runs fail\n{error_of(ended)}",
    )


def shortest(commands, found):
    """The same failure with as few operations as possible."""
    shrunk = True
    while shrunk:
        shrunk = False
        for place in reversed(range(len(found.operations))):
            candidate = [*found.operations[:place], *found.operations[place + 1 :]]
            again = try_sequence(commands, found.seed, candidate)
            if again is not None and again.failure.kind == found.failure.kind:
                found, shrunk = again, True
                break
    return found


def explore(commands, seeds, tally):
    """Failures of the sequences of these seeds, each reduced."""
    for seed in seeds:
        found = try_sequence(commands, seed, sequence(seed), tally)
        if found is not None:
            yield shortest(commands, found)
