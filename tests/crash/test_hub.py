"""A rank that is killed before and after every request to the hub ends with the same files, each of
them once.
"""

from collections import Counter
from functools import partial

import pytest
from datatrove.pipeline.writers import ParquetWriter

from datatrove_ckpt.output import output_folder
from tests.crashes import answered
from tests.hub.crashes import crashing_client
from tests.jobs import run_job

pytestmark = pytest.mark.usefixtures("code_described_once")

DOCUMENTS = 3
FILES = ["config/000_00000_00000.parquet", "config/000_00000_00001.parquet"]


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
    [
        (300.0, 0, 29),
        (300.0, 0, 1),
        (0.0, 0, 3),
        (300.0, 1, 3),
        pytest.param(0.0, 0, 1, marks=pytest.mark.full),
        pytest.param(300.0, 1, 1, marks=pytest.mark.full),
    ],
    ids=["each 29th", "one commit", "several, each third", "lag, each third", "several", "lag"],
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
