"""``datatrove-ckpt status`` from outside: text, JSON, a terminal, pipes; folders, mirrors and YAML
files.
"""

import json
import random
from functools import partial
from pathlib import Path

import pytest

from datatrove_ckpt.claims.claims import GIVEN_UP, RUN, Claim, DiskClaims, new_owner
from datatrove_ckpt.testing import FakeServer
from tests.mirrors import Killed, known_ordinals
from tests.rank_folders import failed, start, stopped, write_rank
from tests.yaml_jobs import ENDPOINT, job_yaml


@pytest.fixture
def said(command):
    return partial(command, "status")


# text and JSON -----------------------------------------------------------------------------------


def test_missing_ranks_and_a_run_that_goes_on_with_the_same_command_are_said(tmp_path, said):
    for number in (0, 1, 12):
        write_rank(tmp_path, number, chunks=1, finished=True, tasks=10)
    (tmp_path / "last_chunk").mkdir()
    (tmp_path / "last_chunk/00004.txt").write_text("0\n")
    text = said(tmp_path)
    assert "removed, though they had begun: 4; `run` restores them from the mirror" in text
    assert "folders beyond the run's 10 tasks: 12, which are not counted\n" in text
    assert "Nothing runs now, and the run is not finished. To resume, " in text
    (row,) = [line for line in said(tmp_path, "--all").splitlines() if line.startswith("     1  ")]
    assert [*row.split()[:2], *row.split()[-3:]] == ["1", "finished", "100", "%", "10"]
    found = json.loads(said(tmp_path, "--json"))
    assert (found["missing"], found["gone"], found["foreign"]) == (
        [2, 3, 4, 5, 6, 7, 8, 9],
        [4],
        [12],
    )


@pytest.mark.parametrize("end", [RUN, ""])
def test_a_process_between_two_tasks_runs(tmp_path, said, end):
    write_rank(tmp_path / "checkpoints", 0, chunks=1, finished=True, tasks=2)
    store = DiskClaims(tmp_path / "logs/claims", new_owner(end))
    assert "Nothing runs" not in said(tmp_path)
    store.close()
    assert "Nothing runs now, and the run is not finished." in said(tmp_path)


def test_a_failed_task_that_a_worker_starts_again_needs_no_attention(tmp_path, said):
    for number, cause in enumerate(("no key", "bad input", "a stop")):
        end = stopped(200.0) if cause == "a stop" else failed(200.0, cause)
        write_rank(tmp_path / "checkpoints", number, history=[start(100.0), end], tasks=4)
    assert "3 tasks need attention" in said(tmp_path)
    store = DiskClaims(tmp_path / "logs/claims", new_owner())
    store.put(
        Claim(1, 1, f"{GIVEN_UP}-x"), {"tries": 1, "reached": [0], "why": "bad", "alone": False}
    )
    text = said(tmp_path)
    assert "1 task needs attention:" in text
    assert "bad input" in text
    assert "no key" not in text
    assert "2 failed, 1 interrupted" in text
    store.close()
    assert "3 tasks need attention" in said(tmp_path)
    runs_all = DiskClaims(tmp_path / "logs/claims", new_owner(RUN))
    assert "3 tasks need attention" in said(tmp_path), "that run ends with the error"
    runs_all.close()


def test_documents_that_are_dead_for_the_most_part_need_attention(tmp_path, said):
    letters = [("str", f"HTTP 404: no model {number}") for number in range(11)]
    write_rank(tmp_path, 0, chunks=1, per_chunk=20, letters=letters, finished=True, tasks=2)
    told = "Over half of the documents are dead letters, most often HTTP 404: no model 0."
    assert told in said(tmp_path)
    write_rank(tmp_path, 1, chunks=1, tasks=2)
    (tmp_path / "00001/run.json").write_text("{")
    lines = said(tmp_path, code=1).splitlines()
    heading = lines.index("1 task needs attention:")
    assert lines[heading + 1].startswith("  task 1: damaged: ")
    assert lines[heading + 2].startswith("Over half of the documents are dead letters")


def test_a_run_folder_names_the_command_that_resumes_and_the_log_of_a_failed_task(
    here, command, said, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-a-key-that-nobody-may-see")
    Path("in.jsonl").write_text('{"text": "a", "id": "1"}')
    with FakeServer(status=lambda payload, times: 400) as server:
        words = ["run", "--input", "in.jsonl", "--model", "fake", "--endpoint", server.url]
        words += ["--prompt", "{text} sk-a-key-that-nobody-may-see"]
        command(*words, "--run-folder", "r", code=1)
    text = said("r")
    assert "Log: r/logs/logs/task_00000.log. To resume: datatrove-ckpt run --input in.j" in text
    assert text.rstrip().endswith("--run-folder r")
    assert "nobody-may-see" not in text
    assert "nobody-may-see" not in Path("r/logs/command.txt").read_text()
    Path("r").rename("here")
    again = said("here").rstrip()
    assert again.endswith("***' --run-folder here")
    assert "--run-folder r" not in again


def test_a_run_of_a_yaml_file_is_resumed_by_the_whole_command(here, said):
    write_rank(here / "ck", 0, chunks=1, tasks=1)
    Path("job.yaml").write_text(job_yaml(ENDPOINT))
    given = ("job.yaml", "--pipeline.1.checkpoints_local_dir=ck")
    assert said(*given).splitlines()[-1].endswith(f"will: datatrove-ckpt run {' '.join(given)}")


# mirrors and YAML files --------------------------------------------------------------------------


# what ``status --json`` says after kill -9 at random moments is what was counted from outside ----


@pytest.mark.matrix("kills", [2, 20])
def test_status_tells_the_truth_after_kills(tmp_path, said, kills):
    chance = random.Random(kills)
    killed = Killed(tmp_path, str(tmp_path / "remote"), 0.001, kills)
    number = killed.documents
    with FakeServer(delay=killed.delay) as server:
        for attempt in range(1, kills + 1):
            assert killed._run_once(server, chance.randrange(3, 20))
            found = json.loads(said(tmp_path / "checkpoints", "--json"))
            (state,) = found["ranks"]
            assert (state["number_of_attempts"], state["state"], state["trouble"]) == (
                attempt,
                "lost",
                "lost",
            )
            assert [one["number"] for one in state["attempts"] if one["without_a_word"]] == [
                *range(1, attempt + 1)
            ]
            finished, _ = known_ordinals(tmp_path / "checkpoints/00000")
            assert state["counts"]["read"] + state["unfinished"]["read"] == len(finished)
            assert state["exact"]
        assert not killed._run_once(server, None)
        asked = server.asked
    found = json.loads(said(tmp_path / "checkpoints", "--json"))
    totals = found["totals"]
    assert found["is_finished"]
    assert (totals["number_of_attempts"], totals["killed"]) == (kills + 1, kills)
    assert totals["counts"]["read"] == totals["counts"]["written"] == number
    assert totals["counts"]["requests"] == len(asked) == 2 * number
    assert totals["counts"]["reasons"] == {"stop": 2 * number}
    assert totals["counts"]["prompt_tokens"] == sum(len(question.split()) for question in asked)
    # What was sent is at most what the server saw: the last minute of an attempt that was killed is
    # not known.
    assert totals["work"]["sent"] <= asked.total()
