"""The keys of every file that a run leaves, or has while it runs: tests/data/contracts/files.json.

Versions read each other's files. Who changes a key or a type asks: can the releases before this one
misread it? If so, raise FORMAT in ``checkpoint/identity.py``, and read the old form, too. Then

    DATATROVE_CKPT_WRITE_GOLDEN=1 python -m pytest -n 0 tests/integration/test_files_on_disk.py
"""

import datetime
import decimal
import json
import random

import numpy as np
import orjson
import pytest
from datatrove.data import Document, Media, MediaType

from datatrove_ckpt.checkpoint.history import ProgressRecord
from datatrove_ckpt.checkpoint.identity import FORMAT
from datatrove_ckpt.claims import claims
from datatrove_ckpt.errors import ServerRefused
from datatrove_ckpt.executors.local import LocalPipelineExecutor
from datatrove_ckpt.generation import provider_passes
from datatrove_ckpt.output.document_codec import encode
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer
from tests.disk_shapes import shapes_of, shapes_of_all_writes
from tests.golden import DATA, IS_WRITTEN
from tests.jobs import chat, documents, runner
from tests.kept import content_of
from tests.make_release import BAD, RELEASES, STOP, is_about, run, write_input
from tests.provider import FakeProvider
from tests.releases import NEWEST
from tests.yaml_jobs import write_input as write_texts

pytestmark = pytest.mark.xdist_group("files on disk")
FILES = DATA / "contracts/files.json"
RAISE = (
    "Files on disk have other keys or types. If a release before this one could misread them, raise "
    "FORMAT in datatrove_ckpt/checkpoint/identity.py, and read the old form, too. Then write "
    "tests/data/contracts/files.json anew: see this file."
)


def with_the_job_of_a_release(folder):
    """Task 0 retries its dead letter. Task 1 has a mirror; it stops in the middle, and goes on."""
    write_input(folder / "input")
    stops = [STOP]

    def status(payload, times):
        if is_about(payload, BAD) and not times:
            return 400
        return 401 if times and stops and is_about(payload, STOP) else None

    with FakeServer(status=status) as server:
        run(folder, server.url, 0, keep_answers=True)
        run(folder, server.url, 0, retry_dead_letters=True)
        mirror = {"checkpoints_remote_dir": str(folder / "mirror")}
        with pytest.raises(ServerRefused):
            run(folder, server.url, 1, **mirror)
        stops.clear()
        run(folder, server.url, 1, **mirror)


async def draws(document, generate):
    random.random()
    return await generate(chat(document.text))


def with_batches(folder):
    with FakeProvider() as provider:
        runner(folder, provider, draws, config={"provider_batches": True}).run(documents(3))


def with_workers(folder, logs):
    write_texts(folder, "a", "b")
    with FakeServer() as server:
        pipeline = [JsonlReader(str(folder / "input")), runner(folder, server)]
        LocalPipelineExecutor(pipeline, tasks=2, logging_dir=logs).run_worker()


def every_value(shapes):
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    values = {
        "array": np.zeros(2),
        "scalar": np.float32(1),
        "datetime": now,
        "date": now.date(),
        "time": now.time(),
        "timedelta": datetime.timedelta(1),
        "bytes": b"a",
        "decimal": decimal.Decimal(1),
        "set": {1},
        "frozenset": frozenset({1}),
        "complex": 1j,
        "keys": {1: 2},
        "nan": float("nan"),
        "long": 2**70,
        "tuple": (1,),
    }
    media = [Media("id", MediaType.IMAGE, "url", media_bytes=b"a")]
    shapes.note("a document", encode(Document("text", "id", media, values)))
    # A run as short as these writes it only on a slow machine, while its server is up, into its
    # history and into the parts of its mirror.
    for name in ("history.jsonl", "0123456789abcdef-0"):
        shapes.note(name, orjson.dumps(ProgressRecord(places=1).to_json(), list))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    with shapes_of_all_writes() as shapes, pytest.MonkeyPatch.context() as patch:
        for name in ("POLL_SECONDS", "LOOK_SECONDS"):
            patch.setattr(provider_passes, name, 0.01)
        patch.setattr(claims, "_SETTLE_SECONDS", 0.01)
        with_the_job_of_a_release(folder / "release")
        with_batches(folder / "batches")
        with_workers(folder / "worker", str(folder / "worker/logs"))
        with_workers(folder / "store", "memory://claims-of-shapes")
        every_value(shapes)
    return shapes.found()


def test_the_fixture_of_the_newest_release_has_no_key_that_is_gone(found):
    """As long as the format is that of the release: it was made by its code."""
    release = RELEASES / NEWEST
    if content_of(release / "checkpoints/job.json")["format"] != FORMAT:
        return
    gone = {
        (name, key, kind)
        for name, keys in shapes_of(release).items()
        for key, kind in keys.items()
        if not set(kind.split(" or ")) <= set(found.get(name, {}).get(key, "").split(" or "))
    }
    assert not gone, RAISE


def test_files_have_the_keys_and_types_that_this_format_has(found):
    written = {"format": FORMAT, "files": found}
    if IS_WRITTEN:
        FILES.write_text(json.dumps(written, indent=1) + "\n")
    kept = json.loads(FILES.read_bytes())
    assert found == kept["files"], RAISE
    assert kept["format"] == FORMAT, RAISE
