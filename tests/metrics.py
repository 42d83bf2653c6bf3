"""Metrics of a rank, and what a scrape of them gives."""

import random
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from datatrove_ckpt.checkpoint.history import RequestHistograms
from datatrove_ckpt.common.counts import LogHistogram
from datatrove_ckpt.generation import prometheus
from datatrove_ckpt.generation.prometheus import PREFIX, RANK_LABELS, RankSnapshot, families
from tests.histories import progress

LONG = 3600.0  # seconds: however busy the machine is


def buckets(*values):
    found = LogHistogram()
    for value in values:
        found.add(value)
    return found


def spread():
    return RequestHistograms(
        milliseconds=buckets(0.5, 1.5, 100, 3000),
        prompt_tokens=buckets(10, 100),
        completion_tokens=buckets(5),
    )


def metrics(rank=3, state="running"):
    now = progress()
    now.total = replace(now.total, cost=1_500_000_000)
    now.position = now.position._replace(tasks=9)
    reasons = Counter({"stop": 57, "length": 2, "odd": 1, "looping": 4})
    now.documents = replace(now.documents, answers=60, cut_off=2, reasons=reasons)
    return RankSnapshot("my run", rank, "node7", "4711_5", 1000.0, state, now, spread())


def exposition(ranks):
    """The text that Prometheus gets."""
    registry = SimpleNamespace(collect=lambda: families(ranks))
    return bytes(generate_latest(registry))


def samples(text, **wanted):
    """By name and further labels: those of one rank."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = {name: value for name, value in sample.labels.items() if name not in RANK_LABELS}
            if all(sample.labels[name] == value for name, value in wanted.items()):
                shown = "".join(f" {value}" for _, value in sorted(own.items()))
                found[sample.name.removeprefix(PREFIX) + shown] = sample.value
    return found


def waited_for(condition):
    """What it returns once it is true. A test's own time limit ends the wait."""
    while not (found := condition()):
        time.sleep(0.01)
    return found


@pytest.fixture
def host(monkeypatch):
    """An address of this machine's own that no other test has."""
    monkeypatch.setattr(prometheus, "_KEEP_ENDED_SECONDS", LONG)
    chance = random.SystemRandom()
    return f"127.{chance.randrange(1, 255)}.{chance.randrange(1, 255)}.{chance.randrange(1, 255)}"


PORT = 9464  # below those that the kernel gives to others


def get(host, port=PORT):
    """The answer; "" if nobody listens."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{host}:{port}/metrics", timeout=LONG) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError:
        raise
    except OSError:
        return ""
