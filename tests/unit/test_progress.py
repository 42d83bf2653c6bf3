"""The statistics at the end are those that datatrove's ``stat_update`` would have made, value by
value.
"""

import random

import pytest
from datatrove.utils.stats import MetricStatsDict, Stats

from datatrove_ckpt.checkpoint.clock import Seconds
from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.checkpoint.journal import Finished, Work
from datatrove_ckpt.checkpoint.lines import unseal
from datatrove_ckpt.checkpoint.work_stats import WorkStats
from datatrove_ckpt.generation.final_stats import RankNumbers


def test_stats_are_equal_to_those_made_one_by_one():
    expected, counts, one_by_one, work = (
        MetricStatsDict(),
        DocumentCounts(),
        DocumentCounts(),
        WorkStats(),
    )
    chance = random.Random(0)
    for _ in range(20):  # chunks
        chunk, documents = WorkStats(), []
        for number in range(100):
            # One rollout with at most one request, which was answered: nothing else is noted.
            usual = number % 3 == 0
            requests = [chance.randrange(2)] if usual else [chance.randrange(3) for _ in range(4)]
            outcome = "dead" if number % 10 == 0 else "written"
            kept = int(outcome == "written") if usual else chance.randrange(5)
            failed = 0 if usual else chance.randrange(sum(requests) + 1)
            tokens = []
            for _ in range(sum(requests) - failed):
                tokens += [chance.randrange(5000), chance.randrange(1, 3)]
                expected["prompt_tokens"].update(tokens[-2], "request")
                expected["completion_tokens"].update(tokens[-1], "request")
                expected["successful_requests"].update(1, "request")
            for _ in range(failed):
                expected["failed_requests"].update(1, "request")
            for count in requests:
                expected["requests"].update(count, "rollout")
            expected["successful_rollouts"].update(kept, "document")
            expected["failed_rollouts"].update(len(requests) - kept, "document")
            expected["skipped_bad_requests" if outcome == "dead" else "documents_processed"].update(
                1, "document"
            )
            totals = sum(requests), sum(tokens[::2]), sum(tokens[1::2])
            took = None if usual else Work(kept, failed, requests, tokens)
            ends = len(tokens) // 2, chance.randrange(2), chance.randrange(2)
            line = Finished(number, outcome, "", b"null", *totals, took, ends=ends).to_line()
            documents.append(Finished.from_body(unseal(line) or b"").took)
            outcomes = [outcome == each for each in ("written", "dropped", "dead")]
            one_by_one.add(DocumentCounts(1, *outcomes, *totals, *ends))
        counts.count(documents)
        chunk.count(documents)
        work.add(WorkStats.from_json(chunk.to_json()))
    assert counts == one_by_one
    stats = Stats("ours")
    numbers = RankNumbers(0)
    numbers.counts, numbers.work, numbers.seconds = counts, work, Seconds(3.5, 4.5)
    numbers.fill(stats)
    assert stats.stats.pop("inference_time").total == 3.5
    assert stats.time_stats.total == 4.5
    assert stats.stats.keys() == expected.keys()
    for name, metric in expected.items():
        assert vars(stats[name]) == pytest.approx(vars(metric)), name
        assert stats[name].variance == pytest.approx(metric.variance)
