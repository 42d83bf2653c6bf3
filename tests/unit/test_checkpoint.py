"""The modules of checkpoint/, one by one: lines, journals, commits, request cache, storage thread,
lock.
"""

import errno
import fcntl
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum, read_lines
from datatrove_ckpt.checkpoint.chunks import Chunk
from datatrove_ckpt.checkpoint.commits import Commit, CommitLog, CommitsDamaged, OutputFile
from datatrove_ckpt.checkpoint.fence import RunClaim
from datatrove_ckpt.checkpoint.identity import RunIdentity
from datatrove_ckpt.checkpoint.interval import SYNC_TUNING, Interval
from datatrove_ckpt.checkpoint.journal import ChunkJournal, FinishedDocument
from datatrove_ckpt.checkpoint.layout import (
    DEAD_LETTERS,
    RankAddress,
    journal_indices,
    journal_path,
    last_chunk_of,
    rank_folder,
    rank_numbers,
    retry_folder,
)
from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.checkpoint.open_checkpoint import RankFiles, StorageThread
from datatrove_ckpt.checkpoint.recovery import ResumePoint, recover
from datatrove_ckpt.checkpoint.request_cache import (
    AnswerKey,
    CachedAnswer,
    CachedRequest,
    RequestCache,
    payload_hash,
    read_answers,
)
from datatrove_ckpt.checkpoint.run_limits import RunTotals, read_paid
from datatrove_ckpt.common.counts import DocumentCounts, LogHistogram, Seconds
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointLocked, StorageFailed
from datatrove_ckpt.process import open_files
from tests import golden

# lines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tail", [b"\0" * 100, b"\0\n\0\n", b'{"xxh":"0000000000000000","n":9}\n', b"\xff\n\n"]
)
def test_garbage_at_the_end_is_a_torn_tail_and_elsewhere_is_corrupt(tmp_path, tail):
    good = add_checksum(b'{"n":0}')
    (tmp_path / "file").write_bytes(good + tail)
    assert [line.body for line in read_lines(tmp_path / "file")] == [b'{"n":0}']
    (tmp_path / "file").write_bytes(good + tail.rstrip(b"\n") + b"\n" + good)
    with pytest.raises(CheckpointCorrupt, match=r"file, line 2: the line is damaged"):
        list(read_lines(tmp_path / "file"))


# journal -----------------------------------------------------------------------------------------


def finished(ordinal, fingerprint=None):
    fingerprint = fingerprint or f"{ordinal:016x}"
    return FinishedDocument(ordinal, "written", fingerprint, b'{"id":"%d"}' % ordinal, 1, 2, 3)


def test_a_torn_last_line_is_cut_before_the_next_append(tmp_path):
    journal = ChunkJournal(tmp_path / "journal", 0)
    journal.append([finished(0)])
    size = (tmp_path / "journal").stat().st_size
    journal.append([finished(1)])
    files.disk.close()
    content = (tmp_path / "journal").read_bytes()
    for cut in range(size, len(content)):
        (tmp_path / "journal").write_bytes(content[:cut])
        again = ChunkJournal(tmp_path / "journal", 0, 2)
        assert list(again.recovered) == [0]
        again.append([finished(1)])
        files.disk.close()
        assert (tmp_path / "journal").read_bytes() == content


@pytest.mark.parametrize(
    "group, said",
    [
        ([finished(1)], "document 0 cannot be read back"),
        ([finished(0), finished(0, "f" * 16)], "document 0 does not belong there"),
    ],
)
def test_a_document_that_is_missing_or_another_one_is_noticed(tmp_path, group, said):
    journal = ChunkJournal(tmp_path / "journal", 0)
    journal.append(group)
    with pytest.raises(CheckpointCorrupt, match=said):
        list(ChunkJournal(tmp_path / "journal", 0, 2).read_in_order())


def test_what_the_system_writes_in_parts_is_written_whole(tmp_path, monkeypatch):
    """A signal, a pipe or a disk that is nearly full cuts a write short."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:7])))
    files.disk.append(tmp_path / "log", b"0123456789" * 3)
    files.disk.replace(tmp_path / "file", b"0123456789")
    assert (tmp_path / "log").read_bytes() == b"0123456789" * 3
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_what_a_fenced_process_added_meanwhile_shifts_nothing_and_counts_once(
    tmp_path,
):
    ours = ChunkJournal(tmp_path / "journal", 0)
    theirs = ChunkJournal(tmp_path / "journal", 0)
    ours.append([finished(0)])
    theirs.append([finished(0), finished(1)])
    ours.append([finished(1)])
    both = [("written", (ordinal, finished(ordinal).document)) for ordinal in (0, 1)]
    assert list(ours.read_in_order()) == both
    assert list(ChunkJournal(tmp_path / "journal", 0, 2).read_in_order()) == both


def test_more_journals_than_open_files_are_all_written(tmp_path, monkeypatch):
    assert files.MAX_OPEN_FILES < open_files._FILES, "what a task makes room for"
    monkeypatch.setattr(files, "MAX_OPEN_FILES", 2)
    open_before = len(os.listdir("/dev/fd"))  # noqa: PTH208 (which opens the folder)
    journals = [ChunkJournal(tmp_path / f"journal {index}", index) for index in range(5)]
    for turn in range(3):
        for index, journal in enumerate(journals):
            journal.append([finished(index + turn)])
    assert len(os.listdir("/dev/fd")) <= open_before + 2  # noqa: PTH208
    for index, journal in enumerate(journals):
        journal.file.sync()
        assert [ordinal for _, (ordinal, _) in journal.read_in_order()] == [
            index,
            index + 1,
            index + 2,
        ]


# commits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tail, is_torn",
    golden.values("tails_of_commits", globals()),
)
def test_a_crash_tears_one_line_of_the_commit_log_at_most(tmp_path, tail, is_torn):
    path = tmp_path / "commits.jsonl"
    CommitLog(path).append(Commit(0, 0, DocumentCounts(read=1)))
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    if is_torn:
        assert set(CommitLog(path).commits) == {0}
        assert path.read_bytes() == whole
        return
    with pytest.raises(
        CommitsDamaged, match=r"line 2: .* so no crash did this\. Keep the task's output files"
    ):
        CommitLog(path)
    assert path.read_bytes() == whole + tail, "refused, and nothing is changed"


def test_a_commit_is_read_back_as_it_was_written(tmp_path):
    names = [each.name for each in fields(DocumentCounts) if each.type == "int"]
    counts = DocumentCounts(**dict(zip(names, range(1, 99), strict=False)), reasons=Counter(odd=3))
    counts = replace(counts, lengths=LogHistogram.of([0, 5, 5000]))
    written = Commit(
        4,
        8,
        counts,
        [OutputFile("a/b.jsonl", 10, "ff"), OutputFile("c.jsonl", 11, "ee", "dd", 7)],
        {"offset": 7},
        "abc",
        12,
        seconds=Seconds(1.5, 2.5),
        at=3.5,
    )
    log = CommitLog(tmp_path / "commits.jsonl")
    log.append(written)
    (found,) = CommitLog(tmp_path / "commits.jsonl").commits.values()
    assert found.to_json() == written.to_json()
    assert replace(found, work=written.work) == written


@pytest.mark.parametrize(
    "second, said",
    [
        (Commit(0, 0, DocumentCounts()), "chunk 0 is committed twice"),
        (Commit(1, 0, DocumentCounts()), "not in their order"),
    ],
)
def test_whole_lines_that_no_run_writes_are_damage(tmp_path, second, said):
    log = CommitLog(tmp_path / "commits.jsonl")
    for one in (Commit(0, 0, DocumentCounts(), dead_letters_size=1), second):
        log.append(one)
    with pytest.raises(CommitsDamaged, match=said):
        CommitLog(tmp_path / "commits.jsonl")


def test_what_a_crash_left_of_a_committed_chunk_is_gone(tmp_path):
    folder = rank_folder(tmp_path, 0)
    folder.mkdir()
    last_chunk_of(folder).parent.mkdir()
    log, cache = CommitLog(folder / "commits.jsonl"), RequestCache(folder / "cache")
    for index in (0, 2):
        log.append(Commit(index, index * 2, DocumentCounts(read=2)))
    cache.put([request(0)])
    (folder / DEAD_LETTERS).write_bytes(b"of chunk 1")
    for index in range(2):
        last = replace(finished(3), seconds=Seconds(index, 2))
        ChunkJournal(journal_path(folder, index), 0).append([last])
    journal_path(folder, 3).touch()
    assert recover(folder, log, cache, 4).committed.seconds == (1, 2)
    assert journal_indices(folder) == [1]
    assert not list(cache.answer_counts())
    assert not (folder / DEAD_LETTERS).read_bytes()
    ChunkJournal(journal_path(folder, 1), 0).append([finished(4)])
    with pytest.raises(CheckpointCorrupt, match="document 4 does not belong there"):
        recover(folder, log, cache, 4)  # chunk 2 begins there


# request cache -----------------------------------------------------------------------------------


def request(ordinal, occurrence=0, chunk_index=0, error=None):
    key = AnswerKey(0, payload_hash(b"{}"), occurrence)
    answer = CachedAnswer(None, error) if error else CachedAnswer(b'"%d"' % occurrence, None)
    return CachedRequest(chunk_index, ordinal, "same id", key, answer)


def test_answers_are_kept_by_document_rollout_payload_and_occurrence(tmp_path):
    cache = RequestCache(tmp_path / "cache")
    cache.put([request(0), request(0, 1), request(1, chunk_index=1), request(2, error="400 no")])
    cache.close()
    cache = RequestCache(tmp_path / "cache")
    assert dict(cache.answer_counts()).keys() == {0, 1, 2}
    assert [answer.result for answer in cache.answers(0).values()] == [b'"0"', b'"1"']
    assert [answer.error_message for answer in cache.answers(2).values()] == ["400 no"]
    cache.forget_errors()
    cache.drop_chunk(1)
    assert dict(cache.answer_counts()).keys() == {0}
    cache.remove()
    assert not list(tmp_path.iterdir())


def test_what_is_kept_of_a_committed_chunk_has_no_errors(tmp_path):
    cache = RequestCache(tmp_path / "cache", tmp_path / "kept")
    cache.put([request(0), request(1, error="400 no")])
    cache.drop_chunk(0)
    assert [*read_answers(tmp_path / "kept")] == [request(0)]
    cache.close()


def test_a_second_connection_is_locked_out(tmp_path):
    cache = RequestCache(tmp_path / "cache")
    cache.put([request(0)])
    connection = sqlite3.connect(tmp_path / "cache", timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        connection.execute("SELECT * FROM request_cache")
    connection.close()
    cache.close()


# storage thread ----------------------------------------------------------------------------------


CHUNK = Chunk(0, 0)


def make_storage(folder, interval=None, **more):
    fence = RunClaim(folder, RunIdentity({})).take()
    log, cache = CommitLog(folder / "commits.jsonl"), RequestCache(folder / "cache")
    every = interval or Interval(60, SYNC_TUNING)
    rank_files = RankFiles(folder, cache, log, fence, every, ResumePoint(), **more)
    return StorageThread(rank_files), rank_files


def test_what_was_queued_meanwhile_is_one_group_and_calls_run_in_order(tmp_path, monkeypatch):
    storage, rank_files = make_storage(tmp_path)
    transactions = []
    put = RequestCache.put
    monkeypatch.setattr(
        RequestCache, "put", lambda self, group: (transactions.append(len(group)), put(self, group))
    )
    hold, held = threading.Event(), threading.Event()
    storage.call(lambda: (held.set(), hold.wait()))
    held.wait()
    seen = []
    for ordinal in range(10):
        storage.put(request(ordinal), 0)
        storage.put(finished(ordinal), 0, CHUNK)
    storage.call(lambda: seen.append(len(list(rank_files._journal(CHUNK).read_in_order()))))
    assert storage.submitted_bytes == 20 * 500  # items without content take memory, too
    hold.set()
    storage.stop()
    assert storage.error is None
    assert (transactions, seen, storage.written_bytes) == ([10], [10], 20 * 500)


def test_a_kill_before_the_history_has_a_line_loses_none_of_what_is_paid(tmp_path):
    _, rank_files = make_storage(tmp_path, keeps_paid=True)
    rank_files.own.prompt_tokens = 5
    rank_files.own.cost = 7
    rank_files.write([request(0)], {})
    rank_files.own.cost = 8  # an answer that was not written
    rank_files.cache.close()
    _, again = make_storage(tmp_path)
    again.own.cost = 1
    assert again.paid() == RunTotals(0, 5, 0, 8)
    (tmp_path / "paid").write_bytes(b"damaged")
    assert read_paid(tmp_path / "paid") == RunTotals()


def test_a_snapshot_has_a_shard_once_this_attempt_has_written_it(tmp_path):
    """Files of a snapshot only grow, and that of an earlier attempt is replaced."""
    _, rank_files = make_storage(tmp_path)
    (tmp_path / "shard.json").write_bytes(b"of an earlier attempt")
    assert "shard.json" not in rank_files.snapshot(0).sizes
    rank_files.write_shard({})
    assert "shard.json" in rank_files.snapshot(0).sizes


def test_a_disk_without_room_for_what_is_paid_stops_the_rank(tmp_path, monkeypatch):
    _, rank_files = make_storage(tmp_path, keeps_paid=True)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("os.pwrite", Mock(side_effect=full))
    with pytest.raises(StorageFailed, match="paid: No space left"):
        rank_files.write([request(0)], {})


def test_a_sync_comes_within_sync_seconds_even_when_nothing_follows(tmp_path, monkeypatch):
    class Told(Interval):
        def took(self, duration):
            told.set()

    synced, told = threading.Event(), threading.Event()
    monkeypatch.setattr(RequestCache, "sync", lambda self: synced.set())
    storage, _ = make_storage(tmp_path, Told(0.01, SYNC_TUNING))
    storage.put(request(0), 0)
    assert synced.wait(300)
    assert told.wait(300), "auto follows how long syncs take"
    storage.stop()


def test_what_is_asked_of_the_storage_thread_is_answered_before_and_after_its_end(
    tmp_path,
):
    storage, rank_files = make_storage(tmp_path)
    storage.put(request(7), 0)
    assert storage.ask(lambda: rank_files.snapshot(0).unfinished) == {7}
    with pytest.raises(ZeroDivisionError):
        storage.ask(lambda: 1 // 0)
    storage.put(request(8), 0)
    storage.stop()
    assert storage.error is None
    assert storage.ask(lambda: rank_files.snapshot(0).unfinished) == {7, 8}
    rank_files.close(completed=False)


# files -------------------------------------------------------------------------------------------


def test_names_are_read_back_beyond_five_digits_and_other_names_are_left_out(
    tmp_path,
):
    numbers = [0, 7, 123_456]
    for number in numbers:
        rank_folder(tmp_path, number).mkdir()
        journal_path(tmp_path, number).touch()
        retry = retry_folder(tmp_path, number)
        address = RankAddress.of(rank_folder(retry, 7))
        assert address == (retry.name, 7)
        assert str(address) == f"{retry.name}/00007"
    last_chunk_of(rank_folder(tmp_path, 0)).parent.mkdir()
    for name in (
        "retry-00001",
        "7",
        "00007.restoring",
        "\u0660\u0660\u0660\u0660\u0667",
        "chunk_00007.jsonl.new",
    ):
        (tmp_path / name).touch()
    assert rank_numbers(tmp_path) == numbers
    assert journal_indices(tmp_path) == numbers
    assert str(RankAddress.of(rank_folder(tmp_path, 7))) == "00007"


def test_a_rank_that_starts_while_its_lock_is_looked_at_is_not_refused(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    path.touch()
    looking = os.open(path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)  # as lock_holder does
    waits = []

    def look_away(seconds):
        waits.append(seconds)
        os.close(looking)

    monkeypatch.setattr(
        "datatrove_ckpt.checkpoint.lock.time",
        SimpleNamespace(monotonic=lambda: 0.0, sleep=look_away),
    )
    Lock(path).release()
    assert len(waits) == 1


def test_a_lock_is_held_until_released_and_the_next_process_is_told_by_whom(tmp_path):
    lock = Lock(tmp_path / "lock")
    code = f"from datatrove_ckpt.checkpoint.lock import Lock, Path; Lock(Path({str(tmp_path / 'lock')!r}))"
    refused = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert "CheckpointLocked" in refused.stderr
    assert f"pid {os.getpid()} on " in refused.stderr
    lock.release()
    Lock(tmp_path / "lock").release(remove=True)  # a lock on a removed file locks nobody out
    second = Lock(tmp_path / "lock")
    with pytest.raises(CheckpointLocked):
        Lock(tmp_path / "lock")
    second.release()


@pytest.mark.parametrize(
    "code, expected, says",
    [
        (None, CheckpointLocked, "Another process works on this task: it has"),
        (errno.EAGAIN, CheckpointLocked, "Another process works on this task: it has"),
        (errno.ENOLCK, StorageFailed, "cannot be locked: .* Mount it with locks"),
    ],
)
def test_locks_that_a_file_system_lacks_are_not_another_process(
    tmp_path, monkeypatch, code, expected, says
):
    def lockf(file, how):
        if code is not None:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    cache = RequestCache(tmp_path / "replay.sqlite3")  # SQLite calls both locked
    with pytest.raises(expected, match=says):
        RequestCache(tmp_path / "replay.sqlite3")
    cache.close()


@pytest.mark.parametrize("code, fails", [("EINVAL", False), ("EBADF", False), ("EIO", True)])
def test_a_file_system_that_syncs_no_folder_is_used_and_a_failing_one_is_not(
    tmp_path, monkeypatch, code, fails
):
    """CIFS and sshfs refuse the sync of a folder."""
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(getattr(errno, code), code)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageFailed) if fails else nullcontext():
        files.Disk().replace(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"


# folders that ranks share ------------------------------------------------------------------------


def test_a_folder_can_be_made_while_another_rank_removes_the_parent_that_they_share(
    tmp_path,
):
    def rank(number):
        parent, disk = tmp_path / "staging", files.Disk()
        for _ in range(100):
            disk.make_dirs(parent / str(number))
            disk.remove_tree(parent / str(number))
            disk.remove_dir(parent)

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(rank, range(4))] == [None] * 4


def test_the_first_file_of_a_name_stays_and_nothing_lies_beside_it(tmp_path):
    for content in (b"first", b"second"):
        files.keep_first(tmp_path / "job/record", content)
    assert {path.name: path.read_bytes() for path in (tmp_path / "job").iterdir()} == {
        "record": b"first"
    }
