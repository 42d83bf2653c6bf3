"""Canaries stand for the keys of a run, and go through everything that it prints, keeps and shows.

The server is as bad as one can be: its errors repeat all that it was sent, in each way of writing
that texts have. No variable has the name of a secret, so what hides the canaries is that they were
sent.
"""

import base64
import html
import json
import os
import re
import sys
from urllib.parse import quote, unquote_plus

import pytest
from aiohttp import web

from datatrove_ckpt.testing import FakeServer
from tests import processes
from tests.processes import command_lines

JOB = """
import dill, json, os, sys
from pathlib import Path
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter
from loguru import logger
from datatrove_ckpt import InferenceConfig, InferenceRunner, LocalPipelineExecutor

async def rollout(document, generate):
    header = os.environ["TEAM"]
    payload = {"messages": [{"role": "user", "content": document.text}]}
    result = await generate({**payload, "extra_headers": {"X-Team": header}})
    if document.id == "1":
        key = os.environ["MINE"]
        escaped = "".join("%%u%04x" % ord(one) for one in key).replace("%", chr(92))
        sink = logger.add("log_of_mine.txt", diagnose=True, backtrace=True, level=0)
        try:
            raise ValueError(f"{key} {json.dumps(key)} {escaped}")
        except ValueError:
            logger.exception("it goes wrong")
            logger.remove(sink)
            raise
    return result

def read(data, rank=0, world_size=1):
    for number in range(6):
        yield Document(text=f"text {number}", id=str(number))

if __name__ == "__main__":
    url = sys.argv[1] + "/?code=${CODE}"
    settings = {
        "api_key": {"endpoint_url": url, "api_key": os.environ["MINE"]},
        "api_key_env": {"endpoint_url": url, "api_key_env": "MINE"},
        "endpoints": {"endpoints": [{"url": url, "api_key_env": "MINE", "model": "m-1"}] * 2},
    }
    config = InferenceConfig("endpoint", "m", server_patience_seconds=2, **settings[sys.argv[2]])
    runner = InferenceRunner(
        rollout, config, JsonlWriter("output", "${rank}_${chunk_index}.jsonl", compression=None), records_per_chunk=3,
        checkpoints_local_dir="checkpoints", checkpoints_remote_dir="mirror", on_document_error="dead_letter",
    )
    Path("step.pik").write_bytes(dill.dumps(runner))
    LocalPipelineExecutor([read, runner], tasks=1, logging_dir="logs").run()
"""
CANARIES = {
    "MINE": "canary/K3y+of=the%run",
    "CODE": "canary/c0de and=more",
    "TEAM": "canary-te4m-of-many",
}
STARTS = [canary[:10] for canary in CANARIES.values()]
"""A part of a key is a leak, too."""


def written(text):
    """A text in each way in which servers and programs write it."""
    yield text
    yield quote(text, safe="")
    yield "".join(f"\\u{ord(one):04X}" for one in text)
    yield "".join(f"\\x{ord(one):02x}" for one in text)
    yield json.dumps(json.dumps(text)).replace("/", "\\/")
    yield "".join(f"&#{ord(one)};" for one in text)
    yield html.escape(quote(quote(text, safe=""), safe=""))


def read(text):
    """What a person can read in a text: as it is, and without escapes of any kind."""
    yield text
    for _ in range(3):
        text = re.sub(
            r"\\+(?:u|x)(?:00)?([0-9a-fA-F]{2})", lambda code: chr(int(code[1], 16)), text
        )
        text = html.unescape(unquote_plus(text)).replace("\\", "")
        yield text


def leaks(text):
    found = [part for part in read(text) for start in STARTS if start in part]
    encoded = [base64.b64encode(canary.encode()).decode() for canary in CANARIES.values()]
    return found or [text for one in encoded if one in text]


class Echoes(FakeServer):
    """Answers as the document's text says; errors repeat everything."""

    status = 200

    def __init__(self):
        super().__init__()
        self.requests = []
        self.lines = []

    async def _answered(self, request):
        body = await request.read()
        self.requests.append(body)
        self.lines.extend(command_lines())
        headers = [f"{name}: {value}" for name, value in request.headers.items()]
        secrets = [way for one in CANARIES.values() for way in written(one)]
        sent = " ".join([str(request.rel_url), *headers, *secrets])
        first = self.requests.count(body) == 1
        if b"text 2" in body:
            return web.Response(text=sent, status=400)
        if b"text 3" in body and first:
            return web.Response(text=sent, status=500)
        if b"text 4" in body and first:
            return web.Response(text=sent)
        if self.status != 200:
            return web.Response(text=sent, status=self.status)
        if b"text 5" in body:
            # So long, and hidden so short, that what is searched of it ends within a canary.
            return web.Response(text=max(written(CANARIES["MINE"]), key=len) * 3000, status=400)
        return await super()._answered(request)


@pytest.fixture
def server():
    with Echoes() as running:
        yield running


@pytest.mark.matrix("given", ["api_key", "api_key_env", "endpoints"])
def test_no_canary_is_in_a_log_a_file_a_page_a_pickle_a_process_list_or_a_providers_error(
    tmp_path, server, given, command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "main.py").write_text(JOB)
    environment = {**os.environ, **CANARIES}

    def run(status):
        server.status = status
        done = processes.run(
            [sys.executable, "main.py", server.url, given], env=environment, timeout=100
        )
        return done.returncode, done.stdout + done.stderr

    refused, of_refused = run(401)
    ended, of_ended = run(200)
    assert (refused != 0, ended) == (True, 0), of_refused + of_ended
    assert "refuses this run's key" in of_refused
    shown = {
        "terminal of a refused run": of_refused,
        "terminal": of_ended,
        "process list": b"\n".join(server.lines).decode(errors="replace"),
        "status": command("status", "checkpoints"),
        "status as JSON": command("status", "checkpoints", "--json"),
        "dead letters": command("show", "checkpoints", "--dead"),
        "verify": command("verify", "checkpoints", "--full"),
        "report": command("report", "checkpoints", "-o", "report.html"),
    }
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "main.py":
            shown[str(path.relative_to(tmp_path))] = path.read_bytes().decode(errors="replace")
    assert [place for place, text in shown.items() if leaks(text)] == []
    # The places are there, and held what would have shown a canary.
    assert {"step.pik", "report.html", "logs/executor.json", "log_of_mine.txt"} <= shown.keys()
    for place in (
        "terminal",
        "dead letters",
        "log_of_mine.txt",
        "checkpoints/00000/dead_letters.jsonl",
    ):
        assert "***" in shown[place], place
    assert "Traceback" in shown["log_of_mine.txt"]
    assert leaks(" ".join(written(CANARIES["MINE"])))
