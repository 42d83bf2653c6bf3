"""A rank that is killed before and after every request to the hub ends with the same files, each of
them once.
"""

import gc
import threading
from collections import Counter
from functools import partial

import pytest
from datatrove.pipeline.writers import ParquetWriter
from huggingface_hub import get_session

from datatrove_ckpt.output import output_folder
from tests.crash.test_every_effect import answered
from tests.crashes import CrashingDisk, disk_in_place
from tests.hub.server import route
from tests.jobs import run_job

pytestmark = pytest.mark.usefixtures("code_described_once")

DOCUMENTS = 3
_SENDERS = [f"datatrove-ckpt {name}" for name in ("upload", "mirror", "hub")]
FILES = ["config/000_00000_00000.parquet", "config/000_00000_00001.parquet"]


class CrashingClient:
    """A client that may die before and after each request, and sends nothing when it is dead.

    Attributes:
        writes: kinds of requests that count as effects; None: all.
    """

    disk = None
    writes = None

    def __init__(self, send):
        self._send = send

    def send(self, client, request, **options):
        kind = route(request.method, request.url.path)[0]
        self._effect(f"before {kind}", kind)
        response = self._send(client, request, **options)
        self._effect(f"after {kind}", kind)
        return response

    def _effect(self, label, kind):
        if self.disk is not None:
            with self.disk._lock:
                self.disk.before(
                    "request" if self.writes is None or kind in self.writes else "look", (), label
                )

    def crash(self, number, folder, counted, attempt):
        """Returns the effect at which the attempt crashed; None if it ended before."""
        self.disk = CrashingDisk(number, folder, counted=counted)
        with disk_in_place(self.disk):
            attempt()
        # A dead process sends nothing more, but the threads of this one would.
        for thread in threading.enumerate():
            if thread.name in _SENDERS:
                thread.join(300)
        gc.collect()
        crashed = self.disk.crashed_at
        if crashed is not None:
            next(self.disk.survivors())
        self.disk = None
        return crashed


def crashing_client(monkeypatch):
    """In the place of huggingface_hub's."""
    library = type(get_session())  # httpx's or httpx2's, as huggingface_hub has it
    crashing = CrashingClient(library.send)
    monkeypatch.setattr(
        library, "send", lambda *arguments, **options: crashing.send(*arguments, **options)
    )
    return crashing


@pytest.fixture
def client(hub, monkeypatch):
    return crashing_client(monkeypatch)


@pytest.fixture(autouse=True)
def _quick(temporary, monkeypatch, policy):
    policy("HUB", "HUB_LOOK", first=0.01)
    monkeypatch.setattr(output_folder, "LAG_LOOKS", (0.0,))
    yield
    assert list(temporary.iterdir()) == []


def attempt(folder, server, seconds):
    writer = ParquetWriter("hf://datasets/org/data/config", "${rank}_${chunk_index}.parquet")
    run_job(folder, server, DOCUMENTS, output_writer=writer, hub_commit_seconds=seconds)


@pytest.mark.matrix(
    ("seconds", "lag", "each"),
    [(300.0, 0, 29), (300.0, 0, 1), (0.0, 0, 1), (300.0, 1, 1)],
    ids=["each 29th", "one commit", "several", "lag"],
)
def test_killed_at_every_request(hub, server, client, ram, seconds, lag, each):
    expected = None
    points = []
    for number in range(200):
        hub.create_repo("org/data")
        hub.lag_commits = lag
        server.asked.clear()
        folder = ram / f"job{number}"
        folder.mkdir()
        at = each * (number - 1) if expected is not None else 10**6
        crashed = client.crash(at, folder, ("request",), partial(attempt, folder, server, seconds))
        points += [crashed] if crashed is not None else []
        uploads = len(hub.repo("org/data").uploads)
        done, asked = answered(folder), Counter(server.asked)
        attempt(folder, server, seconds)
        if expected is None:
            expected = hub.files("org/data")
            assert list(expected) == FILES
            continue
        assert hub.files("org/data") == expected, crashed
        added = [path for commit in hub.commits("org/data") for path in commit.added]
        if not lag:
            assert sorted(added) == FILES, crashed
        assert len(hub.repo("org/data").uploads) == len(FILES) >= uploads, crashed
        assert not done & (Counter(server.asked) - asked), crashed
        assert len(server.asked) == DOCUMENTS
        if crashed is None:
            break
    assert len(points) >= 20 / each
    if each > 1:
        return
    for step in ("preupload", "lfs-batch", "lfs-upload", "lfs-verify", "commit", "tree"):
        assert f"before {step}" in points, step
        assert f"after {step}" in points, step
