"""A crash at every effect of a job, and at every effect of every recovery, ends in the same
bytes.
"""

import asyncio
import errno
import functools
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from datatrove.pipeline.writers import ParquetWriter

from datatrove_ckpt.checkpoint import files, open_checkpoint
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.history import AttemptEnd
from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.checkpoint.open_checkpoint import RankFiles
from datatrove_ckpt.errors import CheckpointMismatch, OutputMismatch
from datatrove_ckpt.output.output_folder import OutputFolder
from datatrove_ckpt.testing import FakeServer
from tests.crashes import (
    EFFECTS,
    OF_FILES,
    CopyingDisk,
    answered,
    assert_same_output_after_crash,
    committed,
    copy_tree,
    disk_in_place,
)
from tests.disk_errors import assert_same_output_after_disk_errors
from tests.histories import read_history
from tests.jobs import documents, run_job, runner, the_first_last, writer
from tests.power_loss import CopyingPowerLossDisk, PowerLossDisk

pytestmark = pytest.mark.usefixtures("code_described_once")


@pytest.fixture(autouse=True)
def _every_write_alone(monkeypatch):
    """Makes the storage thread take items one by one, so that there is a crash point between any
    two of them.
    """
    monkeypatch.setattr(open_checkpoint, "MAX_GROUP", 1)


@pytest.fixture
def folder(ram):
    (ram / "job").mkdir()
    return ram / "job"


def slow_start(payload, times):
    """Delays the first document, so that later chunks are committed before the first one."""
    return 0.003 if payload["messages"][-1]["content"] == "text 0" else 0.0


def out_of_order(server, number):
    """Attempts of a job with one chunk per document, of which the first chunk is committed last."""

    @functools.cache  # one for all attempts, so that its code is described once
    def context(log):
        async def others_committed():
            while committed(log) < number - 1:
                await asyncio.sleep(0.001)  # an attempt that crashes meanwhile cancels this

        return {"others_committed": others_committed}

    def attempt(folder):
        shared = context(folder / "checkpoints" / "00000" / "commits.jsonl")
        run_job(folder, server, number, the_first_last, records_per_chunk=1, shared_context=shared)

    return attempt


def assert_out_of_order(attempt, folder):
    """Checks that an undisturbed attempt commits out of order; otherwise the proof below covers a
    simpler job.
    """
    apart = folder.with_name("apart")
    copy_tree(folder, apart)
    attempt(apart)
    log = apart / "checkpoints" / "00000" / "commits.jsonl"
    order = [*read_commits(log)]
    assert order != sorted(order)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "number, torn, counted, recoveries, step",
    [
        (2, False, OF_FILES, 15, 9),
        pytest.param(2, False, EFFECTS, 9, 1, marks=pytest.mark.slow),
        pytest.param(2, False, EFFECTS, 1, 1, marks=pytest.mark.full),
        pytest.param(2, True, EFFECTS, 1, 1, marks=pytest.mark.full),
    ],
    ids=["of files, each ninth", "recoveries of each ninth", "whole", "torn"],
)
def test_output_is_the_same_after_a_crash_at_every_effect_of_every_recovery(
    folder, number, torn, counted, recoveries, step
):
    with FakeServer() as server:
        attempt = out_of_order(server, number)
        assert_out_of_order(attempt, folder)
        report = assert_same_output_after_crash(
            attempt, folder, torn=torn, counted=counted, recoveries=recoveries, step=step
        )
    print(report)
    # The proof must cover each step of the commit order.
    for step in (
        *(["sync chunk_"] if "sync" in counted else []),
        "rename job.json",
        "write 00000_chunk_",
        "write publishing",
        "link 00000_chunk_",
        "write commits",
        "remove chunk_",
        "commit",
    ):
        assert any(point.startswith(step) for point in report.points), step


@pytest.mark.matrix("older, step", [(False, 17), (False, 1), (True, 1)])
def test_ranks_agree_on_their_job_after_a_crash_at_every_effect(folder, older, step):
    """And a rank of another job is refused as soon as one holds work."""
    with FakeServer() as server:

        def attempt(folder):
            for rank in range(2):
                runner(folder, server).run(documents(1), rank=rank, world_size=2)

        def after_crash(folder):
            if answered(folder):
                with pytest.raises(CheckpointMismatch, match="tasks: 2 -> 3"):
                    runner(folder, server).run(documents(1), rank=2, world_size=3)
                assert not (folder / "checkpoints" / "00002").exists()
            if older:
                (folder / "checkpoints" / "job.json").unlink(missing_ok=True)

        report = assert_same_output_after_crash(
            attempt,
            folder,
            torn=True,
            after_crash=after_crash,
            counted=OF_FILES,
            step=step,
            recoveries=0,
        )
    assert "rename job.json" in report.points


@pytest.mark.matrix("step, number", [(7, 2), (1, 1), (1, 2)])
def test_what_was_on_disk_as_answered_is_never_asked_for_again(folder, step, number):
    with ExitStack() as stack:
        servers = [stack.enter_context(FakeServer(delay=slow_start)) for _ in range(number)]
        endpoints = SimpleNamespace(url=[server.url for server in servers])
        kept = Counter()

        def attempt(folder):
            for server in servers:
                server.asked.clear()
            run_job(folder, endpoints, 3)
            for server in servers:
                assert not kept & server.asked, "re-requested answers that were on disk"
            kept.clear()

        def after_crash(folder):
            kept.update(answered(folder))

        assert_same_output_after_crash(
            attempt, folder, after_crash=after_crash, counted=OF_FILES, step=step, recoveries=0
        )
        assert all(server.payloads for server in servers)


@pytest.mark.matrix(
    "kind, step",
    [
        ("parquet", 9),
        ("parquet", 1),
        ("gzip", 1),
        pytest.param("zstd", 1, marks=pytest.mark.full),
    ],
)
def test_tables_of_every_kind_are_the_same_after_a_torn_crash_at_every_effect(folder, kind, step):
    with FakeServer(delay=slow_start) as server:

        def attempt(folder):
            given, output = (
                documents(3),
                writer(folder, compression=kind if kind != "parquet" else None),
            )
            if kind == "parquet":  # the type of a column is known in the last chunk only
                name = "${rank}_chunk_${chunk_index}.parquet"
                output = ParquetWriter(str(folder / "output"), name)
                for document, value in zip(given, (None, None, "c"), strict=True):
                    document.metadata["c"] = value
            output.expand_metadata = True
            runner(folder, server, output_writer=output, answer="summary").run(given)

        assert_same_output_after_crash(
            attempt, folder, torn=True, counted=OF_FILES, step=step, recoveries=0
        )


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "number, recoveries",
    [
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.full),
        pytest.param(1, True, marks=pytest.mark.full),
    ],
    ids=["out of order", "longer", "twice"],
)
def test_output_is_the_same_after_a_power_loss_at_every_effect(folder, number, recoveries):
    with FakeServer() as server:
        attempt = out_of_order(server, number)
        if number > 1:
            assert_out_of_order(attempt, folder)
        report = assert_same_output_after_crash(
            attempt, folder, disk_type=CopyingPowerLossDisk, recoveries=recoveries, counted=EFFECTS
        )
    print(report)


@pytest.mark.parametrize(
    "code, number, step",
    [
        (errno.ENOSPC, 1, 9),
        pytest.param(errno.ENOSPC, 3, 1, marks=pytest.mark.slow),
        pytest.param(errno.EIO, 3, 1, marks=pytest.mark.full),
    ],
    ids=["full disk, each ninth", "full disk, longer", "EIO"],
)
def test_output_is_the_same_after_every_disk_error_and_what_was_written_is_kept(
    folder, code, number, step
):
    with FakeServer(delay=slow_start) as server:
        kept = Counter()
        most = 0

        def attempt(folder):
            server.asked.clear()
            try:
                # A disk that takes no recorded document stops no job.
                run_job(folder, server, number, replay_check=False)
            finally:
                assert not kept & server.asked, "re-requested answers that were on disk"
                kept.clear()

        def after_error(folder):
            nonlocal most
            kept.update(answered(folder))
            most = max(most, kept.total())

        tried = assert_same_output_after_disk_errors(
            attempt, folder, code=code, after_error=after_error, step=step
        )
        assert most == number, "nothing was on disk that could be re-requested"
    print(f"{len(tried)} disk errors")
    assert len(tried) * step > 70


@pytest.mark.timeout(600)
@pytest.mark.matrix("disk_type", [CopyingDisk, CopyingPowerLossDisk])
def test_the_history_survives_a_crash_at_every_effect_also_while_it_is_replaced(
    folder, monkeypatch, disk_type
):
    """No line that was synced is lost but those that are left out on purpose, and no torn line
    stays.
    """
    monkeypatch.setattr("datatrove_ckpt.checkpoint.history.MAX_BYTES", 600)
    path = folder / "checkpoints" / "00000" / "history.jsonl"
    with FakeServer(delay=slow_start) as server:

        def attempt(folder):
            for _ in range(2):  # the second attempt finds too long a history
                run_job(folder, server, 1)
            history, owner = read_history(path), read_run(path.with_name("run.json"))["owner"]
            assert history.damaged == 0
            assert history.last_attempt == owner["fence"]
            end = history.records[-1]
            assert isinstance(end, AttemptEnd)
            assert end.why == "done"

        def after_crash(folder):
            # After power loss, a part of the last line may be there; the next attempt cuts it off.
            assert read_history(path).damaged == 0

        report = assert_same_output_after_crash(
            attempt,
            folder,
            torn=True,
            disk_type=disk_type,
            after_crash=after_crash,
            counted=("write", "rename", "truncate"),
            recoveries=0,
        )
    assert "write history.jsonl" in report.points
    assert "rename history.jsonl" in report.points, "it was not replaced"


# The proofs above must fail for a wrong order of steps. Each test below swaps two steps, or leaves
# one out.
# -------------------------------------------------------------------------------------------------


def prove(folder, disk_type=CopyingDisk, counted=EFFECTS):
    """A proof like those above.

    Where it must fail, crashes at some effects may be enough: then it fails sooner.
    """
    folder.mkdir(exist_ok=True)
    with FakeServer(delay=slow_start) as server:

        def attempt(folder):
            run_job(folder, server, 3)

        assert_same_output_after_crash(
            attempt, folder, disk_type=disk_type, counted=counted, recoveries=0
        )


@pytest.mark.slow
def test_deleting_the_journal_before_the_commit_is_noticed(folder, monkeypatch):
    commit, forget = RankFiles.commit, RankFiles._forget

    def forget_first(self, chunk):
        forget(self, chunk)
        commit(self, chunk)

    monkeypatch.setattr(RankFiles, "commit", forget_first)
    monkeypatch.setattr(RankFiles, "_forget", lambda self, chunk: None)
    with pytest.raises(AssertionError, match="lost a committed chunk"):
        prove_commits_are_durable(folder)


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["the output", "its name"])
def test_leaving_out_a_sync_of_the_output_is_noticed(folder, monkeypatch, left_out):
    synced = PowerLossDisk._synced

    def forgetful(self, path):
        if not (
            path.name == "output"
            if left_out == "its name"
            else "staging" in str(path) and path.is_file()
        ):
            synced(self, path)

    monkeypatch.setattr(PowerLossDisk, "_synced", forgetful)
    with monkeypatch.context() as patched:
        patched.setattr(OutputFolder, "refuse_lost", lambda self, commits, found: None)
        with pytest.raises((AssertionError, OutputMismatch)):
            prove(folder, CopyingPowerLossDisk, counted=("remove", "commit"))
    # The next attempt looks, too.
    with pytest.raises(OutputMismatch, match=r"is (truncated|missing)"):
        prove(folder.with_name("again"), CopyingPowerLossDisk, counted=("remove", "commit"))


def prove_commits_are_durable(folder):
    """Checks that a chunk whose journal was deleted is committed in everything that may survive a
    power loss.
    """
    checked = 0
    disk = CopyingPowerLossDisk(folder)
    with FakeServer(delay=slow_start) as server, disk_in_place(disk):
        run_job(folder, server, 3)
    gone = set()
    for number, label in enumerate(disk.points):
        if gone:
            for crash in disk.put_back(number):
                found = set(read_commits(folder / "checkpoints" / "00000" / "commits.jsonl"))
                assert gone <= found, f"{number} {crash}: lost a committed chunk"
                checked += len(gone)
        if label.startswith("remove chunk_"):
            gone.add(int(label[-11:-6]))
    return checked


def test_power_loss_never_costs_a_committed_chunk(folder):
    assert prove_commits_are_durable(folder) > 100


@pytest.mark.slow
def test_leaving_out_the_sync_of_the_commit_log_is_noticed(folder, monkeypatch):
    monkeypatch.setattr(files.AppendFile, "sync", lambda self: None)
    with pytest.raises(AssertionError, match="lost a committed chunk"):
        prove_commits_are_durable(folder)
