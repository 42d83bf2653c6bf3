"""Preemption notices: a node that goes away is noticed, and its ranks drain as on SIGTERM."""

import json
import queue
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from datatrove_ckpt.process import preemption_notices
from datatrove_ckpt.process.preemption_notices import watched_notices
from datatrove_ckpt.process.shutdown import Shutdown
from datatrove_ckpt.testing import FakeServer, outputs
from tests.patience import until
from tests.processes import left_of, start

AWS = {"action": "terminate", "time": "2026-11-24T08:22:00Z"}
AZURE = {
    "EventType": "Preempt",
    "Resources": ["vm_0"],
    "NotBefore": "Tue, 24 Nov 2026 08:22:00 GMT",
}
CLOUDS = {
    # what is no notice, what is one, and what is said of it
    "aws": ([None], AWS, "terminate at 2026-11-24T08:22:00Z"),
    "gcp": (["FALSE"], "TRUE", "preempted"),
    "azure": (
        [[], [AZURE | {"Resources": ["vm_1"]}], [AZURE | {"EventType": "Freeze"}]],
        [AZURE | {"Resources": ["vm_1"]}, AZURE],
        "Preempt not before Tue, 24 Nov 2026 08:22:00 GMT",
    ),
}


class Metadata:
    """What answers at the link-local address of a cloud: only who asks as its documentation
    says.
    """

    def __init__(self):
        self.notice = None
        self.asked = 0
        self.refused = []

    def answer(self, method, path, headers):
        if (method, path) == ("PUT", "/latest/api/token"):
            return (
                (200, "the token")
                if int(headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
                else (400, "")
            )
        if (
            path == "/latest/meta-data/spot/instance-action"
            and headers["X-aws-ec2-metadata-token"] == "the token"
        ):
            self.asked += 1
            return (200, json.dumps(self.notice)) if self.notice else (404, "Not Found")
        if (
            path == "/computeMetadata/v1/instance/preempted"
            and headers["Metadata-Flavor"] == "Google"
        ):
            self.asked += 1
            return 200, self.notice
        if headers["Metadata"] == "true":
            if path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
                return 200, "vm_0"
            if path == "/metadata/scheduledevents?api-version=2020-07-01":
                self.asked += 1
                return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.notice})
        self.refused.append(f"{method} {path}")
        return 401, "refused"


@pytest.fixture
def metadata(monkeypatch):
    metadata = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, text = metadata.answer(self.command, self.path, self.headers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # A daemon: else the SystemExit of a rank in this process ends the process a little later.
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr(preemption_notices, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(preemption_notices, "METADATA", f"http://127.0.0.1:{server.server_port}")
    yield metadata
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_notice_of_a_cloud_is_told_from_its_other_answers(metadata, cloud, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody is there
    others, real, text = CLOUDS[cloud]
    came = queue.SimpleQueue()
    metadata.notice = others[0]
    with watched_notices({"cloud": cloud}, Shutdown(), came.put):
        for other in others:
            metadata.notice, asked = other, metadata.asked
            until(lambda asked=asked: metadata.asked >= asked + 3)
        assert came.empty()
        metadata.notice = real
        assert came.get(timeout=300) == f"a preemption notice (cloud {cloud}: {text})"
    assert metadata.refused == []


# processes ---------------------------------------------------------------------------------------

SCRIPT = """
import sys
import datatrove.executor
import datatrove_ckpt
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.process import preemption_notices

preemption_notices.POLL_SECONDS = 0.05

def documents(data, rank, world_size):
    yield from (Document(text=f"text {rank} {n}", id=f"{rank} {n}") for n in range(9))

async def rollout(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})

if __name__ == "__main__":
    module, workers, url, *command = sys.argv[1:]
    runner = InferenceRunner(
        rollout,
        InferenceConfig("endpoint", "m", endpoint_url=url, max_concurrent_generations=4),
        JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None),
        checkpoints_local_dir="checkpoints",
        preemption_notice={"command": command},
    )
    executor = (datatrove_ckpt if module == "ours" else datatrove.executor).LocalPipelineExecutor
    executor([documents, runner], tasks=2, workers=int(workers), logging_dir="logs").run()
"""


@pytest.mark.matrix(
    ("module", "workers"),
    [
        ("ours", 1),
        ("ours", 2),
        ("datatroves", 1),
    ],
)
def test_a_run_ends_as_on_sigterm_says_why_and_goes_on(tmp_path, command, module, workers):
    (tmp_path / "script.py").write_text(SCRIPT)
    told = tmp_path / "told"
    with FakeServer(hold_after=2 * workers) as server:
        notice = ("test", "-e", str(told))
        words = [sys.executable, "script.py", module, str(workers), server.url, *notice]
        process = start(words, cwd=tmp_path)
        until(lambda: len(server.payloads) >= 6 * workers)
        told.touch()
        logs = [tmp_path / "logs/logs" / f"task_{rank:05d}.log" for rank in range(workers)]
        until(lambda: all("requests in flight have" in log.read_text() for log in logs))
        server.release()
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 128 + signal.SIGTERM, output
        assert left_of(process.pid) == []
        reason = "a preemption notice (command test)"
        assert any(f"interrupted by {reason}" in log.read_text() for log in logs)
        assert reason in command("report", tmp_path / "checkpoints", "--output", "-")
        told.unlink()
        again = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stderr
        assert set(server.asked.values()) == {1}
        assert len(server.asked) == 18
    assert sorted(outputs(tmp_path / "output")) == ["00000_00000.jsonl", "00001_00000.jsonl"]
