"""Random sequences of what people do to a job, each run held against one oracle. See
``tests/people``.

A failure prints the fewest operations that show it, and the command that repeats them.
"""

import itertools
import time

import pytest

from tests.people.commands import Commands
from tests.people.search import explore
from tests.people.world import Tally

pytestmark = pytest.mark.xdist_group("people")  # one process that the others are forked from
SEQUENCES = 2
SLOW_SECONDS = 90.0


@pytest.fixture(scope="module")
def commands():
    with Commands() as running:
        yield running


def first_failure(commands, seeds):
    tally = Tally()
    found = next(explore(commands, seeds, tally), None)
    print(
        f"{tally.sequences} sequences, {tally.operations} operations, {tally.runs} runs, {tally.successes} successes"
    )
    return found, tally


@pytest.mark.timeout(1200)
def test_exit_code_0_means_every_document_is_there_whatever_people_did(commands):
    found, tally = first_failure(commands, iter(range(2, 2 + SEQUENCES)))
    assert found is None, f"\n{found}"
    assert tally.successes > SEQUENCES  # else the sequences end in refusals, and nothing is tested
    assert tally.finished_in_order > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_exit_code_0_means_every_document_is_there_after_many_more_sequences(
    commands,
):
    end = time.monotonic() + SLOW_SECONDS
    seeds = itertools.takewhile(
        lambda seed: seed < 1010 or time.monotonic() < end, itertools.count(1000)
    )
    found, tally = first_failure(commands, seeds)
    assert found is None, f"\n{found}"
    assert tally.successes > tally.sequences
