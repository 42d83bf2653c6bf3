"""What a job of many ranks must not do for each of them; docs/internals/scale.md has the figures of
10,000.
"""

import shutil

import pytest

from tests.bench.ranks import make, measure


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.real_process
def test_ten_thousand_ranks_take_ten_times_as_long_as_a_thousand_and_little_memory(
    tmp_path,
):
    """Four chunks each, of the 83 in docs/internals/scale.md.

    Quadratic work would take a hundred times as long.
    """
    costs = {}
    for ranks in (1_000, 10_000):
        (folder := tmp_path / str(ranks)).mkdir()
        make(folder, ranks, 4)
        costs[ranks] = {
            tool: measure(folder, tool, ranks) for tool in ("status", "status --json", "run")
        }
        shutil.rmtree(folder)
    for tool, memory in (("status", 80), ("status --json", 150), ("run", 180)):
        assert costs[10_000][tool].memory < memory, costs
        assert costs[10_000][tool].cpu < 25 * costs[1_000][tool].cpu, costs
