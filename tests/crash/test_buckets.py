"""A job with input, output, markers and mirror in a bucket, killed at every effect, ends with the
same bytes there.
"""

import shutil
import tempfile
from collections import Counter
from functools import partial

import pytest
from datatrove.io import DataFolder
from datatrove.pipeline.writers import JsonlWriter
from huggingface_hub import HfFileSystem
from loguru import logger

from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.checkpoint import open_checkpoint
from datatrove_ckpt.executors import local
from datatrove_ckpt.output import output_folder
from datatrove_ckpt.readers import JsonlReader
from tests.crashes import EFFECTS
from tests.hub.crashes import crashing_client
from tests.jobs import runner
from tests.mirrors import ONE_BY_ONE, PASSES, answered, ask_between_passes, in_newest_version

pytestmark = [
    pytest.mark.usefixtures("code_described_once"),
    # Of files left open.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

BUCKET = "hf://buckets/org/job"
WRITES = ("batch", "xet-upload")
PLACE = "org/job"


@pytest.fixture
def client(hub, monkeypatch):
    crashing = crashing_client(monkeypatch)
    crashing.writes = WRITES
    return crashing


@pytest.fixture(autouse=True)
def _one_after_the_other(ram, monkeypatch, policy):
    monkeypatch.setattr(tempfile, "tempdir", str(ram))
    monkeypatch.setattr(open_checkpoint, "MAX_GROUP", 1)
    monkeypatch.setattr(output_folder, "LAG_LOOKS", (0.0, 0.01, 0.01, 0.01, 0.01))
    monkeypatch.setattr(local, "_MARKER_DELAYS", (0.0, 0.01, 0.01, 0.01, 0.01))
    policy("HUB", "HUB_LOOK", "READING", first=0.01)
    PASSES.watch(monkeypatch)


def attempt(folder, server):
    """A process of its own: it has seen no listing yet."""
    HfFileSystem.clear_instance_cache()
    DataFolder.clear_instance_cache()
    name = "${rank}_${chunk_index}.jsonl"
    writer = JsonlWriter(f"{BUCKET}/output", name, compression=None)
    mirror = {"checkpoints_remote_dir": f"{BUCKET}/mirror", "mirror_seconds": 0}
    step = runner(
        folder, server, ask_between_passes, config=ONE_BY_ONE, output_writer=writer, **mirror
    )
    job = LocalPipelineExecutor(
        [JsonlReader(f"{BUCKET}/input"), step], logging_dir=f"{BUCKET}/logs"
    )
    try:
        job.run()
    finally:
        logger.remove()


def put_input(hub, documents):
    hub.create_repo(PLACE, kind="bucket")
    rows = [f'{{"id": "id {n}", "text": "text {n}"}}\n' for n in range(documents)]
    hub.put(PLACE, {"input/0.jsonl": "".join(rows).encode()}, kind="bucket")
    for number in range(3):  # which has been there for a while
        hub.put(PLACE, {f"other/{number}": b""}, kind="bucket")


def output(hub):
    return {
        n: c
        for n, c in hub.files(PLACE, kind="bucket").items()
        if n.startswith(("output/", "logs/completions"))
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "documents, lost, counted, lag, every",
    [
        pytest.param(1, True, ("request",), 0, 17, id="node lost, each 17th"),
        pytest.param(3, True, ("request",), 3, 23, id="node lost, lists lag, each 23rd"),
        pytest.param(3, False, ("request", *EFFECTS), 0, 29, id="node kept, each 29th"),
        pytest.param(3, True, ("request",), 0, 1, id="node lost", marks=pytest.mark.full),
        pytest.param(
            3, True, ("request",), 3, 1, id="node lost, lists lag", marks=pytest.mark.full
        ),
        pytest.param(3, False, ("request", *EFFECTS), 0, 1, id="node kept", marks=pytest.mark.full),
    ],
)
def test_killed_at_every_effect(
    hub,
    server,
    client,
    ram,
    documents,
    lost,
    counted,
    lag,
    every,
):
    folder = ram / "job"
    put_input(hub, documents)
    folder.mkdir()
    attempt(folder, server)
    expected, points = output(hub), Counter[str]()
    assert len(expected) == (documents + 1) // 2 + 1
    # The first four effects are one of each kind, whatever the mirror does meanwhile.
    for number in (*range(4), *range(4, 2000, every)):
        put_input(hub, documents)
        hub.lag_commits = lag
        shutil.rmtree(folder)
        folder.mkdir()
        server.asked.clear()
        crashed = client.crash(number, folder, counted, partial(attempt, folder, server))
        before = server.asked.copy()
        known = answered(folder / "checkpoints" / "00000")
        if lost:
            HfFileSystem.clear_instance_cache()
            known = in_newest_version(f"{BUCKET}/mirror", folder.with_name("scratch"))
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        assert "logs/completions/00000" not in output(hub) or output(hub) == expected, crashed
        attempt(folder, server)
        assert output(hub) == expected, crashed
        assert not known & (server.asked - before), crashed
        if crashed is None:
            break
        points[crashed] += 1
    print(f"{points.total()} crash points; {points.most_common(6)}")
    for step in ("before batch", "after batch", "before xet-upload", "after xet-upload"):
        assert points[step] > (10 if every == 1 else 0), points
    assert points.total() * every > 100, points
