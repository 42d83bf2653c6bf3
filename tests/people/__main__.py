"""``python -m tests.people --seconds 600 --seed 0``: searches for broken promises."""

import argparse
import itertools
import time

from tests import forked
from tests.people.commands import Commands
from tests.people.operations import Operation
from tests.people.search import explore, sequence, try_sequence
from tests.people.world import Tally


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.people", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to search")
    parser.add_argument("--seed", type=int, default=0, help="the first sequence; the others follow")
    parser.add_argument(
        "--replay", metavar="OPERATIONS", help="carry out these in the world of --seed"
    )
    arguments = parser.parse_args()
    forked.install()
    with Commands() as commands:
        if arguments.replay is not None:
            return _replay(commands, arguments.seed, arguments.replay)
        return _search(commands, arguments)


def _replay(commands, seed, text):
    operations = [Operation.parse(word) for word in text.split()] or sequence(seed)
    found = try_sequence(commands, seed, operations)
    print(found or "no promise is broken")
    return found is not None


def _search(commands, arguments):
    started_at, tally = time.monotonic(), Tally()

    seeds = itertools.takewhile(
        lambda seed: time.monotonic() - started_at < arguments.seconds,
        itertools.count(arguments.seed),
    )
    failures = 0
    for failures, found in enumerate(explore(commands, seeds, tally), 1):
        print(f"{failures}. {found}\n", flush=True)
    print(tally)
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
