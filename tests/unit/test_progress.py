"""The statistics at the end are those that datatrove's ``stat_update`` would have made, value by value."""

from __future__ import annotations

import random

import pytest
from datatrove.utils.stats import MetricStatsDict, Stats

from datatrove_ckpt.checkpoint.commits import DocumentCounts
from datatrove_ckpt.generation.progress import Progress
from datatrove_ckpt.inference.client.answers import Completion


def test_stats_are_equal_to_those_made_one_by_one_over_two_ranks_of_one_step() -> None:
    stats, expected = Stats("ours"), MetricStatsDict()
    chance = random.Random(0)
    for _ in range(2):
        progress = Progress(stats, DocumentCounts(), interval=1, bar=False)
        for number in range(1000):
            prompt, completion = chance.randrange(5000), chance.randrange(1, 3)
            progress.answered(
                Completion("", "stop", {"prompt_tokens": prompt, "completion_tokens": completion or None})
            )
            expected["prompt_tokens"].update(prompt, "request")
            expected["completion_tokens"].update(completion, "request")
            expected["successful_requests"].update(1, "request")
            requests = [chance.randrange(3) for _ in range(4)]
            kept = chance.randrange(5)
            progress.finished("dead" if number % 10 == 0 else "written", kept, requests)
            for count in requests:
                expected["requests"].update(count, "rollout")
            expected["successful_rollouts"].update(kept, "document")
            expected["failed_rollouts"].update(4 - kept, "document")
            expected["skipped_bad_requests" if number % 10 == 0 else "documents_processed"].update(1, "document")
        progress.request_failed()
        expected["failed_requests"].update(1, "request")
        progress.close()
        progress.close()  # counts nothing twice
    assert stats.stats.keys() == expected.keys()
    for name, metric in expected.items():
        assert vars(stats[name]) == pytest.approx(vars(metric)), name
        assert stats[name].variance == pytest.approx(metric.variance)
