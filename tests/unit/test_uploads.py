"""Snapshots of a checkpoint, and the versions made of them below a URL."""

import random
import threading
from contextlib import suppress
from unittest.mock import Mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from datatrove_ckpt.checkpoint.identity import FORMAT
from datatrove_ckpt.checkpoint.open_checkpoint import Snapshot
from datatrove_ckpt.checkpoint.request_cache import (
    AnswerKey,
    CachedAnswer,
    CachedRequest,
    RequestCache,
)
from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.errors import Fenced
from datatrove_ckpt.mirror.manifests import (
    MirrorDamaged,
    VersionStore,
    VersionWriter,
    decode_answers,
)


def request(ordinal, number=0, chunk=0):
    answer = (
        CachedAnswer(f'{{"text":"ä {ordinal}"}}'.encode(), None)
        if number % 3
        else CachedAnswer(None, "400 too long\n")
    )
    return CachedRequest(
        chunk, ordinal, f"id\n{ordinal}", AnswerKey(0, f"{number:032x}", 0), answer
    )


def test_answers_are_numbered_upwards_also_after_the_last_ones_were_dropped(tmp_path):
    """SQLite would give the numbers of dropped rows again, and a mirror would never see the new
    ones.
    """
    cache = RequestCache(tmp_path / "replay.sqlite3")
    cache.put([request(0, chunk=0), request(1, chunk=1)])
    seen = cache.last_answer
    cache.drop_chunk(1)
    cache.put([request(2, chunk=2)])
    assert [row.ordinal for row in cache.answers_since(seen, [0, 1, 2])] == [2]
    assert [row.ordinal for row in cache.answers_since(0, [0, 1, 2])] == [0, 2]
    cache.close()
    again = RequestCache(tmp_path / "replay.sqlite3")
    assert again.last_answer == cache.last_answer
    again.close()


class Mirrored:
    """Uploads of an imagined checkpoint of one growing file and some answers."""

    def __init__(self, folder):
        self.versions = VersionStore(f"{folder}/00000")
        self.uploads = VersionWriter(self.versions)
        self.content = b""
        self.rows = []

    def upload(self, data, rows, unfinished, nonce="0" * 16):
        """What ``RemoteMirror`` does."""
        self.content += data
        self.rows = [row for row in [*self.rows, *rows] if row.ordinal in unfinished]
        self.uploads.compact()
        new = self.rows if not self.uploads.last_answer else rows
        count = self.uploads.last_answer + len(rows)
        snapshot = Snapshot(
            b"", {"chunk_00000.jsonl": len(self.content)}, frozenset(unfinished), new, max(count, 1)
        )
        owner = {"nonce": nonce, "host": "here", "pid": 1, "earlier": {}}
        self.uploads.start_version({"format": FORMAT, "owner": owner}, snapshot)
        if start := self.content[self.uploads.uploaded_bytes("chunk_00000.jsonl") :]:
            self.uploads.add("chunk_00000.jsonl", start)
        self.uploads.add_answers(snapshot)
        self.uploads.publish(finished=False)

    def is_complete(self, version):
        try:
            return all(map(self.versions.read_object, self.versions.read_manifest(version).parts()))
        except MirrorDamaged:
            return False

    def manifest(self):
        return self.versions.read_manifest(self.versions.all_versions()[-1])

    def newest(self):
        manifest = self.manifest()
        content = b"".join(
            map(self.versions.read_object, manifest.files.get("chunk_00000.jsonl", []))
        )
        rows = {
            row
            for part in manifest.answers
            for row in decode_answers(self.versions.read_object(part))
        }
        return content, rows


def test_however_often_a_checkpoint_is_mirrored_it_has_few_parts_and_all_that_is_in_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("datatrove_ckpt.mirror.manifests._MAX_PARTS", 8)
    monkeypatch.setattr("datatrove_ckpt.mirror.manifests._SMALL_PART_BYTES", 1000)
    chance = random.Random(0)
    mirrored = Mirrored(tmp_path)
    unfinished = set()
    for number in range(60):
        unfinished.add(number)
        if len(unfinished) > 9:
            unfinished.remove(chance.choice(sorted(unfinished)))
        mirrored.upload(chance.randbytes(chance.randrange(30)), [request(number)], unfinished)
        content, rows = mirrored.newest()
        assert content == mirrored.content
        assert set(mirrored.rows) <= rows
        assert all(map(mirrored.is_complete, mirrored.versions.all_versions()))
        parts = [*mirrored.manifest().parts()]
        assert len(parts) <= 8 + 8 + len(content) // 100
    left = list((tmp_path / "00000" / "objects").iterdir())
    assert len(left) < 3 * 24


def test_answers_whose_upload_failed_are_uploaded_again(tmp_path, monkeypatch):
    mirrored = Mirrored(tmp_path)
    mirrored.upload(b"", [request(0)], {0})
    monkeypatch.setattr(VersionStore, "put_object", Mock(side_effect=ConnectionError))
    with pytest.raises(ConnectionError):
        mirrored.upload(b"", [request(1)], {1})
    assert mirrored.uploads.last_answer == 1


# Two processes of one rank at once ---------------------------------------------------------------


class Process(threading.Thread):
    """Mirrors a growing file three times, and pauses before each request until ``go`` is called."""

    def __init__(self, nonce):
        super().__init__(daemon=True)
        self.mirrored = Mirrored("memory://mirror")
        self.nonce = nonce
        self.error = None
        self.ended = False
        self._may_go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self.start()
        self._paused.acquire()

    def run(self):
        try:
            for number in range(3):
                # The other process may remove an object before it is copied. That is a warning;
                # Fenced follows.
                with suppress(FileNotFoundError):
                    self.mirrored.upload(
                        b"%d of %s, " % (number, self.nonce.encode()), [], set(), self.nonce
                    )
        except BaseException as error:
            self.error = error
        self.ended = True
        self._paused.release()

    def before_request(self):
        self._paused.release()
        self._may_go.acquire()

    def go(self, requests):
        """Lets the process make ``requests`` requests, or all that are left.

        Returns how many it made.
        """
        for number in range(requests):
            if self.ended:
                return number
            self._may_go.release()
            self._paused.acquire()
        return requests

    def go_to_the_end(self):
        while self.go(1):
            yield


@pytest.fixture
def paced_store(monkeypatch):
    def paced(method):
        def call(*args, **options):
            process = threading.current_thread()
            if isinstance(process, Process):
                process.before_request()
            return method(*args, **options)

        return call

    for name in ("put", "copy", "delete", "read", "names"):
        monkeypatch.setattr(ObjectStore, name, paced(getattr(ObjectStore, name)))
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def check_mirror(one, other):
    """What the owner has published is the newest, and complete."""
    ownerships, versions = VersionStore("memory://mirror/00000").listing()
    nonce = ownerships[-1].nonce if ownerships else None
    published = [version for version in versions if version.number > 1 and version.nonce == nonce]
    assert versions[-1].nonce == nonce or not published
    assert one.mirrored.is_complete(versions[-1]) or not published
    assert all(map(one.mirrored.is_complete, published))
    for process in (one, other):
        if process.error is not None and not isinstance(process.error, Fenced):
            raise process.error
    winner = one if one.nonce == nonce else other
    assert winner.error is None
    if winner.ended:
        assert one.mirrored.newest()[0] == winner.mirrored.content


@pytest.mark.parametrize(
    "first, second, step",
    [
        ("b" * 16, "a" * 16, 61),
        pytest.param("a" * 16, "b" * 16, 1, marks=pytest.mark.slow),
        pytest.param("b" * 16, "a" * 16, 1, marks=pytest.mark.slow),
    ],
)
def test_the_last_owner_has_complete_and_newest_versions_wherever_two_processes_pause(
    paced_store, first, second, step
):
    """The first process pauses before each of its requests in turn, the second before each of its
    own meanwhile.

    With a step of 61, that is each 61st of its own, beginning with another one for the first
    process's next request.
    """
    at_first = at_second = 0
    while True:
        MemoryFileSystem.store.clear()
        earlier = Mirrored("memory://mirror")
        for data in (b"old", b"older"):
            earlier.upload(data, [], set())
        one = Process(first)
        made = one.go(at_first)
        two = Process(second)
        made_too = two.go(at_second)
        for _ in one.go_to_the_end():
            check_mirror(one, two) if at_second % 5 == 0 or two.ended else None
        check_mirror(one, two)
        for _ in two.go_to_the_end():
            pass
        check_mirror(one, two)
        if made < at_first:
            break
        if made_too == at_second:
            at_second += step
        else:
            at_first += 1
            at_second = at_first % step
    assert at_first > 30
