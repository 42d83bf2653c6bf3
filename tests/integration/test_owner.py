"""Two jobs and one output folder, on each kind of storage: one is refused, and no byte of the other
one changes.
"""

import os
import random
import shutil
import socket
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.layout import HOME
from datatrove_ckpt.checkpoint.publish_intents import PublishIntents
from datatrove_ckpt.errors import CheckpointMismatch, OutputMismatch, StorageFailed
from datatrove_ckpt.output import output_folder
from datatrove_ckpt.output.output_folder import OutputOwnership, RankCommits, content_hash
from tests.crashes import WatchedDisk, crash_at, disk_in_place
from tests.jobs import documents, run_job
from tests.owners import (
    KINDS,
    NAME,
    SCENARIOS,
    UNOWNED,
    ManyFiles,
    Place,
    job,
    killed_before_its_commit,
    place,
    servers,
    start,
    unowned,
)

__all__ = ["place", "servers", "start", "unowned"]  # fixtures

ROWS = [
    pytest.param(kind, scenario, marks=[pytest.mark.slow] * (kind not in quick))
    for scenario, quick in SCENARIOS.items()
    for kind in KINDS
]


@pytest.mark.parametrize("place, scenario", ROWS, indirect=["place"])
def test_two_jobs(scenario, tmp_path, place, servers, start, monkeypatch, command):
    scenario(tmp_path, place, servers, start, monkeypatch, command)


@pytest.mark.parametrize("content", [b"", b"\0" * 99, b"[]", b'{"home": "x"}', None])
def test_a_run_whose_record_of_its_origin_is_damaged_says_what_restores_it(
    tmp_path, servers, content
):
    step = job(tmp_path, "a", servers[0], Place(tmp_path))
    step.run(documents(5))
    home = tmp_path / "a/checkpoints" / HOME
    record = home.read_bytes()
    home.unlink() if content is None else home.write_bytes(content)
    with pytest.raises(OutputMismatch, match=f"{home} is lost, copy ") as refused:
        step.run(documents(5))
    path = Path(str(refused.value).partition("is lost, copy ")[2].partition(" there, and run")[0])
    shutil.copy(path, home)
    step.run(documents(5))
    assert home.read_bytes() == record
    path.unlink()  # without the record beside the output, the run makes both anew
    home.write_bytes(b"")
    step.run(documents(5))
    assert home.read_bytes() == path.read_bytes() != record


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
    with pytest.raises(OutputMismatch, match="has files that this task has not published"):
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
