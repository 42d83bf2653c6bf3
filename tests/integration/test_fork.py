"""``fork``: a new run with a changed prompt or model, which keeps answers to equal payloads, and checks the input."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datatrove.data import Document

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.layout import LOCK, is_finished
from datatrove_ckpt.checkpoint.request_cache import RequestCache, read_answers
from datatrove_ckpt.errors import CheckpointMismatch, DocumentFailed
from datatrove_ckpt.maintenance.verify import verify
from datatrove_ckpt.mirror.restore import restore_rank
from datatrove_ckpt.testing import FakeServer, assert_same_output_after_crash, outputs
from datatrove_ckpt.testing.disks import CrashingDisk, disk_in_place
from tests.commands import Command, Printed
from tests.crash.test_every_effect import OF_FILES
from tests.jobs import documents, writer
from tests.make_release import run
from tests.patience import until_async
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

from .test_releases import NEWEST, VERSIONS, kept, restored

DOCUMENTS = 7
Fork = Callable[..., Printed]


def number_of_commits(path: str) -> int:
    return Path(path).read_bytes().count(b"\n") if Path(path).exists() else 0


class TwoSteps:
    """Two requests for each document; the second one depends on the style."""

    def __init__(self, style: str, stop_at: str | None = None, commits: Path | None = None) -> None:
        self.style = style
        self.stop_at = stop_at
        self._commits = str(commits)

    async def __call__(self, document: Document, generate: Any) -> Any:
        first = await generate({"messages": [{"role": "user", "content": f"Say {document.text}"}]})
        if document.id == self.stop_at:
            await until_async(lambda: number_of_commits(self._commits) >= 2)
            raise RuntimeError("stopped between two requests, with two chunks committed")
        second = await generate({"messages": [{"role": "user", "content": f"{self.style}: {first.text}"}]})
        return second.text


def start(
    folder: Path,
    server: FakeServer,
    rollout: TwoSteps,
    number: int = DOCUMENTS,
    changed: str | None = None,
    config: dict[str, Any] | None = None,
    world_size: int = 1,
    **settings: Any,
) -> None:
    """Runs the only task. ``changed``: id of a document with another text."""
    found = documents(number)
    for document in found:
        document.text += " changed" if document.id == changed else ""
    InferenceRunner(
        rollout,
        InferenceConfig(
            server_type="endpoint",
            endpoint_url=server.url,
            **{"model_name_or_path": "fake", "max_concurrent_generations": 1, **(config or {})},
        ),
        writer(folder),
        checkpoints_local_dir=str(folder / "checkpoints"),
        **{"records_per_chunk": 2, **settings},
    ).run(found, 0, world_size)


@pytest.fixture
def old(tmp_path: Path, server: FakeServer) -> Path:
    """A run that has stopped: documents 0 to 3 are committed, 4 is in a journal, 5 has its first answer."""
    folder = tmp_path / "old"
    with pytest.raises(DocumentFailed):
        start(folder, server, TwoSteps("Shorter", "id 5", folder / "checkpoints" / "00000" / "commits.jsonl"))
    server.asked.clear()
    return folder


@pytest.fixture
def fork(command: Command) -> Fork:
    """Forks the checkpoints of a job into another folder."""
    return lambda old, new, *more, code=0: command("fork", old / "checkpoints", new / "checkpoints", *more, code=code)


def first_requests(server: FakeServer) -> set[str]:
    """The documents whose first request was sent."""
    return {question.removeprefix("Say text ") for question in server.asked if question.startswith("Say")}


@pytest.mark.matrix
@pytest.mark.parametrize("per_chunk", [1, 2, 3, 100])
def test_only_answers_to_equal_payloads_are_not_asked_again(
    per_chunk: int, old: Path, tmp_path: Path, server: FakeServer, fork: Fork
) -> None:
    new, fresh = tmp_path / "new", tmp_path / "fresh"
    before = kept(old)
    said = fork(old, new).out
    assert "1 task, 5 finished documents\n" in said
    assert "input: 3 positions in it kept" in said
    assert "answers: 3 of 2 documents kept." in said
    assert "at most 3 requests" in said
    assert "not kept: results, and the answers of 4 committed documents" in said
    assert re.search(r"cost: for about \d documents, if each takes what it took before: 1\d requests, ", said)
    start(new, server, TwoSteps("Longer"), records_per_chunk=per_chunk)
    assert first_requests(server) == {"0", "1", "2", "3", "6"}
    assert sum(server.asked.values()) == 5 + DOCUMENTS
    start(fresh, server, TwoSteps("Longer"), records_per_chunk=per_chunk)
    assert outputs(new / "output") == outputs(fresh / "output")
    report = verify(new / "checkpoints", full=True)
    assert (report.problems, report.unfinished) == ([], [])
    assert kept(old) == before


@pytest.mark.matrix
@pytest.mark.parametrize("finished", [True, False])
def test_with_keep_answers_committed_documents_are_not_asked_again_either(
    finished: bool, tmp_path: Path, server: FakeServer, fork: Fork
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    commits = old / "checkpoints" / "00000" / "commits.jsonl"
    if finished:
        start(old, server, TwoSteps("Shorter"), keep_answers=True)
        assert is_finished(commits.parent)
    else:
        with pytest.raises(DocumentFailed):
            start(old, server, TwoSteps("Shorter", "id 5", commits), keep_answers=True)
    kept_answers = commits.with_name("answers.jsonl")
    assert kept_answers.stat().st_mode & 0o777 == 0o600
    # A kill between the two steps of dropping a chunk leaves its answers twice; a power loss leaves parts of lines.
    kept_answers.write_bytes(kept_answers.read_bytes() * 2 + b'{"xxh":"00')
    server.asked.clear()
    answers = 2 * DOCUMENTS if finished else 11
    assert f"answers: {answers} of {DOCUMENTS if finished else 6} documents kept." in fork(old, new).out
    start(new, server, TwoSteps("Longer"))
    assert first_requests(server) == (set() if finished else {"6"})
    assert sum(server.asked.values()) == DOCUMENTS + (not finished)
    assert not (new / "checkpoints" / "00000" / "answers.jsonl").exists()
    assert "answers: none is kept (--no-answers)" in fork(old, tmp_path / "none", "--no-answers").out


@pytest.mark.usefixtures("code_described_once")
def test_no_kill_loses_an_answer_that_is_kept(tmp_path: Path, server: FakeServer) -> None:
    def attempt(folder: Path) -> None:
        start(folder, server, TwoSteps("Shorter"), number=1, keep_answers=True)

    def all_are_there(folder: Path) -> None:
        rank = folder / "checkpoints" / "00000"
        found = {ordinal for ordinal, *_ in read_answers(rank / "answers.jsonl")}
        if (rank / "replay.sqlite3").exists():
            copy = shutil.copytree(rank, tmp_path / "copy", dirs_exist_ok=False)
            cache = RequestCache(copy / "replay.sqlite3")
            found |= cache.ordinals()
            cache.close()
            shutil.rmtree(copy)
        done = read_commits(rank / "commits.jsonl").values()
        assert found >= {ordinal for commit in done for ordinal in range(commit.first_ordinal, commit.next_ordinal)}

    (tmp_path / "job").mkdir()
    assert_same_output_after_crash(
        attempt, tmp_path / "job", recoveries=False, after_crash=all_are_there, counted=OF_FILES
    )


def test_the_old_run_goes_on_beside_its_fork(old: Path, tmp_path: Path, server: FakeServer, fork: Fork) -> None:
    fork(old, tmp_path / "new")
    start(tmp_path / "new", server, TwoSteps("Longer"))
    server.asked.clear()
    start(old, server, TwoSteps("Shorter"), accept_changes=True)
    assert first_requests(server) == {"6"}
    assert verify(old / "checkpoints", full=True).problems == []


def test_a_fork_resumes_like_any_run(old: Path, tmp_path: Path, server: FakeServer, fork: Fork) -> None:
    new = tmp_path / "new"
    fork(old, new)
    with pytest.raises(DocumentFailed):
        start(new, server, TwoSteps("Longer", "id 5", new / "checkpoints" / "00000" / "commits.jsonl"))
    with pytest.raises(CheckpointMismatch, match="rollout_fn"):  # from its first start on, it is one run
        start(new, server, TwoSteps("Another"))
    with pytest.raises(CheckpointMismatch, match="tasks: 1 -> 2"):
        start(new, server, TwoSteps("Longer"), world_size=2, accept_changes=True)
    start(new, server, TwoSteps("Longer"), accept_changes=True)
    assert sum(server.asked.values()) == 5 + DOCUMENTS
    assert verify(new / "checkpoints", full=True).problems == []


@pytest.mark.matrix
@pytest.mark.parametrize("changed", ["id 1", "id 3", "id 4"])
def test_another_input_is_refused(changed: str, old: Path, tmp_path: Path, server: FakeServer, fork: Fork) -> None:
    new = tmp_path / "new"
    fork(old, new)
    with pytest.raises(CheckpointMismatch) as refused:
        start(new, server, TwoSteps("Longer"), changed=changed)
    assert f"The input is not that of {old}/checkpoints, from which" in str(refused.value)
    assert f"document {changed[3:]} of this rank is another one there" in str(refused.value)
    start(new, server, TwoSteps("Longer"))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "said"), [(8, "7 documents, and this one has more"), (6, "7 documents, not 6")])
def test_an_input_of_another_length_is_refused(
    number: int, said: str, tmp_path: Path, server: FakeServer, fork: Fork
) -> None:
    start(tmp_path / "old", server, TwoSteps("Shorter"))
    fork(tmp_path / "old", tmp_path / "new")
    with pytest.raises(CheckpointMismatch, match=f"it had {said}"):
        start(tmp_path / "new", server, TwoSteps("Longer"), number=number)
    start(tmp_path / "new", server, TwoSteps("Longer"))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"config": {"model_kwargs": {"revision": "v2"}}}, 'model_kwargs.revision: (not set) -> "v2"'),
        ({"config": {"use_chat": False}}, "use_chat: true -> false"),
    ],
)
@pytest.mark.parametrize("accept", [False, True])
def test_answers_of_another_server_are_not_used(
    changes: dict[str, Any], line: str, accept: bool, old: Path, tmp_path: Path, server: FakeServer, fork: Fork
) -> None:
    fork(old, tmp_path / "new")
    with pytest.raises(CheckpointMismatch) as refused:
        start(tmp_path / "new", server, TwoSteps("Longer"), accept_changes=accept, **changes)
    assert line in str(refused.value)
    assert "--no-answers" in str(refused.value)
    assert not server.asked
    fork(old, tmp_path / "other", "--no-answers")
    start(tmp_path / "other", server, TwoSteps("Longer"), config={"model_kwargs": {"revision": "v2"}})
    assert sum(server.asked.values()) == 2 * DOCUMENTS


def test_a_folder_that_is_not_new_is_refused(old: Path, command: Command) -> None:
    printed = command("fork", old / "checkpoints", old / "output", code=2).err
    assert "exists already, and a fork starts in a new folder" in printed


def test_a_rank_that_runs_is_refused(old: Path, tmp_path: Path, fork: Fork) -> None:
    lock = files.Lock(old / "checkpoints" / "00000" / LOCK)
    try:
        assert "process works on this rank" in fork(old, tmp_path / "new", code=1).err
    finally:
        lock.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.slow
def test_killed_at_every_effect_there_is_all_of_the_new_folder_or_no_start(
    tmp_path: Path, server: FakeServer, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = restored(NEWEST, tmp_path / "old"), tmp_path / "new" / "checkpoints"
    before, number, release = kept(old), 0, files.Lock.release
    while True:
        disk = CrashingDisk(number, tmp_path)
        with disk_in_place(disk), monkeypatch.context() as killed:
            killed.setattr(files.Lock, "release", lambda lock, remove=False: release(lock))  # and the file stays
            fork(old, tmp_path / "new", code=None)
        assert kept(old) == before
        if disk.crashed_at is None:
            break
        assert list(disk.survivors()) == ["killed"]
        if not new.exists():
            if number > 1:  # before that, there is only the folder around it
                shutil.copytree(old / "input", new.parent / "input")
                with pytest.raises(CheckpointMismatch, match="Run the fork again"):
                    run(new.parent, server.url, 1)
                assert not server.asked
                assert not new.exists(), disk.crashed_at
                shutil.rmtree(new.parent / "input")
            fork(old, tmp_path / "new")
            assert [path.name for path in new.parent.iterdir()] == ["checkpoints"], disk.crashed_at
        assert sorted(path.name for path in new.iterdir()) == ["00000", "00001"]
        assert [path.name for path in sorted((new / "00001").iterdir())] == ["replay.sqlite3", "run.json"]
        shutil.rmtree(new.parent)
        number += 1
    assert number > 10
    print(f"fork was killed at {number} effects")


@pytest.mark.slow
def test_status_and_verify_know_a_fork_before_and_between_the_first_starts(
    tmp_path: Path, command: Command, server: FakeServer, fork: Fork
) -> None:
    old, new = restored(NEWEST, tmp_path / "old"), tmp_path / "new"
    fork(old, new)
    shutil.copytree(old / "input", new / "input")
    command("status", new / "checkpoints")
    command("verify", new / "checkpoints", "--output", new / "output", code=3)
    run(new, server.url, 1)
    printed = command("verify", new / "checkpoints", code=3).out
    assert "no problem, 2 things not finished: 2 ranks, 5 documents" in printed
    run(new, server.url, 0)
    run(new, server.url, 2)
    command("verify", new / "checkpoints", "--full")


@pytest.mark.matrix
@pytest.mark.parametrize("name", VERSIONS)
def test_a_run_of_each_release_is_forked(name: str, tmp_path: Path, server: FakeServer, fork: Fork) -> None:
    old, new = restored(name, tmp_path / "old"), tmp_path / "new"
    fork(old, new)
    shutil.copytree(old / "input", new / "input")
    run(new, server.url, 1)  # the same prompt: each answer that is kept is used
    assert server.asked == {"Rewrite: b0": 2, "Rewrite: b1": 2, "Rewrite: stop": 1, "Rewrite: b4": 2}


def test_a_mirror_is_forked_and_a_fork_has_a_mirror(tmp_path: Path, command: Command) -> None:
    old, new = restored(NEWEST, tmp_path / "old"), tmp_path / "new"
    assert f"{old}/mirror: 1 task, 3 finished documents" in command("fork", old / "mirror", new / "checkpoints").out
    shutil.copytree(old / "input", new / "input")
    with FakeServer() as server:
        run(new, server.url, 1, checkpoints_remote_dir=str(new / "mirror"))
        assert server.asked["Rewrite: stop"] == 1
    shutil.rmtree(new / "checkpoints")
    restore_rank(str(new / "mirror"), new / "checkpoints", 1, retries=False)
    content = json.loads((new / "checkpoints" / "00001" / "run.json").read_bytes())
    assert content["forked"]["from"] == str(old / "mirror")
    assert content["owner"]["fence"] == 1


# YAML ----------------------------------------------------------------------------------------------------------------

NEW = [
    "--pipeline.1.rollout_fn.prompt=Whisper {text}",
    "--pipeline.1.checkpoints_local_dir=new/checkpoints",
    "--pipeline.1.output_writer.output_folder=new/output",
    "--executor.logging_dir=new/logs",
]


@pytest.fixture
def yaml(here: Path, server: FakeServer, command: Command) -> Path:
    """job.yaml of a finished run, in the working directory."""
    write_job(here, job_yaml(ENDPOINT.replace("URL", server.url)), ["a", "b"], ["c"])
    command("run", "job.yaml")
    server.asked.clear()
    return here / "job.yaml"


def test_one_file_is_forked_with_what_is_changed_on_the_command_line(
    yaml: Path, server: FakeServer, command: Command
) -> None:
    said = command("fork", "job.yaml", "job.yaml", *NEW, "--dry-run", "--price-per-million-tokens", "1000,2000").out
    assert "checkpoints: 1 task, 3 finished documents\nchanged: rollout_fn.prompt\n" in said
    assert "answers: none; the old run has saved none of documents that it has not committed\n" in said
    cost = (
        "cost: for 3 documents, if each takes what it took before: 3 requests, 6 prompt and 6 completion tokens (0.02)"
    )
    assert cost in said
    assert said.endswith("Nothing was done (--dry-run).\n")
    assert not Path("new").exists() or not list(Path("new").iterdir())
    lock = Path("new/checkpoints.forking.lock").absolute()
    lock.parent.mkdir(exist_ok=True)
    lock.touch()  # a fork was killed
    refused = command("run", "job.yaml", *NEW, code=1).error
    assert "or is still at work. Run the fork again. " in refused
    assert refused.endswith(f" remove {lock}.")
    said = command("fork", "job.yaml", "job.yaml", *NEW).out
    assert not lock.exists()
    assert f"Start the new run: {shlex.join(['datatrove-ckpt', 'run', 'job.yaml', *NEW])}\n" in said
    command("run", "job.yaml", *NEW)
    assert server.asked == {"Whisper a": 1, "Whisper b": 1, "Whisper c": 1}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ("--pipeline.1.config.model_name_or_path=other", 0, "answers: none can be used: model changed\n"),
        ("--executor.tasks=2", 2, "or fork first, start each task once, then deal the rest out with `datatrove-ckpt r"),
        ("--pipeline.1.output_writer.output_folder=output", 2, "output_folder: "),
        ("--pipeline.1.checkpoints_local_dir=checkpoints", 2, "Fork into a folder of its own"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_made(
    change: str, code: int, said: str, yaml: Path, command: Command
) -> None:
    captured = command("fork", "job.yaml", "job.yaml", *NEW, change, code=code)
    assert said in captured
    assert Path("new/checkpoints").exists() == (code == 0)


# runs that are no plain ones ------------------------------------------------------------------------------------------

A, B = ({"model_kwargs": {"revision": name}} for name in "AB")


def stop(folder: Path, server: FakeServer, config: dict[str, Any], at: str = "id 5", **settings: Any) -> None:
    """Runs until a document fails: two chunks are committed, one document is in a journal."""
    commits = folder / "checkpoints" / "00000" / "commits.jsonl"
    with pytest.raises(DocumentFailed):
        start(folder, server, TwoSteps("Shorter", at, commits), config=config, **settings)
    server.asked.clear()


def test_answers_of_two_model_revisions_in_one_task_are_not_used(
    tmp_path: Path, server: FakeServer, fork: Fork
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    stop(old, server, A, keep_answers=True)
    start(old, server, TwoSteps("Shorter"), config=B, keep_answers=True, accept_changes=True)
    assert list(read_answers(old / "checkpoints" / "00000" / "answers.jsonl"))
    server.asked.clear()
    assert "answers: none can be used: model_kwargs changed in the middle of this run\n" in fork(old, new).out
    start(new, server, TwoSteps("Shorter"), config=A)  # nothing binds it to either revision
    assert sum(server.asked.values()) == 2 * DOCUMENTS


def test_the_old_runs_logging_dir_is_refused(yaml: Path, command: Command) -> None:
    Path("link").symlink_to("logs")
    for name in ("logs", "link"):
        for what in ("job.yaml", "checkpoints"):  # a folder does not tell its logging_dir; the markers in it do
            printed = command("fork", what, "job.yaml", *NEW, f"--executor.logging_dir={name}", code=2).err
            assert f"logging_dir: {yaml.parent}/{name} is another run's: datatrove skips" in printed
