"""Which request of a rank waits for the longest time, as ``status`` and the metrics ask in any thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from datatrove_ckpt.generation.progress import Newest, RankReporter
from datatrove_ckpt.inference.client.routing import Request, Router, Sender, Target


@pytest.fixture
def eager_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


async def test_the_oldest_of_a_rank_is_found() -> None:
    router = Router(9)
    own = Sender()
    other = Sender()
    router.targets = [Target(), Target()]
    assert router.oldest_of(own) is None
    router.targets[0].start_attempt(Request(other, "of another rank"))
    first = router.targets[1].start_attempt(Request(own, "first"))
    router.targets[0].start_attempt(Request(own, "second"))
    assert router.oldest_of(own) is first


async def test_another_thread_may_ask_while_requests_come_and_go(eager_threads: None) -> None:
    """The set of attempts changes at each request. A program that iterated over it would raise RuntimeError."""
    router = Router(9)
    own = Sender()
    router.targets = [Target()]
    for _ in range(200):
        router.targets[0].start_attempt(Request(own))
    errors: list[Exception] = []
    ended = threading.Event()

    def ask() -> None:
        try:
            for _ in range(300):
                router.oldest_of(own)
        except Exception as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=ask).start()
    while not ended.is_set():
        attempt = router.targets[0].start_attempt(Request(own))
        router.targets[0].attempts.discard(attempt)
    assert errors == []


async def test_a_long_id_is_cut() -> None:
    """The history has a line for each minute, and a line beyond its limit would hide the whole attempt."""
    target = Target()
    oldest = target.start_attempt(Request(Sender(), "word " * 100_000))
    rank: Any = SimpleNamespace(_source=None, clients=[SimpleNamespace(oldest=oldest)], _newest=Newest())
    document = RankReporter._wait(rank).document
    assert document == "word " * 40
