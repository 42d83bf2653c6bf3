"""One formula for every wait between attempts."""

from __future__ import annotations

from datatrove_ckpt.backoff import backoff_seconds


def test_the_wait_doubles_up_to_the_longest() -> None:
    assert [backoff_seconds(failures, 0.5, 3) for failures in (1, 2, 3, 4, 5, 10**6)] == [0.5, 1, 2, 3, 3, 3]


def test_jitter_is_the_share_of_the_wait_that_is_random() -> None:
    half = [backoff_seconds(3, 1, 20, jitter=0.5) for _ in range(200)]
    full = [backoff_seconds(3, 1, 20, jitter=1) for _ in range(200)]
    assert 2 <= min(half) < max(half) <= 4
    assert 0 <= min(full) < 2 < max(full) <= 4
