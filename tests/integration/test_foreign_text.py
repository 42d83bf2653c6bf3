"""What a server, a payload or a rollout says reaches logs, dead letters and the terminal as text,
without secrets.
"""

import os
import threading
import traceback
from http.server import ThreadingHTTPServer

import pytest

from datatrove_ckpt import InferenceConfig, InferenceError, InferenceRunner, LocalPipelineExecutor
from datatrove_ckpt.errors import DocumentFailed, TooManyDeadLetters
from tests.jobs import chat, documents, writer

from .test_requests_as_given import Records

SENT, IN_ENVIRONMENT = "Bearer canary-of-payload", "canary-of-environment"
PAYLOAD = chat("x", extra_headers={"Authorization": SENT})
FORGED = "\n2026-11-22 12:00:00.000 | SUCCESS | all is well\x1b]0;title\x07\x1b[2J\u202e\u2028"


class Refuses(Records):
    """Answers 400 to each request, with what it was sent and what a terminal would obey."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(f"{FORGED} {SENT} {IN_ENVIRONMENT}".encode(), 400)


@pytest.fixture
def url():
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def lets_out(document, generate):
    await generate(PAYLOAD)


async def quotes(document, generate):
    try:
        await generate(PAYLOAD)
    except InferenceError as error:
        # The rollout sees what it has sent.
        assert error.payload["extra_headers"]["Authorization"] == SENT
        raise ValueError(f"{FORGED} {error} {PAYLOAD} {os.environ['SOME_PASSPHRASE']}") from error


async def sends_nothing(document, generate):
    raise InferenceError(document, FORGED, payload=PAYLOAD)


@pytest.mark.matrix("rollout", [lets_out, quotes, sends_nothing])
@pytest.mark.parametrize("on_document_error", ["stop", "dead_letter"])
def test_no_failure_shows_a_key_of_a_payload_or_speaks_to_the_terminal(
    tmp_path,
    url,
    rollout,
    on_document_error,
    monkeypatch,
    capfd,
):
    monkeypatch.setenv("SOME_PASSPHRASE", IN_ENVIRONMENT)
    step = InferenceRunner(
        rollout,
        InferenceConfig("endpoint", "fake", endpoint_url=url),
        writer(tmp_path),
        checkpoints_local_dir=str(tmp_path / "checkpoints"),
        on_document_error=on_document_error,
    )
    executor = LocalPipelineExecutor([documents(1), step], logging_dir=str(tmp_path / "logs"))
    error = {"stop": DocumentFailed, "dead_letter": TooManyDeadLetters}[on_document_error]
    with pytest.raises(error) as failed:
        executor.run()
    uncaught = "".join(traceback.format_exception(failed.value))
    assert "canary-of" not in uncaught
    assert "\x1b" not in uncaught
    if on_document_error == "dead_letter":
        assert list(tmp_path.rglob("dead_letters.jsonl"))
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    captured = capfd.readouterr()
    said = [
        captured.out,
        captured.err,
        *(text.decode() for path, text in written.items() if path.suffix == ".log"),
    ]
    assert len(said) == 3
    assert [path for path, text in written.items() if b"canary-of" in text] == []
    for text in said:
        assert "canary-of" not in text
        assert set(text).isdisjoint("\x1b\x07\u202e\u2028")
        assert "\n2026-11-22 12:00:00.000" not in text
