"""How often the ranks of a job commit to one repository."""

from __future__ import annotations

import heapq
import random

import pytest

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.output.hub_pace import HOUR, CommitPace, History, MadeCommit, commit_title


def made(ages: list[float], ranks: int = 1) -> History:
    """Newest first."""
    titles = [commit_title("1 file", n % ranks, "0") for n in range(len(ages))]
    return History(0.0, tuple(MadeCommit(f"{n}", -age, titles[n]) for n, age in enumerate(ages)))


def test_one_rank_waits_until_the_oldest_commit_is_an_hour_old() -> None:
    for _ in range(20):
        assert 600 <= CommitPace(per_hour=8).seconds_until_turn(made([0, 1, 2, HOUR - 600, HOUR + 600])) <= 602


def test_ranks_wait_for_different_turns() -> None:
    ages = [HOUR - 10.0 * n for n in range(4, 0, -1)]
    waits = {round(CommitPace(per_hour=8).seconds_until_turn(made(ages, ranks=3)), -1) for _ in range(200)}
    assert waits == {10, 20, 30}


def test_files_wait_for_at_most_the_given_time_and_ranks_do_not_commit_together() -> None:
    waits = [CommitPace(300).seconds_of_next() for _ in range(100)]
    assert min(waits) >= 150
    assert max(waits) <= 300
    assert len(set(waits)) > 90
    assert CommitPace(0).seconds_of_next() == 0


@pytest.mark.parametrize(
    ("seconds", "per_hour", "message"),
    [
        (-1, 112, "hub_commit_seconds: must be >= 0; it is -1."),
        (float("nan"), 112, "hub_commit_seconds: must be >= 0; it is nan."),
        (300, 0, "hub_commits_per_hour: must be >= 1; it is 0."),
    ],
)
def test_numbers_that_cannot_be(seconds: float, per_hour: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CommitPace(seconds, per_hour)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [30, 1, 300])
def test_ranks_that_look_before_each_commit_keep_to_the_number_and_use_nearly_all_of_it(ranks: int) -> None:
    # Ten hours, in which each rank always has a file to commit.
    random.seed(ranks)
    pace = CommitPace(seconds=300, per_hour=112)
    history: list[tuple[float, int]] = []
    waited, looks = [0] * ranks, 0
    events = [(pace.seconds_of_next(), rank) for rank in range(ranks)]
    heapq.heapify(events)
    while events[0][0] < 10 * HOUR:
        now, rank = heapq.heappop(events)
        recent = [
            MadeCommit("", at, commit_title("1 file", by, "0")) for at, by in reversed(history) if now - at < HOUR
        ]
        wait = pace.seconds_until_turn(History(now, tuple(recent)), waited[rank], ends=True)
        waited[rank] += 1
        looks += 1
        if not wait:
            history.append((now, rank))
            wait, waited[rank] = pace.seconds_of_next(), 0
        heapq.heappush(events, (now + wait, rank))
    times = [at for at, _ in history]
    busiest = max(sum(start <= at < start + HOUR for at in times) for start in times)
    assert busiest <= 112
    possible = min(112.0, ranks * 12) * 10
    assert len(times) > 0.85 * possible
    each = [sum(by == rank for _, by in history) for rank in range(ranks)]
    assert ranks > 112 or min(each) >= 5  # nobody waits for long
    assert looks < 15 * len(times)  # each is a request or three


def test_some_commits_of_an_hour_are_for_ranks_that_end() -> None:
    pace, history = CommitPace(per_hour=3), made([600, 700])
    assert pace.seconds_until_turn(history) > 0
    assert pace.seconds_until_turn(history, ends=True) == 0
    assert pace.seconds_until_turn(made([1, 600, 700]), ends=True) > 0
    assert CommitPace(per_hour=1).seconds_until_turn(made([])) == 0
