"""What a server, a payload or a rollout says reaches logs, dead letters and the terminal as text,
without secrets.
"""

import os
import traceback

import pytest

from datatrove_ckpt import InferenceError, LocalPipelineExecutor
from datatrove_ckpt.errors import DocumentFailed, TooManyDeadLetters
from tests.jobs import chat, documents, runner
from tests.recording import recording  # noqa: F401

SENT, IN_ENVIRONMENT = "Bearer canary-of-payload", "canary-of-environment"
PAYLOAD = chat("x", extra_headers={"Authorization": SENT})
FORGED = "\n2026-11-22 12:00:00.000 | SUCCESS | all is well\x1b]0;title\x07\x1b[2J\u202e\u2028"


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
    recording,  # noqa: F811
    rollout,
    on_document_error,
    monkeypatch,
    capfd,
):
    """The server answers with what it was sent and what a terminal would obey."""
    recording.status = 400
    recording.answers_probes = True
    recording.said = f"{FORGED} {SENT} {IN_ENVIRONMENT}".encode()
    monkeypatch.setenv("SOME_PASSPHRASE", IN_ENVIRONMENT)
    step = runner(tmp_path, recording, rollout, on_document_error=on_document_error)
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
