"""Checkpoints that survive the loss of a node: mirroring, restoring, damaged objects, two nodes at
once.
"""

import errno
import os
import pickle
import re
import shutil
import tempfile
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import orjson
import pytest

from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum, verified_body
from datatrove_ckpt.checkpoint.layout import OWNER
from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, RankFiles
from datatrove_ckpt.common.object_store import ObjectStore
from datatrove_ckpt.common.redaction import MIRROR_KEY_VARIABLE, Secret
from datatrove_ckpt.common.threads import in_thread
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    CkptError,
    ConfigError,
    Fenced,
    OutputMismatch,
    Preempted,
    StorageFailed,
)
from datatrove_ckpt.mirror import mirror
from datatrove_ckpt.mirror.manifests import FilePart, ManifestSigner, MirrorDamaged, VersionStore
from datatrove_ckpt.mirror.restore import restore
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.run_folder.preflight import check_before_run
from datatrove_ckpt.run_folder.run_plan import RunPlan
from datatrove_ckpt.run_folder.verify import verify
from datatrove_ckpt.testing import FakeServer
from tests import golden
from tests.jobs import ids, rejects, runner
from tests.mirrors import ONE_BY_ONE, PASSES, Job, answered, ask_twice, read_rows, up_to
from tests.patience import until
from tests.rank_folders import place_at
from tests.yaml_jobs import write_input


@pytest.fixture
def job(ram):
    (ram / "job").mkdir()
    return Job(ram / "job")


@pytest.fixture(scope="module")
def expected():
    """The output of a run that nothing interrupted."""
    with tempfile.TemporaryDirectory() as folder, FakeServer() as server:
        job = Job(Path(folder))
        job.run(server, checkpoints_remote_dir=None)
        return job.output


PUT = ObjectStore.put


def refusing(error, part=""):
    """Puts to a remote that refuses names with this part."""

    def put(store, name, content):
        if part in name:
            raise error
        PUT(store, name, content)

    return put


UNREACHABLE = Mock(side_effect=ConnectionError("no route to host"))


@pytest.fixture
def mirrors(monkeypatch):
    """The mirrors that were started."""
    found = []
    start = mirror.RemoteMirror.start

    def start_and_note(self, source):
        found.append(self)
        return start(self, source)

    monkeypatch.setattr(mirror.RemoteMirror, "start", start_and_note)
    return found


def manifests(job):
    return sorted((job.folder / "remote/00000").glob("generation-*"))


def objects_of(manifest):
    return set(re.findall(r"[0-9a-f]{16}-\d{6}", manifest.read_text()))


def three_versions(job, monkeypatch):
    """Makes a mirror of three different states of one run.

    Returns what each is restored to, oldest first.
    """

    with monkeypatch.context() as watched:
        PASSES.watch(watched)
        job.run_until("text 5 again", PASSES.one, mirror_seconds=0)
    names = manifests(job)
    contents = [name.read_bytes() for name in names]
    states = []
    for number, _ in enumerate(names):
        for newer in names[number + 1 :]:
            newer.unlink()
        states.append(restored(job))
        for name, content in zip(names, contents, strict=True):
            name.write_bytes(content)
    assert states[2]["answered"] == up_to("text 5 again")
    assert states[0] != states[1] != states[2]
    return states


def state(rank):
    """Everything a restored folder must have in common with the lost one."""
    files = {path.name: path.read_bytes() for path in rank.glob("*.jsonl") if path.stat().st_size}
    rows = read_rows(rank / "replay.sqlite3") if (rank / "replay.sqlite3").exists() else None
    return {**files, "rows": rows, "answered": answered(rank)}


# restoring ---------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_a_node_that_is_lost_costs_what_came_after_the_last_version(
    job, expected, log, store_kind, server
):
    job.remote = store_kind.url(job.folder)
    job.run_until("text 4 again")
    job.lose_the_node()
    job.run(server)
    assert not up_to("text 4 again") & server.asked
    assert server.asked.total() == 3
    assert job.output == expected
    assert any("Restored" in line and "from version" in line for line in log)


def test_dead_letters_and_their_retries_outlive_the_node_too(job):
    bad = ["text 1", "text 4"]
    with FakeServer(status=rejects(bad)) as server:
        job.run(server, skip_bad_requests=True)
        job.lose_the_node()
        bad.remove("text 1")
        job.run(server, skip_bad_requests=True, retry_dead_letters=True)
        job.lose_the_node()
        bad.clear()
        server.asked.clear()
        job.run(server, skip_bad_requests=True, retry_dead_letters=True)
        assert set(server.asked) == {"text 4", "text 4 again"}, "only what failed twice"
    found = b"".join(content for _, content in sorted(job.output.items()))
    assert all(found.count(b'"id %d"' % number) == 1 for number in range(6))


def test_without_a_node_and_without_a_mirror_to_read_the_run_is_refused(
    job, monkeypatch, log, server
):
    job.run_until("text 4 again")
    monkeypatch.setattr(ObjectStore, "names", UNREACHABLE)
    job.run(server)
    assert any("Could not read the mirror" in line and "Continuing with" in line for line in log)
    job.lose_the_node()
    with pytest.raises(
        StorageFailed, match=r"Could not read the mirror .*no route to host.*Correct that"
    ):
        job.run(server)


# several ranks of one folder ---------------------------------------------------------------------


def executor(folder, server, **changes):
    """A task for each of three files. Its tasks are run one by one."""
    step = runner(folder, server, ask_twice, config=ONE_BY_ONE, **changes)
    return LocalPipelineExecutor(
        [JsonlReader(str(folder / "input")), step], 3, 1, logging_dir=str(folder / "logs")
    )


@pytest.mark.slow
def test_what_was_finished_before_there_was_a_mirror_outlives_the_node(tmp_path):
    """Also if the first upload of a task was killed after its empty first version."""
    texts = [f"text {number}" for number in range(15)]
    write_input(tmp_path, texts[:5], texts[5:10], texts[10:])
    mirrored = {"checkpoints_remote_dir": str(tmp_path / "mirror"), "mirror_seconds": 1000}
    rejected = ["text 13"]
    with FakeServer(status=rejects(rejected, 401)) as server:
        node = partial(executor, tmp_path, server, **mirrored)
        for rank in (0, 1):
            executor(tmp_path, server)._run_for_rank(rank)
        check_before_run(RunPlan(node()))
        first, *others = sorted((tmp_path / "mirror/00001").glob("generation-*"))
        for path in others:
            path.unlink()
        assert first.name.startswith("generation-00000001-")
        check_before_run(RunPlan(node()))
        asked = server.asked.copy()
        with suppress(CkptError):
            node()._run_for_rank(2)
        shutil.rmtree(tmp_path / "checkpoints")
        rejected.clear()
        node().run()
    assert {question: server.asked[question] for question in asked} == asked
    assert sorted(ids(tmp_path)) == sorted(f"id {number}" for number in range(15))
    assert [*verify(place_at(tmp_path / "checkpoints"), full=True).problems] == []


# damage ------------------------------------------------------------------------------------------


def flips(path, places):
    """The content with one byte changed, at so many places or all, and at both ends; cut at several
    places; longer.
    """
    content = path.read_bytes()
    step = max(1, len(content) // places) if places else 1
    for offset in sorted({*range(0, len(content), step), len(content) - 1}):
        yield content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :]
    for size in (0, 1, len(content) // 2, len(content) - 1):
        yield content[:size]
    yield content + b"\n"


def restored_folder(job):
    job.lose_the_node()
    restore(f"{job.remote}/00000", job.rank)
    return job.rank


def restored(job):
    return state(restored_folder(job))


@pytest.fixture
def stopped(job):
    job.run_until("text 4 again")
    return job


def assert_restored(stopped):
    assert answered(restored_folder(stopped)) == up_to("text 4 again")


@pytest.mark.timeout(1200)
@pytest.mark.matrix(
    "places, every", [(2, 3), (40, 1), pytest.param(None, 1, marks=pytest.mark.full)]
)
def test_no_damage_to_any_one_object_costs_more_than_a_version(
    job, log, monkeypatch, places, every
):
    states = three_versions(job, monkeypatch)
    assert restored(job) == states[2]
    newest = manifests(job)[-1]
    needed = objects_of(newest)
    assert len(needed) >= 3  # commits, a journal, answers
    objects = [path for path in (job.folder / "remote/00000").rglob("*-*") if path.name in needed]
    assert len(objects) == 2 * len(needed)
    for number, path in enumerate((*objects, newest)):
        content = path.read_bytes()
        for damaged in [*flips(path, places), None][number % every :: every]:
            log.clear()
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            assert restored(job) == (states[2] if path != newest else states[1])
            if path.parent.name == "objects":
                assert log.said(f"{path.name} is missing or damaged. Its copy is read")
            elif path == newest and damaged is not None:
                assert log.said("because newer ones are damaged")
            path.write_bytes(content)


def spoil(job, manifest, older):
    """Damages both copies of the objects that the version has and the older one has not."""
    own = objects_of(manifest) - objects_of(older)
    assert own
    for name in own:
        for folder in ("objects", "copies"):
            path = job.folder / "remote/00000" / folder / name
            path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_a_damaged_version_falls_back_to_the_one_before_and_says_so(
    job,
    expected,
    log,
    monkeypatch,
    server,
):
    states = three_versions(job, monkeypatch)
    oldest, middle, newest = manifests(job)
    spoil(job, newest, middle)
    assert restored(job) == states[1]
    (line,) = log.said("are damaged")
    assert newest.name in line
    assert middle.name not in line
    spoil(job, middle, oldest)
    assert restored(job) == states[0]
    (line,) = [line for line in log if "are damaged" in line and middle.name in line]
    assert newest.name in line
    job.lose_the_node()
    job.run(server)
    assert not states[0]["answered"] & server.asked
    assert job.output == expected


def test_when_no_version_is_complete_the_run_is_refused_with_one_clear_message(
    job, monkeypatch, server
):
    three_versions(job, monkeypatch)
    for manifest in manifests(job):
        manifest.write_bytes(manifest.read_bytes()[:-2])
    job.lose_the_node()
    with pytest.raises(CheckpointCorrupt) as refused:
        job.run(server)
    assert not server.asked
    assert str(refused.value).count("its manifest is damaged") == 3
    assert f"remove {job.remote}/00000 and the task's output files, to" in str(refused.value)
    assert not job.rank.exists()
    for manifest in manifests(job):
        manifest.unlink()
    with pytest.raises(CheckpointCorrupt, match="There are objects, but no version"):
        job.run(server)


# two nodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, 1000])
def test_of_two_nodes_at_once_the_one_that_started_first_stops(job, expected, seconds):
    """Before it publishes anything over what the other one has committed, however seldom it
    uploads.
    """
    with FakeServer(hold_after=5) as server:
        first = in_thread(partial(job.run, server, mirror_seconds=seconds), "first node")
        until(lambda: server.asked.total() == 6)
        until(lambda: list((job.folder / "remote/00000").glob("generation*")))
        with FakeServer() as another_server:
            job.on_another_node().run(another_server)
        committed = {path: path.stat() for path in (job.folder / "output").glob("0*")}
        server.release()
        with pytest.raises(
            Fenced, match=r"taken this task over.* This process writes nothing more"
        ):
            first.result(300)
    assert {path: path.stat() for path in (job.folder / "output").glob("0*")} == committed
    assert {path.name: path.read_bytes() for path in committed} == expected


def test_a_folder_and_a_mirror_that_were_started_separately_are_refused(job, server):
    job.run_until("text 2", checkpoints_remote_dir=None)
    other = job.on_another_node()
    with pytest.raises(OutputMismatch, match="belongs to another run"):
        other.run(server)
    for record in job.folder.glob(f".output.{OWNER}*"):
        record.unlink()
    other.run(server)
    with pytest.raises(CheckpointMismatch, match=r"started separately\. Remove one"):
        job.run(server)


def test_what_another_node_published_before_its_first_version_belongs_to_the_run(
    job, expected, monkeypatch, server
):
    job.run_until("text 4")
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "put", refusing(ConnectionError("503"), "generation-"))
        job.on_another_node().run(server)
    assert job.output == expected
    server.asked.clear()
    job.run(server)
    assert not up_to("text 4") & server.asked
    assert job.output == expected


def test_a_node_that_took_a_task_over_owns_its_mirror_before_it_publishes(
    job, expected, monkeypatch, server
):
    """No process can own the remote until one publishes, or waits before it does."""
    job.run_until("text 4")
    waits, was_published = threading.Event(), []
    wait = mirror.RemoteMirror._wait_for

    def noted(mirrored, *arguments):
        waits.set()
        return wait(mirrored, *arguments)

    def is_published():
        return len(job.output) > 1

    def late(store, name, content):
        if name.startswith("claim-"):
            until(lambda: waits.is_set() or is_published())
            was_published.append(is_published())
        PUT(store, name, content)

    monkeypatch.setattr(mirror.RemoteMirror, "_wait_for", noted)
    monkeypatch.setattr(ObjectStore, "put", late)
    job.on_another_node().run(server)
    assert not any(was_published)
    assert job.output == expected


# mirroring ---------------------------------------------------------------------------------------


def test_a_first_version_that_failed_once_is_written_before_any_object(
    job, expected, monkeypatch, log, server
):
    """Objects without any version would be taken for damage."""
    refused = []

    def put(store, name, content):
        """Refuses the first version once, and the second one always."""
        if name.startswith("generation") and (not refused or "-00000001-" not in name):
            refused.append(name)
            raise ConnectionError("503")
        PUT(store, name, content)

    with monkeypatch.context() as failing:
        failing.setattr(ObjectStore, "put", put)
        job.run(server, mirror_seconds=0.01)
    assert log.said("ConnectionError: 503")
    assert list((job.folder / "remote/00000/objects").iterdir())
    job.lose_the_node()
    shutil.rmtree(job.folder / "output")
    job.run(server)
    assert job.output == expected


def test_output_is_published_while_the_mirror_does_not_say_whose_it_is(
    job, expected, monkeypatch, log
):
    monkeypatch.setattr(mirror, "_OWNER_VALID_SECONDS", 0.001)
    with FakeServer(hold_after=7) as server:
        running = in_thread(partial(job.run, server), "run")
        until(
            lambda: (
                server.asked.total() == 8
                and (job.folder / "output/00000_chunk_00000.jsonl").exists()
            )
        )
        # In this order: no slow look of before may count as one without an answer.
        monkeypatch.setattr(ObjectStore, "names", UNREACHABLE)
        monkeypatch.setattr(mirror, "_OWNER_WAIT_SECONDS", 0.2)
        server.release()
        running.result(300)
    assert job.output == expected
    assert sum("does not show who owns this task" in line for line in log) == 1


def test_a_bucket_that_does_not_exist_ends_the_run_instead_of_mirroring_nothing_to_its_end(
    job, monkeypatch
):
    missing = FileNotFoundError("The specified bucket does not exist")  # as fsspec reports it
    monkeypatch.setattr(ObjectStore, "put", refusing(missing))
    with FakeServer(hold_after=3) as server:  # it ends although the run could go on for ever
        with pytest.raises(
            ConfigError,
            match=r"checkpoints_remote_dir: nothing can be written to .*bucket does not ex",
        ):
            job.run(server)
        assert server.asked.total() < 12


def test_no_output_appears_before_the_first_version_and_a_full_folder_keeps_no_part_of_one(
    job,
    expected,
    server,
    monkeypatch,
    policy,
    log,
):
    """Without one, the next node would take the output for another job's."""

    write = ObjectStore._write

    def full(store, path, content):
        write(store, path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device", path)

    policy("STORAGE", patience=0.2)
    server._delay = lambda payload, times: until(lambda: "No space left" in "".join(log)) or 0.0
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "_write", full)
        patch.setattr(mirror, "STOP_SECONDS", 0.1)
        with pytest.raises(
            StorageFailed,
            match=r"Nothing could be uploaded to the mirror .*No space left on device",
        ):
            job.run(server, 3, mirror_seconds=0.01)  # one chunk: the stop cuts no request off
    server._delay = lambda payload, times: 0.0
    assert not [path for path in Path(job.remote).rglob("*") if path.is_file()]
    assert not list((job.folder / "output").glob("0*"))
    job.run(server)
    assert server.asked.total() == 12
    assert job.output == expected


def test_an_object_that_may_not_be_replaced_stays(tmp_path, monkeypatch):
    store = ObjectStore(str(tmp_path))
    store.put("job.json", b"whole")
    monkeypatch.setattr(
        ObjectStore, "_write", Mock(side_effect=PermissionError("Permission denied"))
    )
    with pytest.raises(PermissionError):
        store.put("job.json", b"new")
    assert store.read("job.json", 9) == b"whole"


def test_a_mirror_that_was_given_up_takes_no_ownership_any_more(job, monkeypatch, mirrors, policy):
    """It would fence the rank's next process, which may have started."""
    monkeypatch.setattr(mirror, "STOP_SECONDS", 0.1)
    asked, put = threading.Event(), []
    take = OpenCheckpoint.snapshot

    def late(checkpoint, since):
        snapshot = take(checkpoint, since)
        asked.set()
        until(lambda: mirrors[0]._given_up)
        return snapshot

    monkeypatch.setattr(OpenCheckpoint, "snapshot", late)
    monkeypatch.setattr(ObjectStore, "put", lambda self, name, content: put.append(name))
    policy("STORAGE", patience=0.2)
    with (
        FakeServer(delay=lambda payload, times: float(not asked.wait(300))) as server,
        pytest.raises(StorageFailed, match=r"Nothing could be uploaded .*\(no answer\)"),
    ):
        job.run(server)
    assert asked.is_set()
    mirrors[0]._thread.join(300)
    assert not mirrors[0]._thread.is_alive()
    assert put == []


def test_the_files_of_a_rank_are_closed_once_its_mirror_reads_none_of_them(
    job, monkeypatch, mirrors, server, log
):
    """SQLite ends a process in which one thread reads what another one closes."""
    order = []
    take, close = RankFiles.snapshot, RankFiles.close

    def slow(rank, since):
        snapshot = take(rank, since)
        if mirrors[0]._stopping:
            until(lambda: "The last upload to the mirror" in "".join(log))
            order.append("read")
        return snapshot

    def watched(rank, completed):
        order.append("closed")
        close(rank, completed)

    monkeypatch.setattr(mirror, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(RankFiles, "snapshot", slow)
    monkeypatch.setattr(RankFiles, "close", watched)
    job.run(server)
    assert order == ["read", "closed"]


def test_a_rank_that_drains_uploads_at_once_and_waits_less_for_the_last_upload(
    job, monkeypatch, mirrors, log
):
    job.rank.mkdir(parents=True)
    hangs = threading.Event()

    def hang(store, name, content):
        hangs.wait(1200)
        raise ConnectionError("after a long time")

    monkeypatch.setattr(mirror, "DRAIN_SECONDS", 0.1)
    mirrored = []
    upload = mirror.RemoteMirror._upload
    monkeypatch.setattr(mirror.RemoteMirror, "_upload", lambda self: mirrored.append(upload(self)))
    with FakeServer(hold_after=3) as server:
        running = in_thread(partial(job.run, server), "run")
        until(lambda: len(mirrored) == 1 and server.asked.total() == 4)
        mirrors[0].shutdown.request("SIGTERM")
        until(lambda: len(mirrored) == 2)
        restore(f"{job.remote}/00000", job.folder / "scratch")
        assert answered(job.folder / "scratch") == up_to("text 1 again")
        monkeypatch.setattr(ObjectStore, "put", hang)
        server.release()
        with suppress(Preempted):
            running.result(300)
    hangs.set()
    assert log.said("did not end within 0.1 s")


# what a mirror may say, and who may have written it ----------------------------------------------

KEY = "0123456789abcdef-secret"


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv(MIRROR_KEY_VARIABLE, KEY)
    return KEY


def rewrite(path, change):
    """Changes a manifest as somebody does who knows the format: its checksum is right."""
    content = orjson.loads(verified_body(path.read_bytes()) or b"")
    change(content)
    path.write_bytes(add_checksum(orjson.dumps(content)))


def a_part(content):
    return next(iter(content["files"].values()))[0]


def test_a_mirror_writes_only_files_of_a_checkpoint(stopped, ram):
    (ram / "secret").write_text("secret")
    *older, newest = manifests(stopped)
    for path in older:
        path.unlink()
    content = newest.read_bytes()
    for name in golden.sections("hostile_mirrors"):
        newest.write_bytes(content)
        rewrite(newest, lambda content, name=name: eval(name))
        stopped.lose_the_node()
        before = set(ram.rglob("*"))
        with pytest.raises(CheckpointCorrupt, match="its manifest is damaged") as refused:
            restore(f"{stopped.remote}/00000", stopped.rank)
        assert newest.name in str(refused.value)
        assert "\x1b" not in str(refused.value)
        written = {
            path
            for path in set(ram.rglob("*")) - before
            if not path.is_relative_to(stopped.checkpoints)
        }
        assert not written, name
        assert not stopped.rank.exists(), name
    newest.write_bytes(content)
    assert_restored(stopped)


# signatures --------------------------------------------------------------------------------------


def refused_restore(job, message, error=CheckpointCorrupt):
    with pytest.raises(error, match=message):
        restored_folder(job)


def test_a_sealed_mirror_restores_with_its_key_only(key, stopped, monkeypatch):
    assert all(b'"hmac":"' in path.read_bytes() for path in manifests(stopped))
    assert_restored(stopped)
    monkeypatch.setenv(MIRROR_KEY_VARIABLE, "another key of the user")
    refused_restore(stopped, f"{manifests(stopped)[-1].name} is not signed with the key in")
    monkeypatch.delenv(MIRROR_KEY_VARIABLE)
    refused_restore(stopped, f"{MIRROR_KEY_VARIABLE} is not set, but .* is signed", ConfigError)
    assert not stopped.rank.exists()


def test_a_node_without_the_key_does_not_continue_a_sealed_mirror(
    key, stopped, monkeypatch, server
):
    """Its own folder is complete, but nobody with the key could restore what it would upload."""
    monkeypatch.delenv(MIRROR_KEY_VARIABLE)
    with pytest.raises(ConfigError, match="Export it where the tasks run"):
        stopped.run(server)
    assert not server.asked


def test_a_seal_holds_for_one_content_one_version_and_one_rank(key, stopped):
    newest = manifests(stopped)[-1]
    content = newest.read_bytes()
    wrong = "is not signed with the key in .*, or not for this task"

    rewrite(newest, lambda content: content["run"].update(model="evil"))
    refused_restore(stopped, wrong)
    newest.write_bytes(content)

    _, number, nonce = newest.name.split("-")
    renamed = newest.with_name(f"generation-{int(number) + 1:08d}-{nonce}")
    newest.rename(renamed)
    refused_restore(stopped, f"{renamed.name} {wrong}")
    renamed.rename(newest)

    shutil.copytree(stopped.folder / "remote/00000", stopped.folder / "remote/00001")
    with pytest.raises(CheckpointCorrupt, match=f"00001/{newest.name} {wrong}"):
        restore(f"{stopped.remote}/00001", stopped.checkpoints / "00001")

    shutil.copytree(stopped.folder / "remote", stopped.folder / "moved")
    restore(f"{stopped.folder}/moved/00000", stopped.rank)  # a mirror may be moved as a whole
    assert answered(stopped.rank) == up_to("text 4 again")


def test_a_retry_has_a_place_of_its_own(key):
    body = b'{"a":1}'
    sealed = ManifestSigner("s3://bucket/run/retry-00001/00000").add("name", body)
    ManifestSigner("/mnt/elsewhere/retry-00001/00000").check("name", sealed)
    for url in ("s3://bucket/run/00000", "s3://bucket/run/retry-00002/00000"):
        with pytest.raises(CheckpointCorrupt, match="or not for this task"):
            ManifestSigner(url).check("name", sealed)


def test_the_objects_of_a_sealed_version_have_a_hash_that_nobody_can_forge(key, stopped):
    store = VersionStore(f"{stopped.remote}/00000")
    parts = list(store.read_manifest(store.all_versions()[-1]).parts())
    assert parts, "the version has objects"
    assert all(len(part.sha256) == 64 for part in parts)
    # As after a collision of xxh128.
    forged = FilePart(parts[0].name, parts[0].size, parts[0].xxh128, "0" * 64)
    with pytest.raises(MirrorDamaged, match="is missing or damaged"):
        store.read_object(forged)


def test_a_mirror_from_before_the_key_is_restored_without_it(job, monkeypatch):
    job.run_until("text 2")
    unsealed = manifests(job)[-1]
    monkeypatch.setenv(MIRROR_KEY_VARIABLE, KEY)
    refused_restore(job, f"{unsealed.name} is not signed, although .* start once without it")
    monkeypatch.delenv(MIRROR_KEY_VARIABLE)
    restored_folder(job)
    monkeypatch.setenv(MIRROR_KEY_VARIABLE, KEY)
    job.run_until("text 4 again")
    assert_restored(job)
    # Somebody adds a version.
    forged = manifests(job)[-1].with_name("generation-00009999-00000000000000ff.json")
    forged.write_bytes(manifests(job)[-1].read_bytes())
    rewrite(forged, lambda content: content.pop("hmac"))
    refused_restore(job, f"{forged.name} is not signed")
    forged.unlink()
    assert_restored(job)


@pytest.mark.parametrize("short", ["", "0123456789"])
def test_a_short_key_is_refused(job, monkeypatch, server, short):
    monkeypatch.setenv(MIRROR_KEY_VARIABLE, short)
    with pytest.raises(ConfigError, match="a key has at least 16 characters") as refused:
        job.run(server)
    assert not short or short not in str(refused.value)


def test_the_key_is_in_no_file_no_log_no_pickle_and_no_server(key, stopped, log, ram, server):
    assert not [
        path for path in ram.rglob("*") if path.is_file() and key.encode() in path.read_bytes()
    ]
    assert not log.said(key)
    made = runner(stopped.folder, server, checkpoints_remote_dir=stopped.remote)
    assert key.encode() not in pickle.dumps(made.config)
    versions = VersionStore(f"{stopped.remote}/00000")
    assert key not in repr(vars(versions)) + repr(vars(versions._signer))
    config = InferenceConfig("dummy", "m")
    assert key not in config.engine.launch(config, 1, Secret("")).environment(os.environ).values()
