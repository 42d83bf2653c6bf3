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
    expected, one_by_one = MetricStatsDict(), DocumentCounts()
    counts, work = DocumentCounts(), WorkStats()
    chance = random.Random(0)
    for _ in range(20):  # chunks
        chunk, documents = WorkStats(), []
        for number in range(100):
            # One rollout with at most one request, which was answered: nothing else is noted.
            usual = number % 3 == 0
            requests = [chance.randrange(2)] if usual else [chance.randrange(3) for _ in range(4)]
            is_dead = number % 10 == 0
            kept = int(not is_dead) if usual else chance.randrange(5)
            failed = 0 if usual else chance.randrange(sum(requests) + 1)
            tokens = [chance.randrange(1, 5000) for _ in range(2 * (sum(requests) - failed))]
            updates = [("prompt_tokens", "request", each) for each in tokens[::2]]
            updates += [("completion_tokens", "request", each) for each in tokens[1::2]]
            updates += [("successful_requests", "request", 1) for _ in tokens[::2]]
            updates += [("failed_requests", "request", 1)] * failed
            updates += [("requests", "rollout", count) for count in requests]
            updates += [
                ("successful_rollouts", "document", kept),
                ("failed_rollouts", "document", len(requests) - kept),
                ("skipped_bad_requests" if is_dead else "documents_processed", "document", 1),
            ]
            for name, unit, value in updates:
                expected[name].update(value, unit)
            totals = sum(requests), sum(tokens[::2]), sum(tokens[1::2])
            took = None if usual else Work(kept, failed, requests, tokens)
            ends = len(tokens) // 2, chance.randrange(2), chance.randrange(2)
            outcome = "dead" if is_dead else "written"
            line = Finished(number, outcome, "", b"null", *totals, took, ends=ends).to_line()
            documents.append(Finished.from_body(unseal(line)).took)
            one_by_one.add(DocumentCounts(1, not is_dead, 0, is_dead, *totals, *ends))
        counts.count(documents)
        chunk.count(documents)
        work.add(WorkStats.from_json(chunk.to_json()))
    assert counts == one_by_one
    stats, numbers = Stats("ours"), RankNumbers(0)
    numbers.counts, numbers.work, numbers.seconds = counts, work, Seconds(3.5, 4.5)
    numbers.fill(stats)
    assert stats.stats.pop("inference_time").total == 3.5
    assert stats.time_stats.total == 4.5
    assert stats.stats.keys() == expected.keys()
    for name, metric in expected.items():
        assert vars(stats[name]) == pytest.approx(vars(metric)), name
