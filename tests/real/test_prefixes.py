"""Rows that share a text, on two real vLLMs: how much of their prompts is in the engines' caches.

    pytest tests/real/test_prefixes.py -s

The model is tiny and has random weights: tokens per second say nothing about GPUs, what the caches
hold does. See environment.py for the set-up.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from urllib.request import Request, urlopen

import pytest
from datatrove.data import Document

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.inference.servers.host import parse_metrics
from tests.jobs import rows, runner
from tests.patience import until
from tests.real import environment
from tests.real.test_vllm import ENVIRONMENT, vllm_server

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("real_ready_window")]

TEXTS = 8
ROWS = 4  # of each text
TOKENS = 24  # of each answer
SETTINGS = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    model = f"{environment.tiny_models()}/embed"
    flags = ["--dtype", "float32", "--max-model-len", "2048", "--served-model-name", "tiny"]
    with pytest.MonkeyPatch.context() as environ, ExitStack() as stack:
        environ.setitem(ENVIRONMENT, "VLLM_SERVER_DEV_MODE", "1")  # for /reset_prefix_cache
        folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
        urls = [stack.enter_context(vllm_server(each, *flags, model=model)) for each in folders]
        until(lambda: all(map(is_ready, urls)))
        yield urls


def is_ready(url):
    try:
        send(f"{url}/health")
    except OSError:
        return False
    return True


def send(url, data=None):
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(url, data, headers), timeout=600) as response:
        return response.read().decode()


def prompts():
    for number in range(TEXTS * ROWS):
        yield f"Chapter {number // ROWS}. {'It rained on the bridge. ' * 200}Question {number}:"


def looked_up(urls):
    """Prompt tokens that were looked for in the caches, and those that were there."""
    pages = "".join(send(f"{url}/metrics") for url in urls)
    return [
        sum(map(float, re.findall(rf"^vllm:prefix_cache_{name}_total\{{.*\}} (\S+)$", pages, re.M)))
        for name in ("queries", "hits")
    ]


@contextmanager
def empty_caches(urls):
    """Yields a list for the share of prompt tokens that the caches had."""
    for url in urls:
        send(f"{url}/reset_prefix_cache", b"")
    before = looked_up(urls)
    shares = []
    yield shares
    queries, hits = (now - then for now, then in zip(looked_up(urls), before, strict=True))
    shares.append(hits / queries)


def test_rows_that_share_a_text_are_sent_where_its_blocks_are(tmp_path, urls):
    def ask(number, prompt):
        body = json.dumps({"model": "tiny", "prompt": prompt, **SETTINGS}).encode()
        answer = json.loads(send(f"{urls[number % 2]}/v1/completions", body))
        return answer["choices"][0]["text"]

    with (
        empty_caches(urls) as in_turn,
        ThreadPoolExecutor(32) as pool,
    ):
        expected = list(pool.map(ask, range(TEXTS * ROWS), prompts()))

    async def rollout(document, generate):
        answer = await generate({"prompt": document.text, **SETTINGS})
        return answer.text

    config = InferenceConfig("endpoint", "tiny", endpoint_url=urls, use_chat=False)
    step = runner(tmp_path, config, rollout)
    with empty_caches(urls) as routed:
        step.run(Document(text, str(number)) for number, text in enumerate(prompts()))

    assert len(rows(tmp_path)) == len(expected)
    # Each text is computed by one server, or by both.
    assert in_turn[0] <= (ROWS - 2) / ROWS < 1.2 * (ROWS - 2) / ROWS < routed[0]


def test_the_share_of_a_cache_that_running_requests_fill_is_read(urls):
    names = InferenceConfig("vllm", "tiny").engine.metrics
    request = {"model": "tiny", "prompt": "It rained.", **SETTINGS, "max_tokens": 1900}

    def send_request():
        body = json.dumps(request).encode()
        return pool.submit(send, f"{urls[0]}/v1/completions", body)

    def is_read():
        if asked[-1].done():  # before the page had its share
            asked.append(send_request())
        return 0 < parse_metrics(names, send(f"{urls[0]}/metrics")).cache_usage <= 1

    with ThreadPoolExecutor(1) as pool:
        asked = [send_request()]
        until(is_read)
