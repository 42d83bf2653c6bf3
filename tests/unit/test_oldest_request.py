"""What ``status`` and the metrics ask of a rank in any thread: its oldest request, and its sums."""

import sys
import threading
from types import SimpleNamespace

import pytest

from datatrove_ckpt.generation.progress import RankReporter
from datatrove_ckpt.inference.client.routing import Request, Router, Sender, Target
from datatrove_ckpt.process.shutdown import Shutdown


@pytest.fixture
def eager_threads():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


async def test_another_thread_may_ask_while_requests_come_and_go(eager_threads):
    """The set of attempts changes at each request.

    A program that iterated over it would raise RuntimeError.
    """
    router = Router(9)
    own = Sender()
    router.targets = [Target()]
    for _ in range(200):
        router.targets[0].start_attempt(Request(own))
    errors = []
    ended = threading.Event()

    def ask():
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


async def test_a_long_id_is_cut():
    """The history has a line for each minute, and a line beyond its limit would hide the whole
    attempt.
    """
    target = Target()
    oldest = target.start_attempt(Request(Sender(), "word " * 100_000))
    rank = SimpleNamespace(_source=None, clients=[SimpleNamespace(oldest=oldest)], _ended_at=0.0)
    document = RankReporter._wait(rank).document
    assert document == "word " * 40


def test_each_answer_is_counted_once_whoever_asks_meanwhile(eager_threads):
    checkpoint = SimpleNamespace(resumed=SimpleNamespace(finished=SimpleNamespace(read=0)))
    rank = RankReporter(0, checkpoint, Shutdown(), 1.0)
    ended = threading.Event()

    def ask():
        while not ended.is_set():
            rank.progress()
            rank.spread()

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(20_000):
        usage = {"prompt_tokens": 3, "completion_tokens": number % 2}
        answer = SimpleNamespace(seconds=0.001 * (number % 7), usage=usage, service_tier="")
        rank.answered(answer, SimpleNamespace(prices=None))
    ended.set()
    for thread in threads:
        thread.join()
    own = rank.progress().own
    assert (own.requests, own.prompt_tokens, own.completion_tokens) == (20_000, 60_000, 10_000)
    spread = rank.spread()
    assert sum(spread.milliseconds.values()) == sum(spread.prompt_tokens.values()) == 20_000
