"""Two jobs and one output folder, on each kind of storage: one is refused, and no byte of the other
one changes.
"""

import asyncio
import os
import random
import shutil
import socket
import threading
from functools import partial
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pytest
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import CommitLog
from datatrove_ckpt.checkpoint.layout import HOME
from datatrove_ckpt.checkpoint.publish_intents import PublishIntents
from datatrove_ckpt.common import object_store
from datatrove_ckpt.errors import CheckpointMismatch, OutputMismatch, StorageFailed
from datatrove_ckpt.output import output_folder
from datatrove_ckpt.output.output_folder import OutputOwnership, RankCommits, content_hash
from datatrove_ckpt.testing import FakeServer
from tests.crashes import WatchedDisk, crash_at, disk_in_place
from tests.jobs import ask, documents, run_job, runner

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


def on(*quick):
    """On each kind of storage; on others than these in the slow suite."""
    kinds = ("local", "parquet", "many files", "memory", "hub", "bucket")
    rows = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in quick)) for kind in kinds]
    return pytest.mark.parametrize("place", rows, indirect=True)


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


@pytest.mark.parametrize("content", [b"", b"\0" * 99, b"[]", b'{"home": "x"}', None])
def test_a_run_whose_record_of_its_origin_is_damaged_says_what_restores_it(
    tmp_path, servers, content
):
    step = job(tmp_path, "a", servers[0], Place(tmp_path))
    step.run(documents(5))
    home = tmp_path / "a/checkpoints" / HOME
    record = home.read_bytes()
    home.unlink() if content is None else home.write_bytes(content)
    with pytest.raises(OutputMismatch, match=f"{home} is missing or damaged, copy ") as refused:
        step.run(documents(5))
    path = Path(str(refused.value).partition("damaged, copy ")[2].partition(" there, and run")[0])
    shutil.copy(path, home)
    step.run(documents(5))
    assert home.read_bytes() == record
    path.unlink()  # without the record beside the output, the run makes both anew
    home.write_bytes(b"")
    step.run(documents(5))
    assert home.read_bytes() == path.read_bytes() != record


@pytest.mark.matrix
@on("many files", "bucket")
def test_the_second_of_two_jobs_is_refused_before_it_asks_anything(tmp_path, place, servers, start):
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


@pytest.mark.matrix
@on("local", "hub")
def test_a_moved_job_finds_the_files_of_another_one_and_replaces_none(
    tmp_path, place, servers, start, monkeypatch, command
):
    one, other = servers
    killed_before_its_commit(job(tmp_path, "a", one, place), monkeypatch)
    place.move_away()
    with pytest.raises(OutputMismatch, match="the file that names it"):
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
    with pytest.raises(OutputMismatch, match=r"no commit of task 0 names|has other content"):
        start("a")
    assert place.files() == written
    place.bring_back()
    place.forget_owner()
    start("a")
    command("verify", tmp_path / "a/checkpoints", "--full")


@pytest.mark.matrix
@UNOWNED
@on("local", "memory", "hub")
def test_without_owners_a_job_replaces_no_file_of_another_one_in_any_order(tmp_path, place, start):
    """The first job publishes its last chunk, then the other one its first; neither has met a file
    before.
    """
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


@on("memory")
def test_a_committed_file_that_another_of_its_size_replaced_is_noticed(
    tmp_path, place, servers, start, command
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


@on("parquet", "hub")
def test_a_chunk_that_is_written_again_with_other_bytes_replaces_its_own_file(
    tmp_path, place, servers, monkeypatch, command
):
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


# on a disk ---------------------------------------------------------------------------------------


@UNOWNED
@pytest.mark.parametrize("place", ["many files"], indirect=True)
def test_of_several_files_of_a_chunk_none_stays_where_one_is_refused(tmp_path, place, start):
    stranger = place.folder / "de/00000_00000.jsonl"

    async def rollout(document, generate):
        stranger.parent.mkdir(parents=True, exist_ok=True)
        stranger.write_text("another job's")
        return await place.rollout(document, generate)

    with pytest.raises(OutputMismatch, match="de/00000_00000"):
        start("a", 2, rollout=rollout)
    assert place.files() == {"de/00000_00000.jsonl": b"another job's"}
    assert not list((tmp_path / "a").rglob("staging/*/*"))


@UNOWNED
@pytest.mark.parametrize("hard_links", [True, False])
def test_a_file_that_appears_in_the_last_moment_is_not_replaced(
    monkeypatch, hard_links, start, place
):
    link = files.Disk.link

    def later(self, source, target):
        if target.parent == place.folder and not target.exists():
            target.write_text("another job's")
        if hard_links:
            return link(self, source, target)
        error = StorageFailed("no links")
        error.__cause__ = OSError(1, "Operation not permitted")
        raise error

    monkeypatch.setattr(files.Disk, "link", later)
    with pytest.raises(OutputMismatch, match="has other content"):
        start("a", 2)
    assert place.files() == {"00000_00000.jsonl": b"another job's"}


def test_files_of_another_ending_are_seen_by_a_first_start(tmp_path, servers, start, place):
    one, _ = servers
    start("a", 3)
    place.forget_owner()
    zipped = JsonlWriter(str(place.folder), NAME, compression="gzip")
    with pytest.raises(OutputMismatch, match=r"00000_00000\.jsonl"):
        run_job(tmp_path / "b", one, 3, output_writer=zipped)


def test_a_complete_rank_refuses_what_it_has_published_and_not_committed(tmp_path, start, place):
    """A node that was lost had other answers, and so a file of another name."""
    start("a", 2)
    name = "00000_00001.jsonl"
    (place.folder / name).write_text("the documents of chunk 0, again")
    content = content_hash(place.writer().output_folder, name)
    PublishIntents(tmp_path / "a/checkpoints/00000").add({name: content})
    with pytest.raises(OutputMismatch, match="no commit of task 0 names: 00000_00001"):
        start("a", 2)


def test_commits_are_read_once_however_many_files_were_copied(tmp_path, monkeypatch, start, place):
    """Each file took the time of all commits: 1,000 files two minutes."""
    start("a")
    for path in place.folder.iterdir():
        os.utime(path, (1, 1))
    read = Mock(wraps=output_folder.read_commits)
    monkeypatch.setattr(output_folder, "read_commits", read)
    root = tmp_path / "a/checkpoints"
    folder = output_folder.OutputFolder(place.writer(), root)
    assert len(folder.look(folder.by_name([RankCommits(root, 0)])).touched) == 3
    assert read.call_count == 1


def test_a_run_of_an_earlier_release_goes_on_and_replaces_its_own_file(
    tmp_path, servers, monkeypatch, command, start, place
):
    """It kept no intents, its commits have no stamps, and its folder has no owner."""
    one, _ = servers
    step = job(tmp_path, "a", one, place)
    killed_before_its_commit(step, monkeypatch)
    folder = tmp_path / "a/checkpoints/00000"
    PublishIntents(folder).path.unlink()
    place.forget_owner()
    (tmp_path / "a/checkpoints" / HOME).unlink()
    (next(place.folder.iterdir())).write_text("half of what another version would have written")
    asked = one.asked.total()
    start("a")
    assert one.asked.total() == 5 >= asked
    command("verify", tmp_path / "a/checkpoints", "--full")


def test_two_runs_whose_nodes_have_checkpoints_in_the_same_place_are_two(
    tmp_path, servers, monkeypatch, place
):
    """Each on a node with a disk of its own: the path is the same, and the settings are not."""
    one, other = servers

    def start(server, rollouts):
        settings = {"rollouts_per_document": rollouts}
        job(tmp_path, "node", server, place, config=settings).run(documents(3))

    monkeypatch.setattr(socket, "gethostname", lambda: "node 1")
    start(one, 1)
    monkeypatch.setattr(socket, "gethostname", lambda: "node 2")
    (tmp_path / "node").rename(tmp_path / "another node")
    with pytest.raises(OutputMismatch, match="belongs to another run"):
        start(other, 2)
    assert not other.asked
    shutil.rmtree(place.folder)
    start(other, 2)
    shutil.rmtree(tmp_path / "node")
    (tmp_path / "another node").rename(tmp_path / "node")
    with pytest.raises(OutputMismatch, match="belongs to another run"):
        start(one, 1)


def test_a_later_run_in_the_place_of_a_moved_one_is_another_run(tmp_path, servers, command, place):
    """The same path names both, and both have the same settings."""
    one, other = servers
    job(tmp_path, "run", one, place).run(documents(3))
    (tmp_path / "run").rename(tmp_path / "old")
    place.move_away()
    job(tmp_path, "run", other, place).run(documents(3))
    written = place.files()
    for words in ("verify", "repair"):
        assert "belongs to another run" in command(words, tmp_path / "old/checkpoints", code=None)
    with pytest.raises(OutputMismatch, match="belongs to another run"):
        job(tmp_path, "old", one, place).run(documents(3))
    assert place.files() == written


def test_nodes_with_disks_of_their_own_may_begin_a_run_at_one_moment(tmp_path, monkeypatch):
    """Each finds no record, and keeps what it then would write."""
    folder = Place(tmp_path).writer().output_folder
    nodes = [tmp_path / "disk 1", tmp_path / "disk 2"]
    for mirror in ("s3://bucket/mirror", None):
        claims = []
        for number, root in enumerate(nodes):
            monkeypatch.setattr(socket, "gethostname", lambda number=number: f"node {number}")
            homes = output_folder.RunOrigin(root, mirror, "same")
            claims.append(homes)
            homes.record(homes.new_record(f"key {number}")._replace(home=mirror or "/same/path"))
        for number, homes in enumerate(claims):
            monkeypatch.setattr(socket, "gethostname", lambda number=number: f"node {number}")
            OutputOwnership(folder, NAME, homes).claim()
        Place(tmp_path).forget_owner()
        for root in nodes:
            shutil.rmtree(root)


class Interrupting(WatchedDisk):
    """Calls ``interrupt`` before one effect."""

    def __init__(self, number, interrupt):
        super().__init__()
        self._number = number
        self._interrupt = interrupt

    def before(self, name, args, label):
        if len(self.happened) == self._number:
            files.disk = files.Disk()
            self._interrupt()


def claim_in_place_of_a_removed_run(tmp_path):
    """Returns what each rank of a run does whose folder held an earlier run of the same
    settings.
    """
    folder = Place(tmp_path).writer().output_folder
    root = tmp_path / "checkpoints"
    OutputOwnership(folder, NAME, output_folder.RunOrigin(root, None, "run"), lambda: True).claim()
    shutil.rmtree(root)
    return lambda is_unused=True: OutputOwnership(
        folder, NAME, output_folder.RunOrigin(root, None, "run"), lambda: is_unused
    ).claim()


def test_a_removed_run_whose_files_are_there_keeps_its_folder(tmp_path):
    """Workers publish without the checks that a whole run makes before it starts."""
    claim_in_place_of_a_removed_run(tmp_path)
    homes = output_folder.RunOrigin(tmp_path / "checkpoints", None, "another run")
    with pytest.raises(OutputMismatch, match="belongs to another run"):
        OutputOwnership(Place(tmp_path).writer().output_folder, NAME, homes).claim()


def test_ranks_that_replace_the_owner_of_a_removed_run_at_one_moment_agree(tmp_path):
    """The second one does all of it before each effect of the first, or right after the first has
    read the record.
    """
    for number in count():
        claim = claim_in_place_of_a_removed_run(tmp_path / str(number))
        disk = Interrupting(number, claim)
        with disk_in_place(disk):
            claim()
        claim()
        if len(disk.happened) < number:
            break
    assert number > 8


def test_a_rank_that_read_the_owner_of_a_removed_run_before_another_replaced_it_agrees(
    tmp_path, monkeypatch
):
    claim = claim_in_place_of_a_removed_run(tmp_path)
    read = output_folder._LocalRecord.read

    def interrupted(record):
        found = read(record)
        monkeypatch.undo()
        claim()
        return found

    monkeypatch.setattr(output_folder._LocalRecord, "read", interrupted)
    claim(is_unused=False)  # the other rank has published since
    claim(is_unused=False)


def test_a_run_killed_while_it_replaces_the_owner_of_a_removed_run_goes_on(tmp_path):
    for number in count():
        folder = tmp_path / str(number)
        claim = claim_in_place_of_a_removed_run(folder)
        with crash_at(number, folder) as disk:
            claim()
        claim()
        if disk.crashed_at is None:
            break
    assert number > 8


@pytest.mark.slow
@pytest.mark.parametrize("owned", [True, False])
def test_of_random_pairs_of_jobs_with_kills_none_replaces_a_file_of_the_other_one(
    tmp_path, servers, monkeypatch, owned
):
    if not owned:
        monkeypatch.setattr(OutputOwnership, "claim", Mock())
    ended = kills = refusals = 0
    for seed in range(50):
        chance = random.Random(seed)
        folder = tmp_path / f"pair {seed}"
        folder.mkdir()
        place = chance.choice([Place, ManyFiles])(folder)
        before = {}
        for _ in range(8):
            name = chance.choice("ab")
            number = chance.choice([chance.randrange(150), 10**6])
            is_whole = False
            with crash_at(number, folder) as disk:
                try:
                    job(folder, name, servers["ab".index(name)], place).run(
                        documents(chance.choice([3, 5]))
                    )
                    is_whole = disk.crashed_at is None
                except (OutputMismatch, CheckpointMismatch):
                    refusals += 1
            kills += disk.crashed_at is not None
            now = place.files()
            letters = {path: b'"text":"a"' in content for path, content in now.items()}
            assert {path: letters[path] for path in before} == {
                path: b'"text":"a"' in content for path, content in before.items()
            }, (seed, name)
            if is_whole:
                ended += 1
                assert set(letters.values()) == {name == "a"}, (seed, name)
            before = now
    print(f"{ended} jobs ended, {kills} were killed, {refusals} starts were refused")
    assert min(ended, kills, refusals) > 20
