"""``show``, the documents of ``report``, and ``run --sample``: what people look at, from output of
every kind.
"""

import json
import re
from pathlib import Path

import pytest
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter

from datatrove_ckpt.errors import DocumentFailed
from datatrove_ckpt.testing import FakeServer, outputs
from tests.jobs import documents, fails_at, rejects, runner
from tests.yaml_jobs import endpoint, job_yaml, write_job

ONE_BY_ONE = {"max_concurrent_documents": 1}
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


@pytest.fixture
def counting():
    """A server whose answers tell which document was asked, and grow with its number."""
    with FakeServer(
        lambda payload, times: "so " * int(payload["messages"][-1]["content"].split()[-1])
    ) as server:
        yield server


def ids(said):
    """Of the documents in what was printed: "1. id 0  (file)"."""
    return re.findall(r"^\d+\. (.*?)(?:  \(.*)?$", said.out, re.MULTILINE)


# show --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.usefixtures("empty_memory_file_system")
def test_output_of_every_kind_is_shown(kind, tmp_path, server, show):
    folder = "memory://out" if kind == "gzip" else str(tmp_path / "output")  # a remote one
    runner(tmp_path, server, output_writer=WRITERS[kind](folder), records_per_chunk=3).run(
        documents(8)
    )
    said = show()
    assert ids(said) == [f"id {number}" for number in range(5)]
    assert ids(show("--n", 100)) == [f"id {number}" for number in range(8)], (
        "in the order of the input"
    )
    answer = said.out.splitlines()[2]
    assert answer.startswith(
        '  answer: {"reply":"answer ' if kind == "adapter" else "  answer: answer "
    )
    assert kind == "adapter" or said.out.splitlines()[1] == "  text: text 0"


def test_documents_are_chosen(tmp_path, counting, show):
    runner(tmp_path, counting).run(documents(12))
    assert ids(show("--id", "id 1")) == ["id 1"], "as a whole: not id 10"
    assert ids(show("--grep", "TEXT 1")) == ["id 1", "id 10", "id 11"]
    assert ids(show("--grep", "so so so so so so so so so so so")) == ["id 11"], "in an answer"
    assert (
        show("--id", "none", code=1).out
        == "There is no such document in the output files, so far.\n"
    )


def test_it_says_how_many_more_there_are_and_why_there_is_none_yet(tmp_path, server, show):
    with pytest.raises(DocumentFailed):
        runner(tmp_path, server, fails_at(["id 3"]), records_per_chunk=4, config=ONE_BY_ONE).run(
            documents(8)
        )
    done = "3 documents are done (0 dropped, 0 dead letters)"
    assert show(code=1).out == (
        f"No document is in the output files, so far: {done}. A file appears when a chunk of 4 is complete.\n"
    )
    runner(tmp_path, server, records_per_chunk=4, accept_changes=True).run(documents(8))
    assert show().out.endswith("\n5 of 8 documents; --n 10 prints more.\n")
    for words in (["--n", 8], ["--grep", "text"], ["--id", "id 1"]):
        assert "prints more" not in show(*words).out


def test_dead_letters_are_shown_with_their_causes_until_a_retry_takes_them(tmp_path, server, show):
    assert not (tmp_path / "checkpoints").exists()
    settings = {"on_document_error": "dead_letter"}
    runner(tmp_path, server, fails_at(["id 1", "id 3"]), **settings).run(documents(4))
    assert ids(show()) == ["id 0", "id 2"]
    said = show("--dead")
    assert ids(said) == ["id 1", "id 3"]
    assert (
        "1. id 1  (rank 0)\n  text: text 1\n  failed: ValueError: cannot make sense of id 1\n"
        in said.out
    )
    runner(
        tmp_path,
        server,
        fails_at(["id 3"]),
        retry_dead_letters=True,
        accept_changes=True,
        **settings,
    ).run(None)
    assert ids(show("--dead")) == ["id 3"]
    assert ids(show()) == ["id 0", "id 2", "id 1"]
    runner(tmp_path, server, retry_dead_letters=True, accept_changes=True, **settings).run(None)
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


def test_texts_are_shortened_and_fit_the_terminal(tmp_path, server, show, monkeypatch):
    runner(tmp_path, server).run([Document("long " * 500, "a")])
    monkeypatch.setenv("COLUMNS", "120")
    lines = show().out.splitlines()
    assert lines[1].startswith("  text: long ")
    assert any(line.startswith("  answer: answer ") for line in lines)
    assert max(map(len, lines)) <= 120
    assert "..." in "".join(lines)
    assert "..." not in show("--id", "a").out, "with its id, it is wanted as a whole"


def test_output_that_is_gone_is_said(tmp_path, server, show):
    runner(tmp_path, server).run(documents(1))
    (tmp_path / "output").rename(tmp_path / "moved")
    said = show(code=1).error
    assert said.startswith(f"error: {tmp_path}/output/00000_chunk_00000.jsonl cannot be read: ")
    assert said.endswith("See --output.")
    assert ids(show("--output", tmp_path / "moved")) == ["id 0"]


# run --sample ------------------------------------------------------------------------------------


def test_a_sample_prints_questions_and_answers_and_keeps_nothing(
    here, server, command, monkeypatch
):
    for name in ("TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(here))
    monkeypatch.setattr("tempfile.tempdir", str(here))
    write_job(here, job_yaml(endpoint(server), tasks=2), ["a", "b"], ["c", "d"])
    before = outputs(here)
    said = command("run", "job.yaml", "--sample", 3)
    assert [payload["messages"][-1]["content"] for payload in server.payloads] == [
        "Say a",
        "Say b",
        "Say c",
    ]
    first = said.out.partition("2. ")[0]
    assert first.startswith("1. id 0\n  question: Say a\n  answer: answer ")
    assert ids(said) == ["id 0", "id 1", "id 2"]
    assert said.out.endswith(
        "3 of 3 documents processed. Nothing of this is kept, and no other document was sent.\n"
    )
    assert "resume" not in said
    assert "run the same command again" not in said
    assert outputs(here) == before
    assert sorted(path.name for path in here.iterdir()) == ["input", "job.yaml"]


def test_a_sample_beside_a_run_leaves_it_alone(here, server, command):
    write_job(here, job_yaml(endpoint(server)), ["a", "b"])
    command("run", "job.yaml")
    before = outputs(here)
    said = command("run", "job.yaml", "--pipeline.1.rollout_fn.prompt=Sing {text}", "--sample", 1)
    assert "question: Sing a" in said.out, "another prompt is tried, not refused"
    assert outputs(here) == before


@pytest.mark.parametrize(("bad", "code"), [(["Say a"], 0), (["Say a", "Say b"], 1)])
def test_a_sample_says_why_documents_fail(here, command, bad, code):
    with FakeServer(status=rejects(bad)) as server:
        write_job(here, job_yaml(endpoint(server)), ["a", "b", "c"])
        said = command("run", "job.yaml", "--sample", 2, code=code).out
    assert said.count("\n  failed: ") == len(bad)
    assert "1. id 0\n  question: Say a\n  failed: " in said
    assert "400" in said
    assert f"{2 - len(bad)} of 2 documents processed." in said


def test_a_sample_of_documents_that_repeat_an_id_shows_each_with_its_own_question(here, command):
    with FakeServer(
        lambda payload, times: f"to {payload['messages'][-1]['content']}", rejects(["Say a"])
    ) as server:
        write_job(here, job_yaml(endpoint(server)), [])
        Path("input/0.jsonl").write_text(
            "".join(json.dumps({"id": "1", "text": text}) + "\n" for text in "abc")
        )
        said = command("run", "job.yaml", "--sample", 3).out
    assert re.findall(r"question: (.*)\n  (failed|answer: .*)", said)[1:] == [
        ("Say b", "answer: to Say b"),
        ("Say c", "answer: to Say c"),
    ]
    assert said.startswith("1. 1\n  question: Say a\n  failed: ")


def test_a_sample_of_dropped_documents_and_of_none(here, server, command):
    Path("mine.py").write_text(
        "async def drop(document, generate):\n"
        "    await generate({'messages': [{'role': 'user', 'content': 'first'}]})\n"
        "    await generate({'messages': document.metadata['m']})\n"
    )
    write_job(here, job_yaml(endpoint(server), rollout="mine.drop"), ["a"])
    parts = [
        {"type": "text", "text": "what"},
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "text", "text": "is it"},
    ]
    row = {"id": "1", "text": "a", "m": [{"role": "user", "content": parts}]}
    Path("input/0.jsonl").write_text(json.dumps(row) + "\n")
    said = command("run", "job.yaml", "--sample", 5).out
    assert "  question: what\n\n  is it\n  dropped: answer " in said
    assert "\n1 of 1 document processed, 1 of them dropped. " in said
    said = command("run", "job.yaml", "--sample", 5, "--pipeline.0.skip=1", code=1).out
    assert said.startswith("0 of 0 documents processed.")
