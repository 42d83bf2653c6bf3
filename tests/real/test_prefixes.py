"""Rows that share a text, on a real vLLM of two data-parallel ranks: how much of their prompts is in
the ranks' caches.

    pytest tests/real/test_prefixes.py -s

The model is tiny and has random weights: tokens per second say nothing about GPUs, what the caches
hold does. See environment.py for the set-up.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.request import Request, urlopen

import pytest
from datatrove.data import Document

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.inference.servers.host import parse_metrics
from tests.jobs import rows, runner
from tests.patience import until
from tests.real import environment
from tests.real.vllm_servers import ENVIRONMENT, vllm_server

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("real_ready_window")]

TEXTS = 8
ROWS = 4  # of each text
TOKENS = 24  # of each answer
SETTINGS = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    model = f"{environment.tiny_models()}/embed"
    flags = ["--dtype", "float32", "--max-model-len", "2048", "--served-model-name", "tiny"]
    flags += ["--data-parallel-size", "2"]
    with pytest.MonkeyPatch.context() as environ:
        environ.setitem(ENVIRONMENT, "VLLM_SERVER_DEV_MODE", "1")  # for /reset_prefix_cache
        with vllm_server(tmp_path_factory.mktemp("vllm"), *flags, model=model) as url:
            until(lambda: is_ready(url))
            yield url


def is_ready(url):
    try:
        send(f"{url}/health")
    except OSError:
        return False
    return True


def send(url, data=None, **more):
    headers = {"Content-Type": "application/json", **more}
    with urlopen(Request(url, data, headers), timeout=600) as response:
        return response.read().decode()


def prompts():
    for number in range(TEXTS * ROWS):
        yield f"Chapter {number // ROWS}. {'It rained on the bridge. ' * 200}Question {number}:"


def looked_up(url):
    """Prompt tokens that were looked for in the cache of each rank, and those that were there."""
    page = send(f"{url}/metrics")
    return [
        [
            float(
                re.search(
                    rf'^vllm:prefix_cache_{name}_total.*engine="{rank}".* (\S+)$', page, re.M
                )[1]
            )
            for name in ("queries", "hits")
        ]
        for rank in range(2)
    ]


@contextmanager
def empty_caches(url):
    """Yields a list for the share of prompt tokens that the cache of each rank had."""
    send(f"{url}/reset_prefix_cache", b"")
    before = looked_up(url)
    shares = []
    yield shares
    for (queries, hits), (queries_before, hits_before) in zip(looked_up(url), before, strict=True):
        shares.append((hits - hits_before) / (queries - queries_before))


def test_rows_that_share_a_text_are_sent_to_the_rank_that_has_its_blocks(tmp_path, url):
    def ask(number, prompt):
        body = json.dumps({"model": "tiny", "prompt": prompt, **SETTINGS}).encode()
        rank = {"X-data-parallel-rank": str(number % 2)}
        answer = json.loads(send(f"{url}/v1/completions", body, **rank))
        return answer["choices"][0]["text"]

    with (
        empty_caches(url) as in_turn,
        ThreadPoolExecutor(32) as pool,
    ):
        expected = list(pool.map(ask, range(TEXTS * ROWS), prompts()))

    async def rollout(document, generate):
        answer = await generate({"prompt": document.text, **SETTINGS})
        return answer.text

    config = InferenceConfig("endpoint", "tiny", endpoint_url=url, use_chat=False)
    step = runner(tmp_path, config, rollout)
    with empty_caches(url) as routed:
        step.run(Document(text, str(number)) for number, text in enumerate(prompts()))

    assert len(rows(tmp_path)) == len(expected)
    print(f"hits of each rank: in turn {in_turn}, routed {routed}")
    # Each text is computed by one rank, or by both.
    limit = (ROWS - 2) / ROWS
    assert max(in_turn) <= limit < 1.2 * limit < min(routed)


def test_the_share_of_a_cache_that_running_requests_fill_is_read(url):
    names = InferenceConfig("vllm", "tiny").engine.metrics
    request = {"model": "tiny", "prompt": "It rained.", **SETTINGS, "max_tokens": 400}

    def send_request():
        body = json.dumps(request).encode()
        return pool.submit(send, f"{url}/v1/completions", body)

    def is_read():
        if asked[-1].done():  # before the page had its share
            asked.append(send_request())
        return 0 < parse_metrics(names, send(f"{url}/metrics")).cache_usage <= 1

    with ThreadPoolExecutor(1) as pool:
        asked = [send_request()]
        until(is_read)
