"""What a run says of its input: rows that were skipped, rows that are no documents, changes after
it was finished.
"""

import asyncio
import gzip
import json
import lzma
import os
import shutil
import stat
import zipfile

import orjson
import pytest
from datatrove.pipeline.base import PipelineStep
from fsspec.compression import compr

from datatrove_ckpt.checkpoint import open_checkpoint
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.open_checkpoint import Publisher
from datatrove_ckpt.readers import JsonlReader, base, compressed
from datatrove_ckpt.run_folder import earlier_runs
from datatrove_ckpt.testing import FakeServer
from tests import golden
from tests.crashes import OF_FILES, assert_same_output_after_crash
from tests.jobs import ask, rows, runner
from tests.patience import until
from tests.yaml_jobs import endpoint, job_yaml

ORIGINAL = "datatrove.pipeline.readers.JsonlReader"


class Drop(PipelineStep):
    """A filter that keeps no document."""

    name, type = "Drop", "test"

    def run(self, data, rank=0, world_size=1):
        for _ in data:
            yield from ()


def lines(*numbers):
    return "".join(
        json.dumps({"text": f"text {number}", "id": f"id {number}"}) + "\n" for number in numbers
    )


@pytest.fixture
def job(here, command, server):
    """``datatrove-ckpt run`` in this process.

    ``documents`` holds four files of two documents; there are two tasks.
    """
    (here / "documents").mkdir()
    for number in range(4):
        (here / f"documents/{number}.jsonl").write_text(lines(2 * number, 2 * number + 1))

    def run(
        reader="JsonlReader",
        tasks=2,
        steps=(),
        code=0,
        until=None,
        **options,
    ):
        data = json.dumps({"data_folder": f"{here}/documents", **options})
        text = job_yaml(endpoint(server), tasks).replace("JsonlReader", reader)
        text = text.replace(
            "{data_folder: input}", "\n      - ".join([data, *map(json.dumps, steps)])
        )
        text += "          records_per_chunk: 3\n"
        if until is not None:
            text += f"          until: {until}\n"
        (here / "job.yaml").write_text(text)
        return command("run", "job.yaml", code=code)

    return run


def outputs(folder):
    """The texts in the output, in the order of the files' names."""
    return [row["text"] for row in rows(folder)]


def completed(folder):
    return sorted(path.name for path in folder.glob("logs/completions/*"))


def kept(folder, rank=0):
    return orjson.loads((folder / f"checkpoints/{rank:05}/shard.json").read_bytes())


# No documents ------------------------------------------------------------------------------------


@pytest.mark.matrix("reader", ["JsonlReader", ORIGINAL])
@pytest.mark.parametrize(
    "content, options, message",
    [
        (lines(1), {"text_key": "txt"}, "text_key='txt'. The first row has the keys 'text', 'id'."),
        ("[\n", {}, "JSON array"),
        ("Once upon a time\n", {}, "'Once upon a time'. "),
    ],
)
def test_a_rank_without_documents_is_not_complete(
    job,
    tmp_path,
    reader,
    content,
    options,
    message,
):
    for path in tmp_path.glob("documents/*"):
        path.write_text(content)
    assert message in job(reader, **options, code=1).err
    assert completed(tmp_path) == []
    assert not list(tmp_path.glob("checkpoints/*/shard.json"))
    for number, path in enumerate(sorted(tmp_path.glob("documents/*"))):
        path.write_text(lines(number))
    job(reader)  # the same command, with the cause corrected
    assert len(outputs(tmp_path)) == 4


@pytest.mark.matrix("reader", ["JsonlReader", ORIGINAL])
def test_ranks_without_files_and_files_without_rows_are_complete(job, tmp_path, reader):
    for number in range(1, 4):
        (tmp_path / f"documents/{number}.jsonl").write_text("\n" * number if number > 1 else "")
    job(reader, tasks=6)
    assert len(completed(tmp_path)) == 6
    assert outputs(tmp_path) == ["text 0", "text 1"]


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["JsonlReader", ORIGINAL])
def test_a_filter_may_drop_every_document_and_so_may_skip(job, tmp_path, reader):
    drop = {"class_path": f"{__name__}.Drop"}
    job(reader, steps=(drop,))
    shutil.rmtree(tmp_path / "logs")
    shutil.rmtree(tmp_path / "checkpoints")
    job(reader, skip=100)
    assert outputs(tmp_path) == []


@pytest.mark.slow
def test_a_whole_input_of_empty_texts_is_no_success(job, tmp_path):
    for path in tmp_path.glob("documents/*"):
        path.write_text(json.dumps({"text": ""}))
    for _ in range(2):
        assert "No row of the input is a document. Skipped: 4 rows without text." in job(code=1).err
    (tmp_path / "documents/3.jsonl").write_text(lines(7))
    shutil.rmtree(tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "logs")
    assert "1 of 1" in job().out


@pytest.mark.parametrize("kind", [stat.S_IFSOCK, stat.S_IFIFO, stat.S_IFLNK])
@pytest.mark.parametrize("reader", ["JsonlReader", pytest.param(ORIGINAL, marks=pytest.mark.slow)])
def test_a_file_that_cannot_be_read_twice_is_refused_before_a_request(
    job, server, tmp_path, reader, kind
):
    special = tmp_path / "documents/9.jsonl"
    if kind == stat.S_IFLNK:
        special.symlink_to("/dev/zero")
    else:
        os.mknod(special, kind | 0o600)
    said = job(reader, code=1).err.splitlines()[-1]
    assert said.startswith(
        f"error: The input file '9.jsonl' in {tmp_path}/documents is a FIFO, a socket or a device"
    )
    assert server.payloads == []
    special.unlink()
    job(reader)
    assert len(outputs(tmp_path)) == 8


# What was skipped is said ------------------------------------------------------------------------


def test_skipped_lines_are_in_the_closing_lines_and_count_once_over_all_attempts(
    job, command, tmp_path
):
    first = tmp_path / "documents/0.jsonl"
    first.write_text(
        lines(0)
        + "torn\n"
        + '{"text": "", "id": 1}\n'
        + lines(1)
        + '{"id": 2}\n[1]\n'
        + lines(8, 9, 10)
    )
    (tmp_path / "documents/2.jsonl").write_bytes(gzip.compress(b"x"))
    (tmp_path / "documents/2.jsonl").rename(tmp_path / "documents/2.jsonl.gz")
    whole = gzip.compress((lines(4, 5) + "end\n").encode())
    (tmp_path / "documents/2.jsonl.gz").write_bytes(whole[:-4])
    for _ in range(2):
        said = job(max_skipped=1, code=1).err
        assert "`0.jsonl`, line 6: list, not an object" in said
        assert "without text, skipping. Is your `text_key` ('text') correct?" in said
    for _ in range(2):
        assert "'2.jsonl.gz' is damaged or cut off" in job(max_skipped=3, code=1).err
    (tmp_path / "documents/2.jsonl.gz").write_bytes(whole)
    skipped = "Skipped: 3 damaged lines and 2 rows without text."
    assert skipped in job(max_skipped=3).out
    assert "3 damaged lines" in command("status", "job.yaml")
    closing = [(tmp_path / f"logs/logs/task_0000{rank}.log").read_text() for rank in range(2)]
    assert "Task 0: 7 of 7" in closing[0]
    assert f"completion tokens. {skipped} If you" in closing[0]
    assert "Task 1: 4 of 4" in closing[1]
    assert "Skipped: " not in closing[1]
    assert skipped in job(max_skipped=3).out
    assert kept(tmp_path)["skipped"] == [3, 2]


# The input of a finished run ---------------------------------------------------------------------


def rewrite(path, old, new):
    path.write_text(path.read_text().replace(old, new))


CHANGES = [*golden.sections("changed_inputs")]


@pytest.mark.matrix(
    ("reader", "change"),
    [*(("JsonlReader", change) for change in CHANGES), (ORIGINAL, CHANGES[-1])],
)
def test_another_input_than_finished_ranks_have_read_is_refused_before_anything_runs(
    job, tmp_path, reader, change
):
    job(reader)
    before = outputs(tmp_path)
    shutil.copytree(tmp_path / "documents", tmp_path / "before")
    eval(change, {**globals(), "f": tmp_path / "documents"})
    said = job(reader, code=1).err
    files = [line for line in said.splitlines() if line.startswith("  '")]
    golden.hold("changed_inputs", change, "\n".join(files))
    assert "Put the input back, or process the new one as another run" in said
    shutil.rmtree(tmp_path / "documents")
    shutil.copytree(tmp_path / "before", tmp_path / "documents", copy_function=shutil.copyfile)
    job(reader)  # a copy with other times of change is the same input
    assert outputs(tmp_path) == before


def test_an_edit_that_samples_do_not_show_is_said_by_the_time_of_the_last_change(job, tmp_path):
    """Of a long file only the beginning and the end are compared."""
    long = tmp_path / "documents/1.jsonl"
    half = "word " * 20_000
    long.write_text(lines(f"{half}old {half}"))
    job()
    assert "so they count as unchanged" not in job().err
    rewrite(long, "old", "new")
    said = job().err
    assert "1 input file of finished tasks in " in said
    assert "so they count as unchanged" in said


def test_other_default_metadata_is_refused_for_finished_ranks(job, tmp_path):
    job(default_metadata={"a": 1, "b": [1], "api_key": "sesame"})
    assert "sesame" not in (tmp_path / "checkpoints/00000/shard.json").read_text()
    job(default_metadata={"b": [1], "a": 1, "api_key": "other"})
    said = job(default_metadata={"a": 2, "b": [1]}, code=1).err
    assert "default_metadata: {'a': 1, 'b': [1]} -> {'a': 2, 'b': [1]}" in said


def test_a_finished_rank_without_its_record_of_the_input_is_refused_and_the_advice_works(
    job, tmp_path
):
    job()
    record = tmp_path / "checkpoints/00000/shard.json"
    record.unlink()
    (tmp_path / "documents/0.jsonl").write_text(lines(7, 8))
    said = job(code=1).err
    assert f"{record} is missing. Restore it from a copy, or" in said
    assert "write {} into it" in said
    record.write_text("{}")
    job()


def padded_xz(path):
    path.write_bytes(
        lzma.compress(lines(0, 1, 2).encode()) + bytes(8) + lzma.compress(lines(3).encode())
    )


def zip_of_two(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.jsonl", lines(0, 1, 2))
        file.writestr("b.jsonl", lines(3))


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("write, suffix", [(padded_xz, "xz"), (zip_of_two, "zip")])
def test_a_run_of_an_earlier_release_that_has_read_half_of_a_file_is_refused(
    job, command, tmp_path, monkeypatch, write, suffix, is_finished
):
    name = f"0.jsonl.{suffix}"
    (tmp_path / "documents/0.jsonl").unlink()
    write(tmp_path / "documents" / name)
    with monkeypatch.context() as earlier:
        earlier.setattr(
            compressed, "_decompressed", lambda file, codec, _: compr[codec](file, mode="r")
        )
        earlier.setattr(base, "whole_option", lambda *_: {})
        earlier.setattr(earlier_runs, "refuse_partial_files", lambda *_: None)
        job(tasks=1, until=None if is_finished else 3)
    before = outputs(tmp_path)
    half = f"{name!r} was read by an earlier release only up to"
    for _ in range(2):
        assert half in job(tasks=1, code=1).err
        for what in ("job.yaml", "checkpoints"):
            assert half in command("verify", what, code=1).out
    assert outputs(tmp_path) == before
    for path in ("checkpoints", "output", "logs"):
        shutil.rmtree(tmp_path / path)
    if suffix == "xz":
        job(tasks=1)
        job(tasks=1)
        command("verify", "job.yaml")
        assert sorted(outputs(tmp_path)) == sorted(
            f"text {n}" for n in (0, 1, 2, 3, 2, 3, 4, 5, 6, 7)
        )
    else:
        assert "unzip 0.jsonl.zip -d FOLDER" in job(tasks=1, code=1).err


def test_finished_ranks_refuse_what_unfinished_ones_may_see(job, tmp_path):
    """Task 0 is finished. Rank 1 stops in its second file, which is then corrected."""
    second = tmp_path / "documents/3.jsonl"
    second.write_bytes(b"")
    second = second.rename(second.with_suffix(".jsonl.gz"))
    second.write_bytes(gzip.compress(lines(6, 7).encode())[:-3])
    job(code=1)
    assert completed(tmp_path) == ["00000"]
    (tmp_path / "documents/00.jsonl").write_text("")
    assert "is not what task 0 read:\n  '" in job(code=1).err
    (tmp_path / "documents/00.jsonl").unlink()
    second.write_bytes(gzip.compress(lines(6, 7, 8).encode()))
    job()
    assert sorted(outputs(tmp_path)) == [f"text {number}" for number in range(9)]


@pytest.mark.matrix("limit", [-1, 4])
def test_lines_that_come_while_a_file_is_read_are_part_of_the_finished_input(
    job, tmp_path, monkeypatch, limit
):
    """Files of rank 0: 0.jsonl, with documents 0 and 1, and 2.jsonl, with 4 and 5.

    Document 8 is appended to one.
    """
    grown = tmp_path / ("documents/0.jsonl" if limit == -1 else "documents/2.jsonl")
    make = JsonlReader.get_document_from_dict

    def grow(self, row, name, id_in_file):
        if name == grown.name and id_in_file == 0:
            with grown.open("a") as file:
                file.write(lines(8))
        return make(self, row, name, id_in_file)

    with monkeypatch.context() as patch:
        patch.setattr(JsonlReader, "get_document_from_dict", grow)
        job(limit=limit)
    found = outputs(tmp_path)
    job(limit=limit)  # nothing has changed since it was read
    (tmp_path / "logs/completions/00000").unlink()
    job(limit=limit)
    assert outputs(tmp_path) == found
    record = kept(tmp_path)["readers"][0]["files"]
    assert [file[:2] for file in record] == [
        [f"{n}.jsonl", (tmp_path / f"documents/{n}.jsonl").stat().st_size] for n in (0, 2)
    ]
    with grown.open("a") as file:
        file.write(lines(9))
    assert f"'{grown.name}' had {record[limit != -1][1]} bytes" in job(limit=limit, code=1).err


@pytest.mark.usefixtures("code_described_once")
@pytest.mark.matrix("step", [9, 1])
def test_the_record_is_right_after_a_crash_at_every_effect(ram, monkeypatch, step):
    """Of two chunks, the first is committed before the record is written, the second after that.

    The effects of threads then come in one order, and crashes hit the record between the two
    commits.
    """
    folder = ram / "job"
    (folder / "documents").mkdir(parents=True)
    (folder / "documents/a.jsonl").write_text(lines(0) + "torn\n" + lines(1) + '{"text": ""}\n')
    rank = folder / "checkpoints/00000"
    publish = Publisher._publish

    async def last_once_committed(document, generate):
        while document.id == "id 1" and not read_commits(rank / "commits.jsonl"):
            await asyncio.sleep(0.001)
        return await ask(document, generate)

    def last_once_recorded(self, chunk, journal):
        until(lambda: chunk.index != 1 or (rank / "shard.json").exists())
        return publish(self, chunk, journal)

    monkeypatch.setattr(Publisher, "_publish", last_once_recorded)
    monkeypatch.setattr(open_checkpoint, "MAX_GROUP", 1)
    with FakeServer() as server:
        job = runner(folder, server, last_once_committed, records_per_chunk=1, sync_seconds=3600)

        def attempt(folder):
            job.run(JsonlReader((folder / "documents").as_posix(), max_skipped=1).run())
            assert kept(folder)["skipped"][:2] == [1, 1]
            assert [file[0] for file in kept(folder)["readers"][0]["files"]] == ["a.jsonl"]

        report = assert_same_output_after_crash(
            attempt, folder, counted=OF_FILES, step=step, recoveries=0
        )
    for effect in ("create shard.json.new", "write shard.json.new", "rename shard.json"):
        assert effect in report.points
