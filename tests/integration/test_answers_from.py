"""``answers_from``: a run with a changed rollout uses an old run's answers to equal payloads."""

import shutil
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.layout import LOCK, is_finished
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.checkpoint.request_cache import read_answers
from datatrove_ckpt.errors import CheckpointLocked, CheckpointMismatch, ConfigError, DocumentFailed
from datatrove_ckpt.run_folder.verify import verify
from datatrove_ckpt.testing import outputs
from tests.crashes import OF_FILES, assert_same_output_after_crash, committed
from tests.jobs import chat, documents, runner
from tests.kept import committed as ordinals_of
from tests.make_release import run
from tests.mirrors import known_ordinals
from tests.patience import until_async
from tests.rank_folders import place_at
from tests.releases import NAMES, kept, restored

DOCUMENTS = 7


class TwoSteps:
    """Two requests for each document; the second one depends on the style."""

    def __init__(self, style, stop_at=None, commits=None):
        self.style = style
        self.stop_at = stop_at
        self._commits = str(commits)

    async def __call__(self, document, generate):
        first = await generate(chat(f"Say {document.text}"))
        if document.id == self.stop_at:
            await until_async(lambda: committed(Path(self._commits)) >= 2)
            raise RuntimeError("stopped between two requests, with two chunks committed")
        second = await generate(chat(f"{self.style}: {first.text}"))
        return second.text


def start(folder, server, rollout, number=DOCUMENTS, config=None, world_size=1, **settings):
    """Runs the only task."""
    config = {"max_concurrent_generations": 1, **(config or {})}
    step = runner(folder, server, rollout, config=config, **settings)
    step.run(documents(number), 0, world_size)


@pytest.fixture
def old(tmp_path, server):
    """A run that has stopped: documents 0 to 3 are committed, 4 is in a journal, 5 has its first
    answer.
    """
    folder = tmp_path / "old"
    with pytest.raises(DocumentFailed):
        start(
            folder,
            server,
            TwoSteps("Shorter", "id 5", folder / "checkpoints/00000/commits.jsonl"),
        )
    server.asked.clear()
    return folder


def checkpoints(folder):
    return str(folder / "checkpoints")


def go_on(folder, server, old, **settings):
    """Runs it with another style and the answers of an old run."""
    start(folder, server, TwoSteps("Longer"), answers_from=checkpoints(old), **settings)


def first_requests(server):
    """The documents whose first request was sent."""
    return {
        question.removeprefix("Say text ")
        for question in server.asked
        if question.startswith("Say")
    }


@pytest.mark.matrix("per_chunk", [1, 2, 3, 100])
def test_only_answers_to_equal_payloads_are_not_asked_again(per_chunk, old, tmp_path, server):
    new, fresh = tmp_path / "new", tmp_path / "fresh"
    before = kept(old)
    go_on(new, server, old, records_per_chunk=per_chunk)
    assert first_requests(server) == {"0", "1", "2", "3", "6"}
    assert server.asked.total() == 5 + DOCUMENTS
    start(fresh, server, TwoSteps("Longer"), records_per_chunk=per_chunk)
    assert outputs(new / "output") == outputs(fresh / "output")
    report = verify(place_at(new / "checkpoints"), full=True)
    assert (report.problems, report.unfinished) == ([], [])
    assert kept(old) == before


@pytest.mark.matrix("finished", [True, False])
def test_with_keep_answers_committed_documents_are_not_asked_again_either(
    finished, tmp_path, server
):
    old, new = tmp_path / "old", tmp_path / "new"
    commits = old / "checkpoints/00000/commits.jsonl"
    if finished:
        start(old, server, TwoSteps("Shorter"), keep_answers=True)
        assert is_finished(commits.parent)
    else:
        with pytest.raises(DocumentFailed):
            start(old, server, TwoSteps("Shorter", "id 5", commits), keep_answers=True)
    kept_answers = commits.with_name("answers.jsonl")
    assert kept_answers.stat().st_mode & 0o777 == 0o600
    # A kill between the two steps of dropping a chunk leaves its answers twice; a power loss leaves
    # parts of lines.
    kept_answers.write_bytes(kept_answers.read_bytes() * 2 + b'{"xxh":"00')
    server.asked.clear()
    go_on(new, server, old)
    assert first_requests(server) == (set() if finished else {"6"})
    assert server.asked.total() == DOCUMENTS + (not finished)
    assert not (new / "checkpoints/00000/answers.jsonl").exists()
    assert is_finished(commits.parent) == finished


def test_answers_are_handed_on_from_run_to_run(tmp_path, server):
    start(tmp_path / "1", server, TwoSteps("Shorter"), keep_answers=True)
    answers_from = checkpoints(tmp_path / "1")
    start(tmp_path / "2", server, TwoSteps("Longer"), keep_answers=True, answers_from=answers_from)
    server.asked.clear()
    # Its run folder.
    start(tmp_path / "3", server, TwoSteps("Shorter"), answers_from=str(tmp_path / "2"))
    assert not server.asked


@pytest.mark.usefixtures("code_described_once")
@pytest.mark.matrix("step", [7, 1])
def test_no_kill_loses_an_answer_that_is_kept(tmp_path, server, step):
    def attempt(folder):
        start(folder, server, TwoSteps("Shorter"), number=1, keep_answers=True)

    def all_are_there(folder):
        rank = folder / "checkpoints/00000"
        found = {row.ordinal for row in read_answers(rank / "answers.jsonl")}
        _, cached = known_ordinals(rank)
        done = read_commits(rank / "commits.jsonl").values()
        assert found | cached.keys() >= ordinals_of(done)

    (tmp_path / "job").mkdir()
    assert_same_output_after_crash(
        attempt,
        tmp_path / "job",
        after_crash=all_are_there,
        counted=OF_FILES,
        step=step,
        recoveries=0,
    )


@pytest.mark.slow
def test_a_run_that_takes_answers_is_killed_at_every_effect(
    old, tmp_path, server, code_described_once
):
    """Each attempt reads the old answers again."""
    before = kept(old)

    def attempt(folder):
        go_on(folder, server, old)

    (tmp_path / "job").mkdir()
    assert_same_output_after_crash(attempt, tmp_path / "job", counted=OF_FILES, recoveries=0)
    assert kept(old) == before
    assert first_requests(server) == {"0", "1", "2", "3", "6"}


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_answer_that_was_used_once_belongs_to_the_new_run(is_gone, old, tmp_path, server):
    """Also where the setting is left out later, and where the run is finished and the old one is
    gone.
    """
    new = tmp_path / "new"
    stopping = TwoSteps("Longer", "id 5", new / "checkpoints/00000/commits.jsonl")
    with pytest.raises(DocumentFailed):
        start(new, server, stopping, answers_from=checkpoints(old))
    if is_gone:
        shutil.rmtree(old)
    start(
        new,
        server,
        TwoSteps("Longer"),
        accept_changes=True,
        answers_from=None if is_gone else checkpoints(old),
    )
    assert server.asked.total() == 5 + DOCUMENTS
    assert verify(place_at(new / "checkpoints"), full=True).problems == []
    go_on(new, server, tmp_path / "none", accept_changes=True)


@pytest.mark.matrix("number", [5, 9])
def test_the_input_may_be_shorter_or_longer(number, old, tmp_path, server):
    go_on(tmp_path / "new", server, old, number=number)
    assert first_requests(server) == {str(one) for one in range(number)} - {"4", "5"}
    assert verify(place_at(tmp_path / "new/checkpoints"), full=True).problems == []


@pytest.mark.matrix(
    ("changes", "line"),
    [
        (
            {"config": {"model_kwargs": {"revision": "v2"}}},
            'model_kwargs.revision: (not set) -> "v2"',
        ),
        ({"world_size": 2}, "tasks: 1 -> 2"),
    ],
)
def test_answers_that_cannot_be_used_are_refused_before_the_first_request(
    changes, line, old, tmp_path, server
):
    new = tmp_path / "new"
    with pytest.raises(CheckpointMismatch) as refused:
        go_on(new, server, old, accept_changes=True, **changes)
    assert line in str(refused.value)
    assert "leave answers_from out" in str(refused.value)
    assert not server.asked
    assert not (new / "checkpoints/00000").exists()
    start(new, server, TwoSteps("Longer"))
    assert server.asked.total() == 2 * DOCUMENTS


@pytest.mark.parametrize(
    "place, said",
    [
        ("none", "none holds no checkpoint"),
        ("new/checkpoints", "answers_from: is this run's own checkpoints_local_dir"),
    ],
)
def test_a_folder_without_old_answers_is_refused(place, said, tmp_path, server):
    with pytest.raises(ConfigError, match=said):
        start(tmp_path / "new", server, TwoSteps("Longer"), answers_from=str(tmp_path / place))


def test_a_rank_that_runs_is_refused(old, tmp_path, server):
    lock = Lock(old / "checkpoints/00000" / LOCK)
    try:
        with pytest.raises(CheckpointLocked):
            go_on(tmp_path / "new", server, old)
    finally:
        lock.release()
    assert not (tmp_path / "new/checkpoints/00000").exists()


@pytest.mark.matrix("name", NAMES)
def test_answers_of_each_release_are_used(name, tmp_path, server):
    old, new = restored(name, tmp_path / "old"), tmp_path / "new"
    shutil.copytree(old / "input", new / "input")
    # The same prompt: each answer that is kept is used.
    run(new, server.url, 1, answers_from=checkpoints(old))
    assert server.asked == {
        "Rewrite: b0": 2,
        "Rewrite: b1": 2,
        "Rewrite: stop": 1,
        "Rewrite: b4": 2,
    }
