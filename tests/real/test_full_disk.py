"""Disks that are really full, or really read-only: the rank stops, says where and what to do, and
loses nothing.

A small tmpfs holds the checkpoints, the output, or both, and is filled so far that it is full at
another moment each time. Nothing but a file system of its own can turn read-only under a run: an
ext4 in a file does, when its kernel finds an error, and a tmpfs can be remounted while no file on
it is open for writing.

Needs root, Linux and loop devices. Where they are missing these tests fail; they are left out of
the default run.
"""

import gc
import io
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.checkpoint.open_checkpoint import StorageThread
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.common.threads import in_thread
from datatrove_ckpt.errors import OutputFailed, StorageFailed
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.run_folder.verify import verify
from datatrove_ckpt.testing import FakeServer, outputs
from tests.jobs import ask, config
from tests.mirrors import known_ordinals
from tests.rank_folders import place_at
from tests.yaml_jobs import write_rows

DOCUMENTS = 90
CHUNK = 20
IN_FLIGHT = 8
UNSAVED = 24  # the server gives no more answers than this that are not saved yet
PADDING = "x" * 4000

FREE = "Free some space and run again"
MAKE_WRITABLE = "Give this user the permission, or choose another folder"
# All that SQLite, and ext4 on a sync, let us say.
CHECK = "Check the disk and run again"


def command(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, (
        f"{' '.join(words)}: {done.stderr.strip()} (this test needs root on Linux)"
    )


@contextmanager
def mounted(folder, *how):
    folder.mkdir(parents=True, exist_ok=True)
    command("mount", *how, str(folder))
    try:
        yield folder
    finally:
        gc.collect()  # a traceback may hold a journal that was being read
        if subprocess.run(["umount", str(folder)], capture_output=True).returncode:
            links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
            mine = [
                str(target) for link in links if (target := link.readlink()).is_relative_to(folder)
            ]
            command("umount", "--lazy", str(folder))
            raise AssertionError(
                f"something has a file on {folder} open still; this process: {mine}"
            )


@contextmanager
def tmpfs(folder, kilobytes):
    with mounted(folder, "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs") as here:
        yield here


def resize(folder, kilobytes):
    command("mount", "-o", f"remount,size={kilobytes}k", str(folder))


# The job -----------------------------------------------------------------------------------------


class Gate:
    """Holds the server back while ``UNSAVED`` answers are on their way to the disk.

    How many answers arrive while a group of others is written depends on the disk, and on who else
    uses the machine. With the gate it does not, so what a failure may cost has a bound that needs
    no clock.
    """

    def __init__(self, monkeypatch):
        self._change = threading.Condition()
        self._given = self._written = self._saved = 0
        self._is_open = True
        work, put = StorageThread._work, RequestCache.put

        def put_and_count(cache, group):
            rows = list(group)
            put(cache, rows)
            self._written += len(rows)

        def work_and_tell(storage):
            # A group is written, and synced where sync_seconds is 0; or this raised.
            goes_on = work(storage)
            with self._change:
                self._saved = self._written
                self._change.notify_all()
            return goes_on

        monkeypatch.setattr(RequestCache, "put", put_and_count)
        monkeypatch.setattr(StorageThread, "_work", work_and_tell)

    def answer(self, payload, times):
        with self._change:
            self._change.wait_for(lambda: self._is_open or self._given - self._saved < UNSAVED)
            self._given += 1
        return f"answer to {payload['messages'][-1]['content']}"

    @contextmanager
    def closed(self):
        """One attempt of the runner."""
        with self._change:
            self._given = self._written = self._saved = 0
            self._is_open = False
        try:
            yield
        finally:
            with self._change:
                self._is_open = True
                self._change.notify_all()


class Job:
    """90 documents of 4 kB, answered with 4 kB each: about 800 kB of output, and journals and
    answers on the way.
    """

    def __init__(self, folder, server, gate, small=None, on_it=""):
        self.folder = folder
        self.server = server
        self.gate = gate
        self.small = small
        self.checkpoints = (small if "checkpoints" in on_it else folder) / "checkpoints"
        self.output = (small if "output" in on_it else folder) / "output"
        (folder / "input").mkdir(parents=True)
        rows = [
            {"id": f"id {number}", "text": f"{number} {PADDING}"} for number in range(DOCUMENTS)
        ]
        write_rows(folder / "input" / "0.jsonl", rows)

    def run(self, sync_seconds=1.0):
        step = InferenceRunner(
            ask,
            config(self.server, max_concurrent_generations=IN_FLIGHT),
            JsonlWriter(str(self.output), "${rank}_chunk_${chunk_index}.jsonl", compression=None),
            checkpoints_local_dir=str(self.checkpoints),
            records_per_chunk=CHUNK,
            sync_seconds=sync_seconds,
        )
        reader = JsonlReader(str(self.folder / "input"), add_file_path=False)
        with self.gate.closed(), redirect_stderr(io.StringIO()):  # datatrove's log of each failure
            LocalPipelineExecutor([reader, step], logging_dir=str(self.folder / "logs")).run()

    @property
    def is_marked_complete(self):
        return (self.folder / "logs" / "completions" / "00000").exists()

    def fails(self, *advice, sync_seconds=1.0):
        """One attempt. Returns whether a file was refused."""
        try:
            self.run(sync_seconds)
        except (StorageFailed, OutputFailed) as error:
            assert str(self.small) in str(error), f"no file on {self.small} is named: {error}"
            assert any(text in str(error) for text in advice), error
            assert not self.is_marked_complete
            return True
        assert self.is_marked_complete
        return False

    def answered(self):
        """The documents that have an answer on disk, by number: in commits, journals or the request
        cache.
        """
        with tempfile.TemporaryDirectory() as copy:  # SQLite cannot open its file on a full disk
            rank = Path(copy) / "00000"
            if not (self.checkpoints / "00000").exists():
                return set()
            shutil.copytree(self.checkpoints / "00000", rank)
            finished, cached = known_ordinals(rank)
        return {f"{number} {PADDING}" for number in finished | cached.keys()}

    def finishes(self, expected, failures):
        """The rerun ends well, and sends few requests again."""
        kept, before = self.answered(), self.server.asked.copy()
        self.run()
        assert not kept & (self.server.asked - before).keys(), "asked again for what is on disk"
        assert self.is_marked_complete
        assert outputs(self.output) == expected
        report = verify(place_at(self.checkpoints), full=True)
        assert not [*report.problems, *report.unfinished]
        assert len(self.server.asked) == DOCUMENTS
        again = self.server.asked.total() - DOCUMENTS
        assert again <= failures * (IN_FLIGHT + UNSAVED), f"{again} requests were sent again"


@pytest.fixture(scope="module")
def gate():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Gate(monkeypatch)


@pytest.fixture(scope="module")
def server(gate):
    with FakeServer(gate.answer, delay=lambda payload, times: 0.01) as running:
        yield running


@pytest.fixture(scope="module")
def expected(tmp_path_factory, server, gate):
    """The output of a run that nothing disturbs."""
    job = Job(tmp_path_factory.mktemp("undisturbed"), server, gate)
    job.run()
    found = outputs(job.output)
    assert len(found) == 5
    return found


# Full disks --------------------------------------------------------------------------------------

SIZES = {
    "checkpoints": (8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384),
    "output": (4, 8, 64, 160, 168, 176, 200, 400, 500, 700),
    "checkpoints and output": (
        12,
        20,
        40,
        80,
        120,
        200,
        280,
        300,
        340,
        420,
        500,
        580,
        660,
        740,
        820,
    ),
}
"""Sizes of the disk in kB, at most of which something does not fit."""
PLACES = [
    pytest.param(place, marks=pytest.mark.full if " and " not in place else ()) for place in SIZES
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("on_it", PLACES)
def test_a_full_disk_stops_the_rank_and_a_larger_one_finishes_it(
    tmp_path, server, gate, expected, on_it
):
    failed = 0
    for kilobytes in SIZES[on_it]:
        server.asked.clear()
        with tmpfs(tmp_path / f"{kilobytes}", kilobytes) as small:
            job = Job(tmp_path / f"job {kilobytes}", server, gate, small, on_it)
            if job.fails(FREE):
                assert job.fails(FREE), "what did not fit fits, though nothing was freed"
                failed += 2
                resize(small, 8192)  # recorded documents take up to half of it
            job.finishes(expected, 2)
    assert failed >= len(SIZES[on_it])


@contextmanager
def after(server, answers, act):
    """Does something once so many requests were sent, in another thread."""
    over = threading.Event()

    def wait():
        while server.asked.total() < answers and not over.is_set():
            time.sleep(0.0005)
        act()

    acting = in_thread(wait, "act")
    try:
        yield
    finally:
        over.set()
        acting.result()


# Read-only disks ---------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize("on_it", PLACES)
def test_a_file_system_that_turns_read_only_stops_the_rank(tmp_path, server, gate, expected, on_it):
    """With open files and all: ext4 does so when it finds itself damaged."""
    failed = 0
    moments = range(5, DOCUMENTS, 20)
    for moment in moments:
        server.asked.clear()
        image = tmp_path / f"{moment}.img"
        image.write_bytes(bytes(8 * 2**20))
        command("mkfs.ext4", "-q", str(image))
        with mounted(tmp_path / f"{moment}", "-o", "loop,errors=remount-ro", str(image)) as small:
            job = Job(tmp_path / f"job {moment}", server, gate, small, on_it)
            with after(server, moment, lambda small=small: damage(small)):
                failed += job.fails(MAKE_WRITABLE, CHECK, sync_seconds=0)
        # 1 is "errors were corrected"
        # As long as another mount namespace holds the image's file system, it stays read-only.
        repaired = shutil.copy(image, image.with_suffix(".repaired"))
        assert subprocess.run(["e2fsck", "-fy", str(repaired)], capture_output=True).returncode in (
            0,
            1,
        )
        with mounted(small, "-o", "loop", str(repaired)):
            job.finishes(expected, 1)
    assert failed > len(moments) // 2


def damage(folder):
    """Tells the kernel that this ext4 has an error."""
    device = subprocess.run(
        ["findmnt", "-n", "-o", "SOURCE", str(folder)], capture_output=True, text=True, check=True
    ).stdout.strip()
    (Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error").write_text("1")
