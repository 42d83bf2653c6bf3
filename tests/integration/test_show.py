"""``show``, the documents of ``report``, and ``run --sample``: what people look at, from output of
every kind.
"""

import re

import pytest
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter

from datatrove_ckpt.errors import ServerRefused
from datatrove_ckpt.testing import FakeServer, outputs
from tests.jobs import fails_at, rejects, run_job, runner
from tests.yaml_jobs import endpoint, job_yaml, write_job

_NAME = "${rank}_chunk_${chunk_index}"


def nested(self, document):
    """An adapter that keeps no results where datatrove has them."""
    return {"id": document.id, "reply": document.metadata["rollout_results"][0].text}


WRITERS = {
    "plain": lambda folder: JsonlWriter(folder, f"{_NAME}.jsonl", compression=None),
    "gzip": lambda folder: JsonlWriter(folder, f"{_NAME}.jsonl.gz"),
    "zstd": lambda folder: JsonlWriter(folder, f"{_NAME}.jsonl.zst", compression="zstd"),
    "expanded": lambda folder: JsonlWriter(folder, f"{_NAME}.jsonl.gz", expand_metadata=True),
    "parquet": lambda folder: ParquetWriter(folder, f"{_NAME}.parquet"),
    "adapter": lambda folder: JsonlWriter(
        folder, f"{_NAME}.jsonl", compression=None, adapter=nested
    ),
}


@pytest.fixture
def show(tmp_path, command):
    return lambda *words, code=0: command("show", tmp_path / "checkpoints", *words, code=code)


def ids(said):
    """Of the documents in what was printed: "1. id 0  (file)"."""
    return re.findall(r"^\d+\. (.*?)(?:  \(.*)?$", said.out, re.MULTILINE)


# show --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.usefixtures("empty_memory_file_system")
def test_output_of_every_kind_is_shown(kind, tmp_path, server, show):
    folder = "memory://out" if kind == "gzip" else str(tmp_path / "output")  # a remote one
    run_job(tmp_path, server, 8, output_writer=WRITERS[kind](folder), records_per_chunk=3)
    said = show()
    assert ids(said) == [f"id {number}" for number in range(5)]
    assert ids(show("--n", 100)) == [f"id {number}" for number in range(8)], (
        "in the order of the input"
    )
    _, *lines = said.out.splitlines()
    if kind == "adapter":  # it writes no text
        assert lines[0].startswith('  answer: {"reply":"answer ')
    else:
        assert lines[0] == "  text: text 0"
        assert lines[1].startswith("  answer: answer ")


def test_dead_letters_are_shown_with_their_causes_until_a_retry_takes_them(tmp_path, server, show):
    assert not (tmp_path / "checkpoints").exists()
    settings = {"on_document_error": "dead_letter"}
    retry = {"retry_dead_letters": True, "accept_changes": True, **settings}
    run_job(tmp_path, server, 4, fails_at(["id 1", "id 3"]), **settings)
    assert ids(show()) == ["id 0", "id 2"]
    assert (
        "`datatrove-ckpt status` counts documents in unfinished chunks"
        in show("--id=id 1", code=1).out
    )
    said = show("--dead")
    assert ids(said) == ["id 1", "id 3"]
    assert (
        "1. id 1  (task 0)\n  text: text 1\n  failed: ValueError: cannot make sense of id 1\n"
        in said.out
    )
    runner(tmp_path, server, fails_at(["id 3"]), **retry).run(None)
    assert ids(show("--dead")) == ["id 3"]
    assert ids(show()) == ["id 0", "id 2", "id 1"]
    with FakeServer(status=rejects(["text 3"], 401)) as refuses, pytest.raises(ServerRefused):
        runner(tmp_path, refuses, **retry).run(None)
    assert ids(show("--dead")) == ["id 3"]  # the retry has not finished
    runner(tmp_path, server, **retry).run(None)
    assert show("--dead", code=1).out == "There is no such dead letter.\n"


def test_nothing_that_is_shown_speaks_to_the_terminal_or_tells_a_secret(
    tmp_path, show, monkeypatch
):
    secret = "sk-abcdefgh12345678abcdefgh"
    monkeypatch.setenv("HF_TOKEN", secret)
    with FakeServer(
        lambda payload, times: f"\x1b[2J\x9b {'word ' * 9}{secret} \u202egnp"
    ) as server:
        runner(tmp_path, server).run([Document(f"text \x07 {secret}", "id \x1b[0m")])
    for columns in ("20", "120"):  # a secret that is broken into two lines would not be found
        monkeypatch.setenv("COLUMNS", columns)
        said = show().out
        assert said.isprintable() or not {*said} & {*"\x1b\x9b\x07\u202e"}
        assert "12345678" not in said
        assert "\\u001b[2J" in said


# run --sample ------------------------------------------------------------------------------------


def test_a_sample_prints_questions_and_answers_and_keeps_only_them(
    here, server, command, monkeypatch
):
    for name in ("TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(here))
    monkeypatch.setattr("tempfile.tempdir", str(here))
    write_job(here, job_yaml(endpoint(server), tasks=2), ["a", "b"], ["c", "d"])
    before = outputs(here / "input")
    said = command("run", "job.yaml", "--sample", 4)
    assert server.asked == {"Say a": 1, "Say b": 1, "Say c": 1, "Say d": 1}
    first = said.out.partition("2. ")[0]
    assert first.startswith("1. id 0\n  question: Say a\n  answer: answer ")
    assert ids(said) == ["id 0", "id 1", "id 2", "id 3"]
    assert said.out.endswith(
        "4 of 4 documents processed. The run takes these answers for the same requests.\n"
    )
    assert "resume" not in said
    assert "run again" not in said
    assert outputs(here / "input") == before
    assert sorted(path.name for path in here.iterdir()) == ["checkpoints", "input", "job.yaml"]
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["sample-00001"]
    said = command("status", "checkpoints", code=2).error
    assert "holds only samples (run --sample). Start the run" in said


def test_a_sample_says_what_a_prefix_cache_saves_of_the_requests_that_were_sent(
    here, server, command, monkeypatch
):
    monkeypatch.syspath_prepend(str(here))
    (here / "own_rollout.py").write_text(
        "async def rollout(document, generate):\n"
        "    question = 'Say in your own words: ' * 20 + document.text\n"
        "    answer = await generate({'messages': [{'role': 'user', 'content': question}]})\n"
        "    return await generate({'messages': [{'role': 'user', 'content': answer.text}]})\n"
    )
    write_job(here, job_yaml(endpoint(server), rollout="own_rollout.rollout"), ["a", "b", "c"])
    said = command("run", "job.yaml", "--sample", 3)
    assert len(server.payloads) == 6
    assert "are the same in all 3: a prefix cache computes them once.\n" in said.out
    assert "end of prompts" not in said.out
