"""Real gateways before servers that a test plays: LiteLLM's proxy, and vLLM's router before two.

A gateway has errors of its own: LiteLLM's proxy without a database answers 400 to a wrong key and to
a wrong model, and both answer 500 while an upstream is away.
"""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from datatrove_ckpt.inference.servers.server import free_port
from datatrove_ckpt.testing import outputs
from tests.patience import until
from tests.processes import run
from tests.real import environment
from tests.yaml_jobs import write_rows

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

NUMBER = 200
KEY = "sk-the-key-of-the-proxy"
AWAY_SECONDS = 8.0


class Upstream:
    """A server of the model "m", which can go away, and come back at its address."""

    def __init__(self):
        self.port = free_port()
        self.asked = Counter()

    @contextmanager
    def serving(self):
        handler = type("Handler", (_Handler,), {"asked": self.asked})
        server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def _send(self, status, fields):
        data = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self._send(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if payload["model"] != "m":
            self._send(404, {"error": {"message": f"there is no {payload['model']}"}})
            return
        question = payload["messages"][-1]["content"]
        self.asked[question] += 1
        time.sleep(0.1)
        message = {"role": "assistant", "content": f"answer to {question}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
        self._send(200, {**answer, "choices": [choice], "usage": usage})


@contextmanager
def gateway(command, folder, port):
    """Runs a gateway, until the end of the block, and yields its URL."""
    with (folder / "gateway.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    url = f"http://127.0.0.1:{port}/v1"
    request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {KEY}"})

    def answers():
        assert process.poll() is None, (folder / "gateway.log").read_text()[-3000:]
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                return response.status == 200
        except OSError:
            return False

    try:
        until(answers)
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def upstreams():
    return [Upstream(), Upstream()]


@pytest.fixture
def litellm(upstreams, tmp_path):
    """The URL of LiteLLM's proxy before the first upstream."""
    upstream = f"http://127.0.0.1:{upstreams[0].port}/v1"
    parameters = {"model": "openai/m", "api_base": upstream, "api_key": "none"}
    config = {
        "model_list": [{"model_name": "m", "litellm_params": parameters}],
        "general_settings": {"master_key": KEY},
        "litellm_settings": {"num_retries": 0},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    port = free_port()
    command = [environment.litellm(), "--config", "config.yaml", "--port", str(port)]
    with gateway([*command, "--host", "127.0.0.1"], tmp_path, port) as url:
        yield url


@contextmanager
def vllm_router(upstreams, folder):
    """Runs vLLM's router before upstreams that answer, and yields its URL."""
    port = free_port()
    command = [environment.vllm_router(), "--host", "127.0.0.1", "--port", str(port)]
    urls = [f"http://127.0.0.1:{upstream.port}" for upstream in upstreams]
    metrics = ["--prometheus-port", str(free_port())]
    command += ["--worker-urls", *urls, "--policy", "round_robin", *metrics]
    with gateway(command, folder, port) as url:
        yield url


@pytest.fixture
def start(tmp_path):
    """Starts a run at a gateway."""
    rows = [{"id": f"{number:03}", "text": f"text {number}"} for number in range(NUMBER)]
    write_rows(tmp_path / "input.jsonl", rows)

    def start(url, key=KEY, model="m"):
        words = ["run", "--input=input.jsonl", "--prompt={text}", f"--model={model}"]
        words += [f"--endpoint={url}", "--api-key-env=GATEWAY_KEY", "--run-folder=run"]
        return subprocess.Popen(
            [sys.executable, "-m", "datatrove_ckpt", *words, "--max-concurrent-generations=8"],
            cwd=tmp_path,
            env={**os.environ, "GATEWAY_KEY": key},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def assert_complete(folder):
    rows = [
        json.loads(line)
        for data in outputs(folder / "run/output").values()
        for line in data.splitlines()
    ]
    answers = {row["id"]: row["answer"] for row in rows}
    assert answers == {f"{number:03}": f"answer to text {number}" for number in range(NUMBER)}
    verified = run([sys.executable, "-m", "datatrove_ckpt", "verify", "run", "--full"], cwd=folder)
    assert verified.returncode == 0, verified.stdout


@pytest.mark.parametrize(
    "wrong, words",
    [({"key": "sk-wrong"}, "No connected db"), ({"model": "mm"}, "Invalid model name")],
)
def test_a_wrong_key_and_a_wrong_model_are_no_documents_fault(
    litellm, upstreams, start, tmp_path, wrong, words
):
    (upstream, _) = upstreams
    with upstream.serving():
        refused = start(litellm, **wrong)
        said = refused.communicate()[0]
        assert refused.returncode == 1
        assert words in said
        assert "Traceback" not in said
        assert not upstream.asked
        assert not (tmp_path / "run/checkpoints/00000/dead_letters.jsonl").exists()
        corrected = start(litellm)
        said = corrected.communicate()[0]
        assert corrected.returncode == 0, said
    assert_complete(tmp_path)
    assert set(upstream.asked.values()) == {1}


def test_an_upstream_that_is_away_is_waited_for(litellm, upstreams, start, tmp_path):
    (upstream, _) = upstreams
    with upstream.serving():
        process = start(litellm)
        until(lambda: upstream.asked.total() >= NUMBER // 4)
    time.sleep(AWAY_SECONDS)
    with upstream.serving():
        said = process.communicate()[0]
    assert process.returncode == 0, said
    assert "The server gives no answers" in said
    assert_complete(tmp_path)
    assert upstream.asked.total() <= NUMBER + 8  # those in flight


@pytest.mark.parametrize("away", [(), (1,), (0, 1)])
def test_a_router_before_two_servers_of_which_some_are_away_for_a_while(
    upstreams, start, tmp_path, away
):
    with ExitStack() as stack:
        serving = [stack.enter_context(ExitStack()) for _ in upstreams]
        for upstream, its_stack in zip(upstreams, serving, strict=True):
            its_stack.enter_context(upstream.serving())
        process = start(stack.enter_context(vllm_router(upstreams, tmp_path)))
        if away:
            until(lambda: sum(upstream.asked.total() for upstream in upstreams) >= NUMBER // 4)
            for index in away:
                serving[index].close()
            time.sleep(AWAY_SECONDS)
            for index in away:
                serving[index].enter_context(upstreams[index].serving())
        said = process.communicate()[0]
    assert process.returncode == 0, said
    assert_complete(tmp_path)
    totals = [upstream.asked.total() for upstream in upstreams]
    assert sum(totals) <= NUMBER + 8 * len(away)  # those in flight
    if not away:
        assert totals == [NUMBER // 2] * 2
