"""Edits that the text of the code may not show: the replay check refuses the next start."""

import os
import re
import subprocess
import sys

import orjson
import pytest

from tests.code_edits import rows

CHAT = r'{"messages": [{"role": "user", "content": \1}]})'


def attempt(folder, server, files, *more):
    """A run of the project's files, in a process of its own."""
    for name, text in files.items():
        (folder / name).write_text(re.sub(r'{"prompt": (.*)}\)$', CHAT, text, flags=re.M))
    variables = dict(line.split("=") for line in files.get("environment", "").split())
    flags = ["--input", "in.jsonl", "--rollout", "script.rollout", "--endpoint", server.url]
    flags += ["--model", "fake", "--run-folder", "run", "--records-per-chunk", "2", *more]
    return subprocess.run(
        [sys.executable, "-m", "datatrove_ckpt", "run", *flags],
        cwd=folder,
        # A .pyc file would hide an edit of the same second and length.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables},
        capture_output=True,
        text=True,
    )


@pytest.mark.matrix("row", [*rows("replayed")], ids=lambda row: row.name)
def test_an_edit_that_changes_a_request_or_result_is_refused(tmp_path, server, row):
    rows_of_input = [
        orjson.dumps({"id": f"d{number}", "text": f"t{number}"}) for number in range(8)
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(rows_of_input))
    first = attempt(tmp_path, server, row.before, "--until", "4")
    assert first.returncode == 0, first.stderr
    sent = len(server.payloads)
    refused = attempt(tmp_path, server, row.after)
    assert refused.returncode == 1, refused.stderr
    assert "document 'd" in refused.stderr
    assert "recorded documents)" in refused.stderr
    assert len(server.payloads) == sent
    unedited = attempt(tmp_path, server, row.before)
    assert unedited.returncode == 0, unedited.stderr
