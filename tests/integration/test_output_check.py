"""Exit code 0 means that the output is what the checkpoints say: removed, changed and added files
are seen.
"""

import json
import re
import shlex
import shutil
from itertools import count

import fsspec
import pytest
from datatrove.data import Document
from datatrove.io import get_datafolder
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from fsspec.implementations.memory import MemoryFileSystem

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.cli.short_form import make_executor
from datatrove_ckpt.errors import ConfigError, OutputMismatch
from datatrove_ckpt.output.file_names import output_pattern, rank_and_chunk
from datatrove_ckpt.output.output_folder import OutputFolder
from datatrove_ckpt.output.writer_checks import stands_elsewhere
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.run_folder import earlier_runs
from datatrove_ckpt.run_folder.run_plan import RunPlan
from datatrove_ckpt.testing import outputs
from tests.crashes import crash_at
from tests.jobs import ids, run_job, runner, writer
from tests.kept import content_of
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

JOB = job_yaml(f"{ENDPOINT}, request_max_attempts: 1", tasks=2) + "          records_per_chunk: 2\n"


@pytest.fixture
def job(here, server):
    """A job of two ranks that has not run yet, in the working directory."""
    texts = ["text " + "x" * n for n in range(10)]
    write_job(here, JOB.replace("URL", server.url), texts[:5], texts[5:])
    return here


def follow_advice(message, command):
    """Runs the command that the message names, and the same run again."""
    found = re.search(
        "datatrove-ckpt (repair .*?), then run again(, with --retry-dead-letters)?",
        message,
    )
    assert found, message
    command(*shlex.split(found[1]))
    command("run", "job.yaml", *(["--retry-dead-letters"] if found[2] else []))


class Busy(MemoryFileSystem):
    """Answers no question about what is there.

    Its ``exists`` is fsspec's, and takes any error for a no.
    """

    protocol = "busy"

    def info(self, path, **options):
        raise OSError("429 Too Many Requests")


def test_a_folder_that_cannot_be_asked_after_may_still_be_there():
    """Else what was written there would be made, and paid for, again."""
    fsspec.register_implementation("busy", Busy, clobber=True)
    assert stands_elsewhere("busy://old", get_datafolder("memory://new"))
    assert not stands_elsewhere("memory://old", get_datafolder("memory://new"))


def test_output_of_a_run_that_starts_meanwhile_is_not_called_nobodys(job, command, monkeypatch):
    _, executor = make_executor(str(job / "job.yaml"), [])
    look = OutputFolder.look

    def starts_meanwhile(*arguments, **options):
        with monkeypatch.context() as inside:
            inside.setattr(OutputFolder, "look", look)
            command("run", "job.yaml")
        return look(*arguments, **options)

    monkeypatch.setattr(OutputFolder, "look", starts_meanwhile)
    earlier_runs.compare_outputs(RunPlan(executor))


# files that no commit knows ----------------------------------------------------------------------


@pytest.mark.matrix(
    ("template", "name"),
    [
        # Of datatrove's own InferenceRunner.
        ("${rank}_chunk_${chunk_index}.jsonl", "00000_chunk_0.jsonl"),
        ("${rank}_chunk_${chunk_index}.jsonl", "00000_chunk_retry1_00000.jsonl"),
        ("${rank}/${chunk_index}.jsonl", "00000/00007.jsonl"),
        ("${lang}/${rank}_${chunk_index}.jsonl", "en/00000_00000.jsonl"),
    ],
)
def test_files_of_another_run_that_fit_the_template_are_refused_at_the_first_start(
    tmp_path, server, template, name
):
    path = tmp_path / "output" / name
    path.parent.mkdir(parents=True)
    path.write_text("of another run\n")
    output = JsonlWriter(str(tmp_path / "output"), template, compression=None)
    for _ in range(2):
        with pytest.raises(OutputMismatch, match=re.escape(f"names: {name}. Documents may")):
            runner(tmp_path, server, output_writer=output).run(
                [Document("a", "0", metadata={"lang": "fr"})]
            )
    assert outputs(tmp_path / "output") == {name: b"of another run\n"}
    path.unlink()
    for _ in range(2):
        runner(tmp_path, server, output_writer=output).run(
            [Document("a", "0", metadata={"lang": "fr"})]
        )
    assert main(["verify", str(tmp_path / "checkpoints"), "--full"]) == 0


def test_a_stray_file_is_refused_also_where_names_have_fields_of_documents(tmp_path, server):
    output = JsonlWriter(str(tmp_path / "output"), "${lang}/${rank}_${chunk_index}.jsonl")
    given = [Document("a", "0", metadata={"lang": "fr"})]
    runner(tmp_path, server, output_writer=output).run(given)
    (tmp_path / "output/en").mkdir()
    (tmp_path / "output/en/00000_00009.jsonl").touch()
    with pytest.raises(OutputMismatch, match=r"task 0 names: en/00000_00009\.jsonl\. "):
        runner(tmp_path, server, output_writer=output).run(given)


def test_digits_beside_a_rank_are_no_part_of_it():
    pattern = output_pattern("${rank}${number}_${chunk_index}.jsonl")
    assert rank_and_chunk(pattern.fullmatch("0000012_00003.jsonl")) == (("", 0), 3)
    pattern = output_pattern("${rank}_${chunk_index}.jsonl")
    assert rank_and_chunk(pattern.fullmatch("123456_00003.jsonl")) == (("", 123456), 3)


# folders that must differ ------------------------------------------------------------------------


@pytest.mark.matrix(
    ("old", "new", "says"),
    [
        ("output_folder: output", "output_folder: ./input/answers/", "leave out 00000_00000.jsonl."),
        ("data_folder: input", "data_folder: .", "and would be its input"),
        ("data_folder: input", "data_folder: ., glob_pattern: 'input/*.jsonl'", None),
        ("output_folder: output", "output_folder: checkpoints", "is in checkpoints_local_dir"),
        ("output_folder: output", "output_folder: checkpoints/answers", None),
        ("      - class_path: InferenceRunner",
         "      - class_path: JsonlWriter\n        init_args: {output_folder: output, output_filename: "
         "'${rank}_00000.jsonl', compression: null}\n      - class_path: InferenceRunner",
         "pipeline[2] InferenceRunner: output_writer writes the same files as pipeline[1] JsonlWriter"),
    ],
)  # fmt: skip
def test_a_job_that_would_read_or_overwrite_its_own_files_is_refused_before_it_starts(
    job, command, old, new, says
):
    text = (job / "job.yaml").read_text()
    assert old in text
    (job / "job.yaml").write_text(text.replace(old, new))
    said = command("run", "job.yaml", "--dry-run", code=2 if says else 0)
    assert says is None or says in said.error


# the closing line --------------------------------------------------------------------------------


def test_the_last_line_and_the_status_agree_on_retries_and_on_answers_that_are_cut_off_or_empty(
    job,
    command,
    server,
    monkeypatch,
):
    def answer(payload, times):
        number = payload["messages"][-1]["content"].count("x") - 1  # of "text"
        server.finish_reason = (
            "length" if number in (2, 3) else "tool_calls" if number == 5 else "stop"
        )
        server.message = {"tool_calls": [{"function": {"name": "look"}}]} if number == 5 else {}
        if number == 2:
            return "fine" + "\n" * 99
        return "" if number in (3, 5, 7) else "fine"

    monkeypatch.setattr(server, "_answer", answer)
    monkeypatch.setattr(
        server, "_status", lambda payload, times: 400 if "x" * 9 in str(payload) else None
    )
    (job / "job.yaml").write_text(
        (job / "job.yaml").read_text() + "          skip_bad_requests: true\n"
    )
    said = command("run", "job.yaml")
    assert "2 of 9 answers were cut off at max_tokens (raise it" in said
    assert " and 2 of 9 answers are empty. " in said
    assert "ended in blanks up to max_tokens" in said
    monkeypatch.setattr(server, "_status", lambda payload, times: None)
    said = command("run", "job.yaml", "--retry-dead-letters")
    assert "10 of 10 documents" in said
    assert "(0 dropped, 0 dead letters), for 11 requests" in said
    assert "2 of 10 answers were cut off" in said
    status = command("status", "job.yaml").out
    assert "10 done: 10 written in 7 chunks, 0 dropped, 0 dead\n" in status
    assert "2 of 10 answers were cut off" in status
    found = command.json("status", "job.yaml")
    delivered = {"read": 10, "dead": 0, "answers": 10, "cut_off": 2, "empty": 2}
    assert found["delivered"] == found["delivered"] | delivered


def test_an_input_without_documents_is_refused_also_by_the_same_command(job, command):
    for path in (job / "input").iterdir():
        path.write_text("")
    for _ in range(2):
        said = command("run", "job.yaml", code=1)
        assert "No row of the input is a document. Check its files" in said.error
    log = (job / "logs/logs/task_00000.log").read_text()
    assert "Task 0: there are no documents in its input." in log
    assert "  documents  none in the input\n" in command("status", "job.yaml").out


def test_a_node_whose_tasks_have_no_document_ends_well(job, command):
    (job / "input/1.jsonl").write_text("")
    command("run", "job.yaml", "--executor.local_tasks=1", "--executor.local_rank_offset=1")
    command("run", "job.yaml")


def test_a_retry_without_dead_letters_is_said(job, command):
    command("run", "job.yaml")
    said = command("run", "job.yaml", "--retry-dead-letters")
    assert " There was no dead letter to retry. " in said
    assert "To check the files: " in said


def test_a_script_that_would_read_its_own_output_is_refused_before_anything_is_asked(
    tmp_path, server
):
    (tmp_path / "input").mkdir()
    (tmp_path / "input/0.jsonl").write_text('{"id": "0", "text": "a"}\n')
    step = runner(tmp_path, server, output_writer=writer(tmp_path / "input"))
    reader = JsonlReader(str(tmp_path / "input"))
    with pytest.raises(
        ConfigError,
        match=r"/input/output' is inside the folder that JsonlReader reads, '.*/input', and",
    ):
        step.run(reader.run(None, 0, 1), 0, 1)
    assert not server.asked


def test_a_killed_run_goes_on_in_another_form_with_each_document_once(tmp_path, server):
    import pandas

    for number in count(66, 10):  # one file is published, both, one is committed, both
        folder = tmp_path / str(number)
        with crash_at(number, folder) as disk:
            run_job(folder, server, 3)
        if disk.crashed_at is None:
            break
        table = ParquetWriter(str(folder / "output"), "${rank}_chunk_${chunk_index}.parquet")
        run_job(folder, server, 3, output_writer=table, accept_changes=True)
        found = ids(folder)
        for path in (folder / "output").glob("*.parquet"):
            found += pandas.read_parquet(path)["id"].tolist()
        assert sorted(found) == ["id 0", "id 1", "id 2"], number
    assert number > 90


# lost commits of a finished rank are damage, whatever proves them --------------------------------


def cut_log(job, lines):
    log = job / "checkpoints/00000/commits.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:lines]))


def forget_last_chunk(job):
    shutil.rmtree(job / "checkpoints/last_chunk")


def forget_documents(job):
    """As an earlier release left it."""
    path = job / "checkpoints/00000/shard.json"
    shard = content_of(path) | {"version": 1}
    del shard["documents"]
    path.write_text(json.dumps(shard))


@pytest.mark.matrix("lines", [0, 2])
@pytest.mark.parametrize(
    "forget, proof",
    [
        (forget_last_chunk, "shard.json says that the finished task read 5."),
        (forget_documents, "last_chunk"),
    ],
)
def test_lost_commits_of_a_finished_rank_are_damage_and_the_advice_works(
    job,
    command,
    server,
    forget,
    proof,
    lines,
):
    command("run", "job.yaml")
    before = outputs(job / "output")
    cut_log(job, lines)
    forget(job)
    asked = server.asked.total()
    said = command("run", "job.yaml", code=1).error
    assert server.asked.total() == asked
    assert f"00000/commits.jsonl holds {lines} commits" in said
    assert proof in said
    assert "elete" not in said
    assert "With neither, datatrove-ckpt repair " in said
    assert outputs(job / "output") == before
    follow_advice(said, command)
    assert outputs(job / "output") == before
    command("verify", "checkpoints", "--full")
