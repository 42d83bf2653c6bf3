"""What a mirror may say, and who may have written it: names, sizes, seals."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from datatrove_ckpt.checkpoint.lines import seal, unseal
from datatrove_ckpt.errors import CheckpointCorrupt, ConfigError
from datatrove_ckpt.inference.servers.server import InferenceServer
from datatrove_ckpt.mirror.manifests import Damaged, Part, Versions
from datatrove_ckpt.mirror.restore import restore
from datatrove_ckpt.mirror.seal import ADOPT_VARIABLE, Seal
from datatrove_ckpt.redaction import MIRROR_KEY_VARIABLE
from datatrove_ckpt.testing import FakeServer
from tests.jobs import runner
from tests.mirrors import Job, answered, up_to

KEY = "0123456789abcdef-secret"


@pytest.fixture
def job(ram: Path) -> Job:
    (ram / "job").mkdir()
    return Job(ram / "job")


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(MIRROR_KEY_VARIABLE, KEY)
    return KEY


def manifests(job: Job) -> list[Path]:
    return sorted((job.folder / "remote" / "00000").glob("generation-*"))


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a manifest as somebody does who knows the format: its checksum is right."""
    content = orjson.loads(unseal(path.read_bytes()) or b"")
    change(content)
    path.write_bytes(seal(orjson.dumps(content)))


def restored(job: Job) -> Path:
    job.lose_the_node()
    restore(f"{job.remote}/00000", job.rank)
    return job.rank


# names and sizes -----------------------------------------------------------------------------------------------------


def a_part(content: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = next(iter(content["files"].values()))[0]
    return part


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{
        f"a file {name}": lambda content, name=name: content["files"].update({name: [a_part(content)]})
        for name in (
            "../../x",
            "../x",
            "lock",
            "run.json",
        )
    },
    "an object elsewhere": lambda content: a_part(content).update(name="../../../secret"),
    "a negative size": lambda content: a_part(content).update(size=-1),
    "a huge size": lambda content: a_part(content).update(size=2**50),
    "a field too many": lambda content: a_part(content).update(mode=0o4755),
    "no run": lambda content: content.update(run=[]),
    "no owner": lambda content: content["run"].pop("owner"),
    "a nonce that is a path": lambda content: content["run"]["owner"].update(nonce="../../x"),
    "control characters": lambda content: content.update(when="\x1b[2J"),
}


def test_a_mirror_writes_only_files_of_a_checkpoint(job: Job, ram: Path) -> None:
    job.run_until("text 4 again")
    (ram / "secret").write_text("secret")
    *older, newest = manifests(job)
    for path in older:
        path.unlink()
    content = newest.read_bytes()
    for name, change in HOSTILE.items():
        newest.write_bytes(content)
        rewrite(newest, change)
        job.lose_the_node()
        before = set(ram.rglob("*"))
        with pytest.raises(CheckpointCorrupt, match="its manifest is damaged") as refused:
            restore(f"{job.remote}/00000", job.rank)
        assert newest.name in str(refused.value)
        assert "\x1b" not in str(refused.value)
        written = {path for path in set(ram.rglob("*")) - before if not path.is_relative_to(job.checkpoints)}
        assert not written, name
        assert not job.rank.exists(), name
    newest.write_bytes(content)
    assert answered(restored(job)) == up_to("text 4 again")


def test_an_object_is_read_no_further_than_its_manifest_says(job: Job) -> None:
    store = Versions(f"{job.remote}/00000")
    part = store.put_object("0" * 16 + "-000000", b"123")
    for folder in ("objects", "copies"):
        (job.folder / "remote" / "00000" / folder / part.name).write_bytes(b"1234" * 1000)
    with pytest.raises(Damaged, match="is missing or damaged, and so is its copy"):
        store.read_object(part)


# seals ---------------------------------------------------------------------------------------------------------------


def test_a_sealed_mirror_restores_with_its_key_only(job: Job, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job.run_until("text 4 again")
    assert all(b'"hmac":"' in path.read_bytes() for path in manifests(job))
    assert answered(restored(job)) == up_to("text 4 again")
    monkeypatch.setenv(MIRROR_KEY_VARIABLE, "another key of the user")
    with pytest.raises(
        CheckpointCorrupt, match=f"{manifests(job)[-1].name} is not sealed with the key in {MIRROR_KEY_VARIABLE}"
    ):
        restored(job)
    monkeypatch.delenv(MIRROR_KEY_VARIABLE)
    with pytest.raises(ConfigError, match=f"{MIRROR_KEY_VARIABLE} is not set, but .* is sealed with a key"):
        restored(job)
    assert not job.rank.exists()


def test_a_node_without_the_key_does_not_continue_a_sealed_mirror(
    job: Job, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own folder is complete, but nobody with the key could restore what it would upload."""
    job.run_until("text 4 again")
    monkeypatch.delenv(MIRROR_KEY_VARIABLE)
    with FakeServer() as server:
        with pytest.raises(ConfigError, match="Export the key where the tasks run"):
            job.run(server)
        assert not server.asked


def test_a_seal_holds_for_one_content_one_version_and_one_rank(job: Job, key: str, ram: Path) -> None:
    job.run_until("text 4 again")
    newest = manifests(job)[-1]
    content = newest.read_bytes()
    wrong = "is not sealed with the key in .* changed, or moved there"

    rewrite(newest, lambda content: content["run"].update(model="evil"))
    with pytest.raises(CheckpointCorrupt, match=wrong):
        restored(job)
    newest.write_bytes(content)

    _, number, nonce = newest.name.split("-")
    renamed = newest.with_name(f"generation-{int(number) + 1:08d}-{nonce}")
    newest.rename(renamed)
    with pytest.raises(CheckpointCorrupt, match=f"{renamed.name} {wrong}"):
        restored(job)
    renamed.rename(newest)

    shutil.copytree(job.folder / "remote" / "00000", job.folder / "remote" / "00001")
    with pytest.raises(CheckpointCorrupt, match=f"00001/{newest.name} {wrong}"):
        restore(f"{job.remote}/00001", job.checkpoints / "00001")

    shutil.copytree(job.folder / "remote", job.folder / "moved")
    restore(f"{job.folder}/moved/00000", job.rank)  # a mirror may be moved as a whole
    assert answered(job.rank) == up_to("text 4 again")


def test_a_retry_has_a_place_of_its_own(key: str) -> None:
    body = b'{"a":1}'
    sealed = Seal("s3://bucket/run/retry-00001/00000").add("name", body)
    Seal("/mnt/elsewhere/retry-00001/00000").check("name", sealed)
    for url in ("s3://bucket/run/00000", "s3://bucket/run/retry-00002/00000"):
        with pytest.raises(CheckpointCorrupt, match="moved there"):
            Seal(url).check("name", sealed)


def test_the_objects_of_a_sealed_version_have_a_hash_that_nobody_can_forge(job: Job, key: str) -> None:
    job.run_until("text 4 again")
    manifest = Versions(f"{job.remote}/00000").read_trusted(Versions(f"{job.remote}/00000").all_versions()[-1])
    parts = list(manifest.parts())
    assert parts
    assert all(len(part.sha256) == 64 for part in parts)
    store = Versions(f"{job.remote}/00000")
    forged = Part(parts[0].name, parts[0].size, parts[0].xxh128, "0" * 64)  # as after a collision of xxh128
    with pytest.raises(Damaged, match="is missing or damaged"):
        store.read_object(forged)


def test_a_mirror_from_before_the_key_is_adopted_once(
    job: Job, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    job.run_until("text 2")
    unsealed = manifests(job)[-1]
    monkeypatch.setenv(MIRROR_KEY_VARIABLE, KEY)
    with pytest.raises(
        CheckpointCorrupt, match=f"{unsealed.name} is not sealed, although .* start once with {ADOPT_VARIABLE}=1"
    ):
        restored(job)
    monkeypatch.setenv(ADOPT_VARIABLE, "1")
    restored(job)
    job.run_until("text 4 again")
    monkeypatch.delenv(ADOPT_VARIABLE)
    assert answered(restored(job)) == up_to("text 4 again")
    # Somebody adds a version. That the variable is still set does not help.
    monkeypatch.setenv(ADOPT_VARIABLE, "1")
    forged = manifests(job)[-1].with_name("generation-00009999-00000000000000ff.json")
    forged.write_bytes(manifests(job)[-1].read_bytes())
    rewrite(forged, lambda content: content.pop("hmac"))
    with pytest.raises(CheckpointCorrupt, match=f"{forged.name} is not sealed"):
        restored(job)
    forged.unlink()
    assert answered(restored(job)) == up_to("text 4 again")


@pytest.mark.slow
def test_a_key_for_a_job_whose_folder_is_there_seals_from_then_on(
    job: Job, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    job.run_until("text 2")
    monkeypatch.setenv(MIRROR_KEY_VARIABLE, KEY)
    job.run_until("text 4 again")
    assert any("is not sealed" in line and "what it uploads from now on is sealed" in line for line in log)
    assert answered(restored(job)) == up_to("text 4 again")


@pytest.mark.parametrize("short", ["", "0123456789"])
def test_a_short_key_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch, short: str) -> None:
    monkeypatch.setenv(MIRROR_KEY_VARIABLE, short)
    with FakeServer() as server, pytest.raises(ConfigError, match="a key has at least 16 characters") as refused:
        job.run(server)
    assert not short or short not in str(refused.value)


def test_the_key_is_in_no_file_no_log_no_pickle_and_no_server(job: Job, key: str, log: list[str], ram: Path) -> None:
    job.run_until("text 4 again")
    assert not [path for path in ram.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert not [line for line in log if key in line]
    with FakeServer() as server:
        assert key.encode() not in pickle.dumps(runner(job.folder, server, checkpoints_remote_dir=job.remote).config)
    versions = Versions(f"{job.remote}/00000")
    assert key not in repr(vars(versions)) + repr(vars(versions._seal))
    process = object.__new__(InferenceServer)
    nothing = type("Nothing", (), {"env": {}})
    vars(process).update(lease=nothing, _command=nothing, _record=None)
    assert key not in process._environment().values()
