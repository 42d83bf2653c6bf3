"""Random sequences of what people do to a job, each run held against one oracle. See
``tests/people``.

A failure prints the fewest operations that show it, and the command that repeats them.
"""

import pytest

from tests.people.commands import Commands
from tests.people.search import explore
from tests.people.world import Tally

pytestmark = pytest.mark.xdist_group("people")  # one process that the others are forked from


@pytest.fixture(scope="module")
def commands():
    with Commands() as running:
        yield running


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first, number", [(2, 2), pytest.param(1000, 40, marks=pytest.mark.slow)])
def test_exit_code_0_means_every_document_is_there_whatever_people_did(commands, first, number):
    tally = Tally()
    found = next(explore(commands, range(first, first + number), tally), None)
    print(tally)
    assert found is None, f"\n{found}"
    # Else the sequences end in refusals, and nothing is tested.
    assert tally.successes > tally.sequences
    assert tally.finished_in_order > 0
