"""Random sequences of what people do to a job, each run held against one oracle. See ``tests/people``.

A failure prints the fewest operations that show it, and the command that repeats them.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import pytest

from tests.people.commands import Commands
from tests.people.inputs import expected
from tests.people.operations import ACTIONS, Operation
from tests.people.search import Found, explore, sequence, try_sequence
from tests.people.world import Tally, World

pytestmark = pytest.mark.xdist_group("people")  # one process that the others are forked from
SEQUENCES = 5
SLOW_SECONDS = 90.0


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as running:
        yield running


def first_failure(commands: Commands, seeds: Iterator[int]) -> tuple[Found | None, Tally]:
    tally = Tally()
    found = next(explore(commands, seeds, tally), None)
    print(f"{tally.sequences} sequences, {tally.operations} operations, {tally.runs} runs, {tally.successes} successes")
    return found, tally


@pytest.mark.timeout(1200)
def test_exit_code_0_means_every_document_is_there_whatever_people_did(commands: Commands) -> None:
    found, tally = first_failure(commands, iter(range(SEQUENCES)))
    assert found is None, f"\n{found}"
    assert tally.successes > SEQUENCES  # else the sequences end in refusals, and nothing is tested
    assert tally.finished_in_order > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_exit_code_0_means_every_document_is_there_after_many_more_sequences(commands: Commands) -> None:
    end = time.monotonic() + SLOW_SECONDS
    seeds = itertools.takewhile(lambda seed: time.monotonic() < end, itertools.count(1000))
    found, tally = first_failure(commands, seeds)
    assert found is None, f"\n{found}"
    assert tally.successes > tally.sequences


@pytest.mark.slow
def test_a_failure_is_printed_with_the_command_that_repeats_it(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_input_unseen(world: World, chance: random.Random) -> str:
        monkeypatch.setattr(world, "truth", lambda settings: expected({}, "", ""))
        return "falsify the truth"

    monkeypatch.setitem(ACTIONS, "remove_input_unseen", remove_input_unseen)
    found = try_sequence(commands, 0, [Operation.parse("remove_input_unseen:3"), Operation.parse("run:0")])
    assert found is not None
    assert found.signature == ("stranger", "remove_input_unseen", "run")
    assert str(found).endswith('python -m tests.people --seed 0 --replay "remove_input_unseen:3 run:0"')


def test_a_sequence_follows_from_its_seed_and_can_be_written_down() -> None:
    for seed in range(50):
        operations = sequence(seed)
        assert operations == sequence(seed)
        assert [Operation.parse(str(operation)) for operation in operations] == operations
