"""What is said of files on the hub that cannot be read: one line each, with what to do."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers import JsonlReader, ParquetReader
from datatrove_ckpt.testing import FakeServer
from tests.hub import FakeHub
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

LINES = b'{"id": "0", "text": "a"}\n{"id": "1", "text": "b"}\n'
FILES = {ParquetReader: "part/0.parquet", JsonlReader: "part/0.jsonl"}


def parquet() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": ["0", "1"], "text": ["a", "b"]}), buffer)
    return buffer.getvalue()


def refused(reader: Any) -> str:
    with pytest.raises(InputError) as caught:
        list(reader.run())
    assert "\n" not in str(caught.value)
    assert "hf_Fake" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(params=[ParquetReader, JsonlReader])
def kind(request: pytest.FixtureRequest, hub: FakeHub) -> Any:
    """A reader for whose format there is a file of two documents in the repository."""
    hub.put("org/input", {FILES[request.param]: parquet() if request.param is ParquetReader else LINES})
    return request.param


@pytest.mark.parametrize(
    ("place", "advice"),
    [
        ("org/none/part", "Correct data_folder, or restore the repository; if it is private or gated, set HF_TOKEN"),
        ("org/input/other", "the folder does not exist there, or glob_pattern fits none. Correct data_folder"),
        ("org/input@v2/part", "Correct the branch, tag or commit after the @ in data_folder."),
    ],
)
def test_a_folder_that_is_not_there(kind: Any, place: str, advice: str) -> None:
    said = refused(kind(f"hf://datasets/{place}"))
    assert f"'hf://datasets/{place}'" in said
    assert advice in said


def test_a_token_that_has_expired(kind: Any, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.expired_token)
    assert "The token is wrong, or has expired. Set HF_TOKEN to a valid one" in refused(
        kind("hf://datasets/org/input/part")
    )


@pytest.mark.parametrize("request_kind", ["tree", "resolve"])
def test_a_token_that_may_not_read(kind: Any, hub: FakeHub, request_kind: str) -> None:
    hub.fail(request_kind, 403, times=None)
    said = refused(kind("hf://datasets/org/input/part"))
    assert "403 Forbidden" in said
    assert "set HF_TOKEN to a token of an account that may read it" in said


@pytest.mark.parametrize("what", ["file", "repository"])
def test_what_vanishes_after_the_folder_was_listed(kind: Any, hub: FakeHub, what: str) -> None:
    reader = kind("hf://datasets/org/input/part")
    assert len(list(reader.run())) == 2
    if what == "file":
        hub.repo("org/input").commit("main", "by hand", "", hub.clock.now(), [], [FILES[kind]])
    else:
        hub.repos.clear()
    said = refused(reader)  # which has the listing
    assert said.startswith(
        f"The input file {FILES[kind].removeprefix('part/')!r} in hf://datasets/org/input/part cannot"
    )
    assert ("was there when the folder was listed" in said) is (what == "file")
    assert ("restore the repository" in said) is (what == "repository")


def test_an_error_of_the_adapter_is_not_the_hubs(hub: FakeHub) -> None:
    def adapter(self: Any, data: dict[str, Any], path: str, id_in_file: int | str) -> dict[str, Any]:
        return {"text": Path("nowhere").read_text()}

    hub.put("org/input", {"part/0.jsonl": LINES, "part/0.parquet": parquet()})
    for kind, pattern in ((JsonlReader, "*.jsonl"), (ParquetReader, "*.parquet")):
        reader = kind("hf://datasets/org/input/part", adapter=adapter, glob_pattern=pattern)
        with pytest.raises(FileNotFoundError, match="nowhere"):
            list(reader.run())


def test_run_and_doctor_say_it_in_a_line(
    tmp_path: Path,
    hub: FakeHub,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_job(tmp_path, job_yaml(ENDPOINT.replace("URL", server.url)), ["a"])
    text = Path("job.yaml").read_text().replace("JsonlReader", "ParquetReader")
    for place, advice in (
        ("org/none", "restore the repository"),
        ("org/input/other", "holds no files for this reader"),
    ):
        hub.put("org/input", {"part/0.parquet": parquet()})
        Path("job.yaml").write_text(text.replace("data_folder: input", f"data_folder: hf://datasets/{place}"))
        for command in ("doctor", "run"):
            assert main([command, "job.yaml"]) == 1
            said = "".join(capfd.readouterr())
            assert advice in said
            assert "Traceback" not in said
    assert not server.payloads
