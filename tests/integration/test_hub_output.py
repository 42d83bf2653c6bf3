"""Output on the hub: uploaded at once, committed together, whatever the hub answers."""

import asyncio
import io
import os
import queue
import signal
import threading
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import dill
import pyarrow.parquet as pq
import pytest
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from datatrove.pipeline.writers.huggingface import HuggingFaceBucketWriter, HuggingFaceDatasetWriter

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.publish_intents import PublishIntents, WaitingChunk
from datatrove_ckpt.errors import ConfigError, Fenced, OutputFailed, OutputMismatch, StorageFailed
from datatrove_ckpt.generation import scheduler
from datatrove_ckpt.output import targets
from datatrove_ckpt.output.hub import CommitPace, HubFolder
from datatrove_ckpt.output.interruptible_calls import InterruptibleCalls
from datatrove_ckpt.output.output_folder import OutputOwnership
from datatrove_ckpt.output.targets import HubTarget
from datatrove_ckpt.testing import FakeServer
from tests.jobs import ask, documents, runner
from tests.jobs import config as job_config
from tests.patience import until_async

NAME = "${rank}_${chunk_index}.parquet"


@pytest.fixture(autouse=True)
def _no_copies(temporary):
    """Nothing is left in the temporary folder, whatever happens."""
    yield
    assert list(temporary.iterdir()) == []


@pytest.fixture
def hub(hub):
    """With an empty repository."""
    hub.create_repo("org/data")
    return hub


def hub_runner(folder, server, **changes):
    changes.setdefault("output_writer", ParquetWriter("hf://datasets/org/data/config", NAME))
    return runner(folder, server, **changes)


@pytest.fixture
def make(tmp_path, server):
    return partial(hub_runner, tmp_path, server)


def names(number):
    return [f"config/000_00000_{index:05d}.parquet" for index in range(number)]


def committed(folder):
    return sorted(read_commits(folder / "checkpoints/00000/commits.jsonl"))


def wait_with(tmp_path, lease, waiting):
    """One chunk waits for a commit of the rank with this lease."""
    staging = tmp_path / "chunk_00000"
    staging.mkdir()
    (staging / "staged").write_text("content")
    output = JsonlWriter("hf://datasets/org/data/config", "${rank}.jsonl")
    folder = output.output_folder
    place = HubFolder.of(folder)
    calls = InterruptibleCalls(place.url, place)
    commits = HubTarget(folder, 0, tmp_path, lease, calls, CommitPace())
    staged = SimpleNamespace(path=staging / "staged", size=7, rows=0, hexdigest=lambda: "")
    written = SimpleNamespace(finished={"a": staged}, folder=staging)
    commits.publish(0, written, PublishIntents(tmp_path))
    commits.wait(0, waiting)
    commits.flush()


def test_a_rank_that_was_taken_over_while_its_files_wait_commits_nothing(hub, tmp_path):
    taken = SimpleNamespace(check=Mock(side_effect=Fenced("Another process has taken over")))
    done, failures = Mock(), queue.SimpleQueue()
    wait_with(tmp_path, taken, WaitingChunk(done, failures.put))
    with pytest.raises(Fenced):
        raise failures.get(timeout=300)
    assert hub.commits("org/data") == []
    assert not done.called


def test_an_error_behind_the_commit_of_the_last_chunk_is_reported(hub, tmp_path):
    done, failures = Mock(side_effect=StorageFailed("no space")), queue.SimpleQueue()
    wait_with(tmp_path, Mock(), WaitingChunk(done, failures.put))
    with pytest.raises(StorageFailed, match="no space"):
        raise failures.get(timeout=300)


def test_a_commit_carries_at_most_so_many_files(hub, monkeypatch, make):
    monkeypatch.setattr(targets, "MOST_FILES", 2)
    writer = ParquetWriter("hf://datasets/org/data/config", "${id}/" + NAME)  # two files per chunk
    make(output_writer=writer).run(documents(5))
    assert len(hub.files("org/data")) == 5
    assert max(len(commit.added) for commit in hub.commits("org/data")) == 2
    assert sorted(path for commit in hub.commits("org/data") for path in commit.added) == list(
        hub.files("org/data")
    )


def test_files_that_the_repository_ignores_are_refused_and_nothing_is_lost(
    hub, tmp_path, make, server
):
    hub.repos["dataset", "org/data"].ignored = (".parquet",)
    with pytest.raises(OutputFailed, match=r"\.gitignore leaves 000_00000_00000\.parquet out"):
        make().run(documents(3))
    assert not committed(tmp_path)
    hub.repos["dataset", "org/data"].ignored = ()
    make().run(documents(3))
    assert [name for name in hub.files("org/data") if name.endswith(".parquet")] == names(2)
    assert server.asked.total() == 3


def test_a_rank_waits_until_the_repository_has_had_few_enough_commits_in_an_hour(
    hub, monkeypatch, log, make
):
    for n in range(59):  # with the first commit more than a page of the history
        hub.put("org/data", {f"{n}.txt": b"by somebody else"})
    asked_to_wait = CommitPace.seconds_until_turn

    def wait(pace, history, ends=False):
        found = asked_to_wait(pace, history, ends)
        # Some seconds have passed since the first commits, or minutes.
        assert found == 0 or 3000 < found < 3610
        assert len(hub.commits("org/data")) == 59
        hub.clock.advance(found + 2)  # the hub's Date has whole seconds
        return min(found, 0.01)

    monkeypatch.setattr(CommitPace, "seconds_until_turn", wait)
    make(hub_commits_per_hour=55).run(documents(5))
    assert [name for name in hub.files("org/data") if name.endswith(".parquet")] == names(3)
    assert hub.asked["commits"] == 3  # two pages, and one after the hour
    (said,) = log.said("Next look in")
    assert (
        "3 files wait for a commit: 61 were made within an hour (hub_commits_per_hour=55). Next look"
        in said
    )
    assert "the task waits." in said


def test_an_error_after_a_commit_stops_the_rank(hub, make, monkeypatch):
    remove_tree = files.disk.remove_tree

    def fail(folder):
        if threading.current_thread().name == "datatrove-ckpt hub":
            raise StorageFailed(f"{folder} cannot be removed")
        remove_tree(folder)

    monkeypatch.setattr(files.disk, "remove_tree", fail)
    with pytest.raises(StorageFailed, match="chunk_00000 cannot be removed"):
        make(hub_commit_seconds=0).run(documents(7))


@pytest.mark.slow
@pytest.mark.parametrize(
    "event, error",
    [
        ("deleted", r"_00000\.parquet is missing"),
        # What was uploaded for the repository that was deleted cannot be committed to another one.
        ("made anew", r"_00000\.parquet is missing|Not Found|Invalid rev id|upload it first"),
    ],
)
def test_files_that_vanish_during_the_run_are_missed_at_its_end(hub, tmp_path, event, error, make):
    events = []

    async def rollout(document, generate):
        if document.id == "id 4":
            await until_async(lambda: committed(tmp_path))
            if event == "deleted":
                hub.remove("org/data", names(1))
            else:
                hub.create_repo("org/data")
            events.append(event)
        return await ask(document, generate)

    step = make(
        rollout=rollout,
        hub_commit_seconds=0,
        replay_check=False,  # which would run the rollout again
        config={"max_concurrent_documents": 1},
    )
    with pytest.raises((OutputMismatch, OutputFailed), match=error):
        step.run(documents(7))
    assert events == [event]


FAULTS = [
    ("commit", {"status": 412, "message": "A commit has happened since. Please refresh."}),
    ("commit", {"status": 429}),  # without advice
    ("commit", {"status": 504, "after_effect": True}),
    ("commit", {"status": None}),  # a reset
    ("commit", {"status": None, "after_effect": True}),  # a lost answer
    ("auth-check", {"status": None}),
    ("tree", {"status": 500}),
    ("lfs-upload", {"status": 403}),  # of the storage
    ("lfs-verify", {"status": 404, "message": "lfs-verify: not yet"}),
]


@pytest.mark.matrix(("kind", "fault"), FAULTS)
def test_what_passes_is_tried_again_and_nothing_is_there_twice(hub, tmp_path, kind, fault, make):
    rule = hub.fail(kind, times=2, **fault)
    make().run(documents(5))
    assert rule.hits >= 1
    assert list(hub.files("org/data")) == names(3)
    (commit,) = hub.commits("org/data")
    assert len(commit.added) == 3
    assert len(hub.repo("org/data").uploads) == 3
    assert committed(tmp_path) == [0, 1, 2]


@pytest.mark.matrix("lag", [1, 3])
def test_a_hub_that_shows_an_earlier_state_is_no_loss(hub, server, lag, monkeypatch, make):
    monkeypatch.setattr(
        OutputOwnership, "claim", lambda self: None
    )  # another commit, which this hub would never show
    hub.lag_commits = lag
    hub.lag_kinds |= {"info", "commits"}
    make().run(documents(5))
    hub.lag_kinds -= {"info", "commits"}
    make().run(documents(5))
    assert list(hub.files("org/data")) == names(3)
    assert len(hub.commits("org/data")) == 1
    assert set(server.asked.values()) == {1}


@pytest.mark.matrix(
    ("kind", "message"),
    [
        (
            "commit",
            r"cannot be claimed for this run: .*403.*The hub needs HF_TOKEN",
        ),
        (
            "auth-check",
            r"config: cannot be written to: the hub answers 403.*The hub needs HF_TOKEN",
        ),
    ],
)
def test_what_no_retry_can_help_stops_the_rank_and_the_next_run_goes_on_where_it_was(
    hub, server, tmp_path, kind, message, make
):
    rule = hub.fail(kind, times=None, status=403)
    with pytest.raises(OutputFailed, match=message):
        make().run(documents(5))
    assert committed(tmp_path) == []
    uploaded = len(hub.repo("org/data").uploads)
    rule.stop()
    make().run(documents(5))
    assert list(hub.files("org/data")) == names(3)
    assert len(hub.repo("org/data").uploads) == 3 >= uploaded
    assert set(server.asked.values()) == {1}


@pytest.mark.matrix("chunk", [0, 2])
def test_files_that_another_job_has_put_there_meanwhile_are_not_overwritten(hub, tmp_path, chunk):
    other = {names(3)[chunk]: b"PAR1 of another job"}
    arrived = []

    def answer(path, text):
        if not arrived:
            arrived.append(text)
            hub.put("org/data", other)
        return "answer"

    with FakeServer(answer=answer) as server:
        for _ in range(2):
            with pytest.raises(OutputMismatch, match=rf"has not published.*0000{chunk}.parquet"):
                hub_runner(tmp_path, server).run(documents(5))
            assert hub.files("org/data") == other
            assert committed(tmp_path) == []
        hub.remove("org/data", list(other))
        hub_runner(tmp_path, server).run(documents(5))
        assert set(server.asked.values()) == {1}
    assert list(hub.files("org/data")) == names(3)


# datatrove's writers for the hub -----------------------------------------------------------------


def shout(writer, document):
    return {"text": document.text.upper(), "by": type(writer).__name__}


def test_a_dataset_writer_is_uploaded_by_us(hub, tmp_path, make):
    hub.create_repo("org/data", branches=("try/1",))
    folder = tmp_path / "working"
    writer = HuggingFaceDatasetWriter(
        "org/data",
        local_working_dir=str(folder),
        output_filename="config/" + NAME,
        adapter=shout,
        compression="zstd",
        revision="try/1",
    )
    step = dill.loads(dill.dumps(make(output_writer=writer)))
    step.run(documents(3))
    assert list(hub.files("org/data", "try/1")) == names(2)
    table = pq.read_table(io.BytesIO(hub.files("org/data", "try/1")[names(2)[0]]))
    assert table.to_pylist()[0] == {"text": "TEXT 0", "by": "HuggingFaceDatasetWriter"}
    assert len(hub.commits("org/data", "try/1")) == 1
    assert not list(folder.rglob("*.parquet"))


def test_files_of_a_bucket_appear_chunk_by_chunk(hub, tmp_path, make):
    hub.create_repo("org/bucket", kind="bucket")
    rule = hub.fail("batch", 520, times=2)
    writer = HuggingFaceBucketWriter("org/bucket", prefix="config", output_filename=NAME)
    step = make(output_writer=writer)
    writer._local_working_tmpdir.cleanup()
    step.run(documents(5))
    assert sorted(hub.files("org/bucket", kind="bucket")) == names(3)
    assert rule.hits == 2
    assert committed(tmp_path) == [0, 1, 2]


def test_writers_that_cannot_be_taken_over_are_refused(tmp_path, make):
    class Mine(HuggingFaceDatasetWriter):
        pass

    local = {"local_working_dir": str(tmp_path), "output_filename": NAME}
    changed = r"Mine changes HuggingFaceDatasetWriter.*Derive it from ParquetWriter"
    for writer, message in (
        (Mine("org/data", **local), changed),
        (HuggingFaceDatasetWriter("data", **local), "Write hf://datasets/OWNER/NAME"),
        (HuggingFaceBucketWriter("org/b", **local, overwrite=True), "overwrite=True would delete"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(output_writer=writer)


# waiting -----------------------------------------------------------------------------------------


def stops(last, ready):
    """A rollout whose last document asks the rank to stop, once, and never ends."""
    stopped = []

    async def rollout(document, generate):
        if document.id == f"id {last}" and not stopped:
            await until_async(ready)
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        return await ask(document, generate)

    return rollout


def test_a_drain_commits_what_is_uploaded(hub, server, tmp_path, monkeypatch, make):
    monkeypatch.setattr(scheduler, "_PUBLISH_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(scheduler, "_GRACE_SECONDS", 0.05)
    rollout = stops(4, lambda: len(hub.repo("org/data").uploads) == 2)
    step = make(rollout=rollout, hub_commit_seconds=10_000)
    with pytest.raises(KeyboardInterrupt):
        step.run(documents(5))
    assert list(hub.files("org/data")) == names(2)
    assert committed(tmp_path) == [0, 1]
    step.run(documents(5))
    assert list(hub.files("org/data")) == names(3)
    assert set(server.asked.values()) == {1}


def test_without_checkpoints_nothing_is_left_in_the_temporary_folder_either(hub, server):
    fault = hub.fail("commit", 403, times=None)
    writer = ParquetWriter("hf://datasets/org/data/config", "${rank}.parquet")
    step = InferenceRunner(ask, job_config(server), writer)
    with pytest.raises(OutputFailed, match="403"):
        step.run(documents(3))
    fault.stop()
    writer = ParquetWriter("hf://datasets/org/data/config", "${rank}.parquet")
    InferenceRunner(ask, job_config(server), writer).run(documents(3))
    assert list(hub.files("org/data")) == ["config/000_00000.parquet"]
