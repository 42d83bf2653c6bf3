"""What ``status`` and the metrics ask of a rank in any thread: its oldest request, and its sums."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from datatrove_ckpt.common.counts import WorkCounts
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.generation.progress import RankReporter
from datatrove_ckpt.inference.client.responses import Completion
from datatrove_ckpt.inference.client.routing import Request, Router, Sender, Target


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


def test_answers_that_come_while_a_thread_counts_are_counted(monkeypatch):
    resumed = SimpleNamespace(finished=SimpleNamespace(read=0))
    checkpoint = SimpleNamespace(own=WorkCounts(), resumed=resumed)
    rank = RankReporter(0, None, checkpoint, None, 1.0)
    answer = Completion("text", "stop", {"prompt_tokens": 3, "completion_tokens": 2})
    config = InferenceConfig(
        server_type="endpoint", endpoint_url="http://host", model_name_or_path="m"
    )

    def answered_meanwhile(*arguments):
        rank.answered(answer, config)
        return np.searchsorted(*arguments)

    rank.answered(answer, config)
    with monkeypatch.context() as patched:
        counting = SimpleNamespace(searchsorted=answered_meanwhile)
        patched.setattr("datatrove_ckpt.generation.progress.np", counting)
        rank.spread()
    counted = rank.spread()
    assert counted.milliseconds.total() == counted.completion_tokens.total() == 4
    assert rank.own.requests == 4


async def test_a_long_id_is_cut():
    """The history has a line for each minute, and a line beyond its limit would hide the whole
    attempt.
    """
    target = Target()
    oldest = target.start_attempt(Request(Sender(), "word " * 100_000))
    source = SimpleNamespace(is_at_end=False)
    clients = [SimpleNamespace(oldest=oldest)]
    rank = SimpleNamespace(source=source, clients=clients, _ended_at=0.0)
    document = RankReporter._wait(rank).document
    assert document == "word " * 40
