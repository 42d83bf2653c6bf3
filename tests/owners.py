"""Two jobs and one output folder, on each kind of storage: fixtures, and the tests that S3 passes, too."""

import asyncio
import shutil
import threading
from functools import partial
from unittest.mock import Mock

import fsspec
import pytest
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter

from datatrove_ckpt.checkpoint.commits import CommitLog
from datatrove_ckpt.common import object_store
from datatrove_ckpt.errors import OutputMismatch, StorageFailed
from datatrove_ckpt.output.output_folder import OutputOwnership
from datatrove_ckpt.testing import FakeServer
from tests.jobs import ask, documents, runner

NAME = "${rank}_${chunk_index}.jsonl"


class Place:
    """An output folder on a file system of fsspec."""

    name = NAME
    rollout = staticmethod(ask)

    def __init__(self, folder, protocol=""):
        self.folder = folder / "output"
        self.url = f"{protocol}{self.folder}"
        self.fs, self._root = fsspec.url_to_fs(self.url)
        self._moved = {}

    def writer(self):
        return JsonlWriter(self.url, self.name, compression=None)

    def files(self):
        self.fs.invalidate_cache()
        paths = self.fs.find(self._root)
        return {path.removeprefix(f"{self._root}/"): self.fs.cat_file(path) for path in paths}

    def _change(self, add, delete):
        for name in delete:
            self.fs.rm_file(f"{self._root}/{name}")
        for name, content in add.items():
            self.fs.pipe_file(f"{self._root}/{name}", content)

    def move_away(self):
        self._moved = self.files()
        self._change({}, list(self._moved))

    def bring_back(self):
        self._change({}, list(self.files()))
        self._change(self._moved, [])

    def forget_owner(self):
        """What the message of the refusal tells: remove the file that names the owner."""
        for path in self.fs.glob(f"{self.fs._parent(self._root)}/.output.datatrove-ckpt-owner-*"):
            self.fs.rm_file(path)


class ParquetPlace(Place):
    name = "${rank}_${chunk_index}.parquet"

    def writer(self):
        return ParquetWriter(self.url, self.name)


class ManyFiles(Place):
    """Each chunk has a file for each language."""

    name = "${language}/${rank}_${chunk_index}.jsonl"

    @staticmethod
    async def rollout(document, generate):
        document.metadata["language"] = "de" if int(document.id[3:]) % 2 else "fr"
        return await ask(document, generate)


class HubPlace(Place):
    """A folder in a repository on the hub."""

    kind, repo = "dataset", "org/data"

    def __init__(self, hub):
        self.hub = hub
        self.url = f"hf://{self.kind}s/{self.repo}/output"
        self._moved = {}

    def files(self):
        found = self.hub.files(self.repo, kind=self.kind)
        return {name: content for name, content in found.items() if name.startswith("output/")}

    def _change(self, add, delete):
        if delete:
            self.hub.remove(self.repo, delete, self.kind)
        if add:
            self.hub.put(self.repo, add, kind=self.kind)

    def forget_owner(self):
        self._change({}, self.hub.owners(self.repo, self.kind))


class BucketPlace(HubPlace):
    kind, repo = "bucket", "org/job"


@pytest.fixture
def place(request, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "_SETTLES", 0.01)
    kinds = {
        "local": Place,
        "parquet": ParquetPlace,
        "many files": ManyFiles,
        "memory": partial(Place, protocol="memory://"),
    }
    kind = getattr(request, "param", "local")
    if kind in kinds:
        yield kinds[kind](tmp_path)
        return
    hub = request.getfixturevalue("hub")
    hub.create_repo("org/data")
    hub.create_repo("org/job", kind="bucket")
    yield HubPlace(hub) if kind == "hub" else BucketPlace(hub)


@pytest.fixture
def servers():
    """Their answers have one size, so the files of both jobs have one, too."""
    with (
        FakeServer(answer=lambda path, text: "a") as one,
        FakeServer(answer=lambda path, text: "b") as other,
    ):
        yield one, other


UNOWNED = pytest.mark.usefixtures("unowned")


@pytest.fixture
def unowned(monkeypatch):
    """As where nothing can be written beside the folder."""
    monkeypatch.setattr(OutputOwnership, "claim", lambda self: None)


def job(tmp_path, name, server, place, **changes):
    rollout = changes.pop("rollout", place.rollout)
    return runner(tmp_path / name, server, rollout, output_writer=place.writer(), **changes)


@pytest.fixture
def start(tmp_path, place, servers):
    """Starts the job "a" or "b", each of which has a server of its own."""

    def start(name, number=5, **changes):
        server = servers["ab".index(name)]
        job(tmp_path, name, server, place, **changes).run(documents(number))

    return start


def killed_before_its_commit(step, monkeypatch):
    """Its first chunk is published, and has no commit."""
    with monkeypatch.context() as patch:
        patch.setattr(CommitLog, "append", Mock(side_effect=StorageFailed("as asked")))
        with pytest.raises(StorageFailed):
            step.run(documents(2))  # one chunk: another one might be uploaded later


def second_is_refused_before_it_asks(tmp_path, place, servers, start, monkeypatch, command):
    _, other = servers
    refused = []

    async def rollout(document, generate):
        if not refused:
            refused.append("")
            with pytest.raises(OutputMismatch) as failed:
                await asyncio.to_thread(start, "b")
            refused[0] = str(failed.value)
        return await place.rollout(document, generate)

    start("a", rollout=rollout)
    assert (
        "belongs to another run, with checkpoints in " + str(tmp_path / "a/checkpoints")
        in refused[0]
    )
    assert not other.asked
    written = place.files()
    assert not (tmp_path / "b/checkpoints/00000").exists()
    with pytest.raises(OutputMismatch, match="belongs to another run"):
        start("b")
    start("a", rollout=rollout)  # never refuses itself
    assert place.files() == written


def moved_job_replaces_no_file_of_another(tmp_path, place, servers, start, monkeypatch, command):
    one, other = servers
    killed_before_its_commit(job(tmp_path, "a", one, place), monkeypatch)
    place.move_away()
    with pytest.raises(OutputMismatch, match="belongs to another run"):
        start("b")
    assert not other.asked
    place.forget_owner()
    start("b")
    written, asked = place.files(), one.asked.total()
    with pytest.raises(
        OutputMismatch, match=f"belongs to another run, with checkpoints in {tmp_path}/b"
    ):
        start("a")
    assert one.asked.total() == asked
    for words in ("verify", "repair"):
        said = command(words, tmp_path / "a/checkpoints", code=None)
        assert said.code in (1, 2)
        assert "belongs to another run" in said
    assert place.files() == written
    start("b")
    command("verify", tmp_path / "b/checkpoints", "--full")
    place.forget_owner()  # and even so
    with pytest.raises(
        OutputMismatch,
        match=r"no commit of task 0 names|has files that this task has not published",
    ):
        start("a")
    assert place.files() == written
    place.bring_back()
    place.forget_owner()
    start("a")
    command("verify", tmp_path / "a/checkpoints", "--full")


def without_owners_no_file_is_replaced(tmp_path, place, servers, start, monkeypatch, command):
    """The first job publishes its last chunk, then the other one its first; neither has met a file
    before.
    """
    monkeypatch.setattr(OutputOwnership, "claim", lambda self: None)
    has_begun, may_end = threading.Event(), threading.Event()

    async def rollout(document, generate):
        found = await place.rollout(document, generate)
        if document.id == "id 0":
            has_begun.set()
            await asyncio.to_thread(may_end.wait, 300)
        return found

    failed = []

    def first():
        try:
            start("a", 4, rollout=rollout)
        except OutputMismatch as error:
            failed.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    has_begun.wait(300)
    log = tmp_path / "a/checkpoints/00000/commits.jsonl"
    is_later = isinstance(place, HubPlace) and place.kind == "dataset"  # its commit waits
    while not is_later and not (log.exists() and log.read_bytes()):
        threading.Event().wait(0.01)
    before = place.files()
    ended = []
    try:
        start("b", 4)
    except OutputMismatch as error:
        ended.append(error)
    assert {name: place.files()[name] for name in before} == before
    between = place.files()
    may_end.set()
    thread.join(300)
    assert len(failed) + len(ended) >= 1
    assert {name: place.files()[name] for name in between} == between


def replaced_file_of_the_same_size_is_noticed(
    tmp_path, place, servers, start, monkeypatch, command
):
    """A backup of the output was restored, from before some chunks were made again."""
    one, _ = servers
    start("b", 4)
    place.move_away()
    shutil.rmtree(tmp_path / "b")
    place.forget_owner()
    start("a", 4)
    sizes = {name: len(content) for name, content in place.files().items()}
    right = place.files()
    place.bring_back()
    assert {name: len(content) for name, content in place.files().items()} == sizes
    assert place.files() != right
    asked = one.asked.total()
    with pytest.raises(OutputMismatch, match=r"is altered"):
        start("a", 4)
    assert one.asked.total() == asked
    assert "is altered" in command("verify", tmp_path / "a/checkpoints", code=1)
    command("repair", tmp_path / "a/checkpoints", code=None)
    start("a", 4)
    assert place.files().keys() == right.keys()
    command("verify", tmp_path / "a/checkpoints", "--full")


def other_bytes_replace_their_own_file(tmp_path, place, servers, start, monkeypatch, command):
    """Another version of zlib or pyarrow writes other bytes."""
    one, _ = servers
    killed_before_its_commit(job(tmp_path, "a", one, place), monkeypatch)
    before = place.files()
    again = job(tmp_path, "a", one, place)
    plain = again.output_writer.adapter
    again.output_writer.adapter = lambda document: {**plain(document), "more": 1}
    again.accept_changes = True
    # On one file system no reader of the folder sees a copy.
    monkeypatch.delattr("datatrove_ckpt.output.targets.LocalTarget._copied")
    again.run(documents(5))
    assert {name for name in before if place.files()[name] != before[name]} == before.keys()
    command("verify", tmp_path / "a/checkpoints", "--full")


SCENARIOS = {
    second_is_refused_before_it_asks: ("many files",),
    moved_job_replaces_no_file_of_another: ("local",),
    without_owners_no_file_is_replaced: ("memory",),
    replaced_file_of_the_same_size_is_noticed: ("memory",),
    other_bytes_replace_their_own_file: ("parquet", "hub"),
}
"""What must hold on each kind of storage; with the kinds on which quick tests try it."""
KINDS = ("local", "parquet", "many files", "memory", "hub", "bucket")
