"""Documents that fail: the rank stops, or they become dead letters that hold all a second try
needs.
"""

import os
import signal

import pytest

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.errors import DocumentFailed, WorkerDied
from datatrove_ckpt.executors.local import LocalPipelineExecutor as OurExecutor
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer, outputs
from tests.crashes import OF_FILES, assert_same_output_after_crash
from tests.jobs import ask, documents, fails_at, ids, letters, rejects, run_job, runner
from tests.yaml_jobs import endpoint, job_yaml, write_input, write_job

BAD = {"id 1", "id 4"}


async def fails_on_bad(document, generate):
    document.metadata["touched"] = True
    result = await ask(document, generate)
    if document.id in BAD:
        raise RuntimeError(f"cannot make sense of {document.id}")
    return result


def test_a_dead_letter_holds_cause_and_document_as_it_was_read(tmp_path, server):
    run_job(tmp_path, server, 6, fails_on_bad, on_document_error="dead_letter")
    assert ids(tmp_path) == ["id 0", "id 2", "id 3", "id 5"]
    letter, other = letters(tmp_path)
    assert (other["id"], other["ordinal"]) == ("id 4", 4)
    assert "in fails_on_bad" in letter["traceback"]
    assert len(letter["payload_hashes"]) == 1
    expected = {"id": "id 1", "ordinal": 1, "attempts": 1, "kind": "RuntimeError"}
    expected["error"] = "RuntimeError: cannot make sense of id 1"
    expected["document"] = {"text": "text 1", "id": "id 1", "media": [], "metadata": {}}
    assert letter.items() >= expected.items()


def test_a_dead_letter_says_where_its_document_stands_in_the_input(tmp_path, server):
    """A position is a reader's state right after the document."""
    write_input(tmp_path, [f"text {n}" for n in range(6)])
    step = runner(tmp_path, server, fails_on_bad, on_document_error="dead_letter")
    step.run(JsonlReader(str(tmp_path / "input")).run())
    following = []
    for letter in letters(tmp_path):
        reader = JsonlReader(str(tmp_path / "input"))
        reader.load_state_dict(letter["position"])
        following.append(next(iter(reader.run())).id)
    assert following == ["id 2", "id 5"]


def test_retrying_processes_just_the_dead_letters_into_files_of_their_own(
    tmp_path, server, monkeypatch
):
    def retry():
        server.asked.clear()
        runner(tmp_path, server, fails_on_bad, retry_dead_letters=True, **settings).run([])

    settings = {"on_document_error": "dead_letter"}
    run_job(tmp_path, server, 6, fails_on_bad, **settings)
    before = ids(tmp_path)

    monkeypatch.setattr("tests.integration.test_dead_letters.BAD", {"id 4"})
    retry()
    assert ids(tmp_path, "00000_chunk_0*") == before
    assert ids(tmp_path, "00000_chunk_retry1_*") == ["id 1"]
    assert set(server.asked) == {"text 1", "text 4"}
    assert [(x["ordinal"], x["attempts"]) for x in letters(tmp_path, "retry-00001")] == [(4, 2)]

    monkeypatch.setattr("tests.integration.test_dead_letters.BAD", set())
    retry()
    assert ids(tmp_path, "00000_chunk_retry2_*") == ["id 4"]
    retry()
    assert not server.asked, "nothing is left to retry"


@pytest.mark.matrix("lost", ["00000_chunk_00000.jsonl", "00000_chunk_retry1_00000.jsonl"])
def test_documents_that_a_retry_has_taken_stay_out_of_a_chunk_that_is_made_again(
    tmp_path, server, lost
):
    """Documents 1 and 2 fail first.

    The first retry writes 2 of them, the second retry the other one.
    """
    bad = {"id 1", "id 2"}

    def run(retrying=False):
        changes = {
            "on_document_error": "dead_letter",
            "records_per_chunk": 3,
            "accept_changes": True,
        }
        step = runner(tmp_path, server, fails_at(bad), **changes)
        step.retry_dead_letters = retrying
        step.run([] if retrying else documents(5))

    run()
    bad.remove("id 2")
    run(retrying=True)
    bad.clear()
    run(retrying=True)
    before = outputs(tmp_path / "output")
    (tmp_path / "output" / lost).unlink()
    assert main(["repair", str(tmp_path / "checkpoints")]) == 0
    server.asked.clear()
    run(retrying="retry" in lost)
    assert outputs(tmp_path / "output") == before
    assert sorted(server.asked) == (["text 2"] if "retry" in lost else ["text 0"])
    server.asked.clear()
    run(retrying=True)
    assert not server.asked, "nothing is left to retry"
    assert main(["verify", str(tmp_path / "checkpoints"), "--full"]) == 0


def test_a_retry_that_a_rejection_stops_says_how_it_goes_on(tmp_path):
    with FakeServer(status=rejects(["text 1"])) as server:
        run_job(tmp_path, server, 2, on_document_error="dead_letter")
        with pytest.raises(
            DocumentFailed, match=r"dead letters of rejected documents, set skip_bad_requests"
        ):
            runner(tmp_path, server, retry_dead_letters=True).run([])


def write_tasks(folder, server, *tasks):
    text = job_yaml(endpoint(server), tasks=2)
    write_job(folder, text + "          skip_bad_requests: true\n", *tasks)


def test_the_command_line_retries_finished_ranks_and_refuses_others(here, command):
    job, refused = "job.yaml", ["Say a", "Say e"]
    with FakeServer(status=rejects(refused)) as server:
        write_tasks(here, server, "abc", "def")
        said = command("run", job, "--retry-dead-letters", code=2).err
        assert "2 of 2 tasks are not finished" in said
        printed = command("run", job).out
        assert "4 of 6 documents are in 2 files" in printed
        assert "Retried" not in printed
        refused.remove("Say e")
        printed = command("run", job, "--retry-dead-letters", "--pipeline.1.retry_errors=true").out
        assert "5 of 6 documents are in 3 files" in printed
        assert " completion tokens. Retried 2 dead letters: 1 succeeded, 1 still dead. " in printed
        printed = command("run", job, "--pipeline.1.retry_dead_letters=true").out
        assert " Retried 1 dead letter: 0 succeeded, 1 still dead. " in printed
        assert "Retried" not in command("run", job), "what earlier commands retried"
    assert (
        "Task 1: there are no dead letters to retry"
        in (here / "logs/logs/task_00001.log").read_text()
    )
    assert "once more." in (here / "logs/logs/task_00000.log").read_text()
    assert ids(here, "*_retry1_*") == ["id 4"]


def test_a_run_whose_every_document_was_rejected_does_not_end_with_0(here, command):
    with FakeServer(status=rejects(["Say a", "Say b", "Say c"])) as server:
        write_tasks(here, server, "ab", "c")
        for _ in range(2):
            said = command("run", "job.yaml", code=1).err
            assert (
                "All documents are dead letters: refused with 400 (BadRequestError: HTTP 400). To"
                in said
            )
            assert "Correct the cause, and set retry_dead_letters." in said
        server._status = rejects(["Say b"])
        command("run", "job.yaml", "--retry-dead-letters")


@pytest.mark.slow
def test_a_retry_whose_workers_are_killed_is_not_complete(tmp_path, server):
    """Its ranks have markers, those of the run before."""

    async def rollout(document, generate):
        if (tmp_path / "kill").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if document.id == "id 0":
            raise ValueError("bad")
        return "good"

    def execute(retry, **settings):
        step = runner(
            tmp_path, server, rollout, on_document_error="dead_letter", retry_dead_letters=retry
        )
        places = {"logging_dir": str(tmp_path / "logs"), "start_method": "fork"}
        OurExecutor([documents(2), step], tasks=1, workers=2, **places, **settings).run()

    execute(retry=False)
    (tmp_path / "kill").touch()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        execute(retry=True, max_rank_attempts=1)
    (tmp_path / "kill").unlink()
    execute(retry=True)


@pytest.mark.usefixtures("code_described_once")
@pytest.mark.matrix("retrying, step", [(False, 9), (False, 1), (True, 1)])
def test_dead_letters_are_each_there_once_after_a_crash_at_every_effect(
    ram, server, retrying, step
):
    folder = ram / "job"
    folder.mkdir()
    settings = {"on_document_error": "dead_letter"}
    if retrying:
        run_job(folder, server, 3, fails_on_bad, **settings)

    def attempt(folder):
        run_job(folder, server, 3, fails_on_bad, retry_dead_letters=retrying, **settings)
        if retrying:
            # An interrupted retry is resumed; after a complete one, another starts.
            assert [letter["attempts"] for letter in letters(folder, "retry-00001")] == [2]
        assert [letter["ordinal"] for letter in letters(folder)] == [1]

    assert_same_output_after_crash(
        attempt, folder, torn=True, counted=OF_FILES, step=step, recoveries=0
    )
