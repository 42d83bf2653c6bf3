"""A checkpoint says which version wrote it: this one continues what releases from 0.2.0 on left
behind, and refuses older and newer ones.

tests/data/releases has the folders that each release left: see tests/make_release.py.
"""

import json
import re
import shutil

import orjson
import pytest

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum, verified_body
from datatrove_ckpt.checkpoint.identity import FORMAT
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.errors import VersionMismatch
from datatrove_ckpt.generation.requests import hash_payload
from datatrove_ckpt.mirror.restore import restore
from datatrove_ckpt.run_folder.run_location import open_location
from datatrove_ckpt.run_folder.run_state import read_run_state
from datatrove_ckpt.run_folder.verify import verify
from datatrove_ckpt.testing import FakeServer, outputs
from tests.make_release import PER_CHUNK, RELEASES, TEXTS, run, write_input
from tests.rank_folders import place_at
from tests.releases import NAMES, NEWEST, OLDER, VERSIONS, kept, restored


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The output of the same job without any interruption, as far as the tasks 1 and 2 are
    concerned.
    """
    folder = tmp_path_factory.mktemp("fresh")
    write_input(folder / "input")
    with FakeServer() as server:
        for rank in (1, 2):
            run(folder, server.url, rank)
    return outputs(folder / "output")


def test_each_version_of_the_changelog_has_a_fixture():
    text = (RELEASES.parents[2] / "docs/changelog.md").read_text()
    versions = [
        line.split()[1]
        for line in text.splitlines()
        if line.startswith("## ") and line[3].isdigit()
    ]
    assert {name.partition("-")[0] for name in VERSIONS} == set(versions)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_each_release_is_shown_and_continued(name, tmp_path, uninterrupted, server):
    folder = restored(name, tmp_path / "job")
    before = outputs(folder / "output")
    with open_location(str(folder / "checkpoints")) as place:
        ranks = {rank.rank: rank for rank in read_run_state(place).ranks}
    assert [ranks[number].counts.read for number in (0, 1)] == [5, PER_CHUNK]
    assert not [rank.reason for rank in ranks.values() if rank.trouble == "damaged"]
    for rank in range(3):
        run(folder, server.url, rank)
    # Of task 1: the second rollout of the document that was in work, and the one after it. Of task
    # 2: all.
    assert server.asked == {
        "Rewrite: stop": 1,
        "Rewrite: b4": 2,
        **{f"Rewrite: {text}": 2 for text in TEXTS[2]},
    }
    after = outputs(folder / "output")
    assert {name: data for name, data in after.items() if name in before} == before
    assert {
        name: data for name, data in after.items() if not name.startswith(("00000", "retry"))
    } == uninterrupted
    ids = sorted(json.loads(line)["id"] for data in after.values() for line in data.splitlines())
    assert ids == sorted(
        f"{number}/{index}" for number, texts in enumerate(TEXTS) for index in range(len(texts))
    )
    report = verify(place_at(folder / "checkpoints"), full=True)
    assert (report.problems, report.unfinished) == ([], [])
    for rank in (1, 2):
        content = json.loads((folder / "checkpoints" / f"{rank:05d}" / "run.json").read_bytes())
        assert (content["format"], content["written_by"]) == (FORMAT, __version__)


def test_a_request_has_the_name_that_it_has_in_earlier_checkpoints():
    """Made at 2a486fe, which sent the bytes that it hashed.

    The order of keys is in the name below a schema only.
    """
    payload = {
        "messages": [{"role": "user", "content": "x"}],
        "guided_json": {"b": 1, "a": 2},
        "model": "m",
    }
    payload |= {"temperature": 0.5, "logit_bias": {5: 1}}
    assert (
        hash_payload(payload)[0]
        == hash_payload(payload | {"guided_json": {"a": 2, "b": 1}})[0]
        == "64af03b0bbe4cd488518d223a9ade00a"
    )
    payload |= {"response_format": {"z": 1, "a": {"y": 2, "b": 3}}}
    assert hash_payload(payload)[0] == "1af8e64dee6aa9d099abd4a2cf019c82"


@pytest.mark.parametrize("name", NAMES)
def test_the_mirror_of_each_release_is_restored(name, tmp_path):
    restore(str(RELEASES / name / "mirror/00001"), tmp_path / "checkpoints/00001")
    left = RELEASES / name / "checkpoints/00001"
    assert (tmp_path / "checkpoints/00001/commits.jsonl").read_bytes() == (
        left / "commits.jsonl"
    ).read_bytes()
    cache = RequestCache(tmp_path / "checkpoints/00001/replay.sqlite3")
    try:
        assert list(cache.answer_counts()) == [(3, 1)]
    finally:
        cache.close()


# older versions ----------------------------------------------------------------------------------

FINISHED_BY = (
    r"was written by .*datatrove-ckpt.* \(format [12]\)\. .*"
    r"Install datatrove-ckpt 0\.2\.0, which finishes such runs, and run again"
)


@pytest.mark.parametrize("name", OLDER)
def test_a_checkpoint_of_an_older_version_is_refused_by_name_and_nothing_is_changed(
    name, tmp_path, server, command
):
    folder = restored(name, tmp_path / "job")
    before = kept(folder)
    for rank in range(2):
        for changes in ({}, {"accept_changes": True}, {"retry_dead_letters": True}):
            with pytest.raises(VersionMismatch, match=FINISHED_BY):
                run(folder, server.url, rank, **changes)
    for words in (["verify", "--full"], ["repair"], ["show"]):
        shown = command(words[0], folder / "checkpoints", *words[1:], code=1)
        assert re.search(FINISHED_BY, shown.out + shown.err), words
    assert not server.asked
    assert kept(folder) == before


# newer versions ----------------------------------------------------------------------------------


def from_the_future(path):
    """As a later version may write it: a larger number, its name, and values of which this one
    knows nothing.
    """
    content = json.loads(path.read_bytes()) | {
        "format": FORMAT + 1,
        "written_by": "7.1.0",
        "owner": ["a", "list"],
    }
    path.write_text(json.dumps(content))


REFUSAL = f"was written by datatrove-ckpt 7.1.0 (format {FORMAT + 1}). This is datatrove-ckpt {__version__}, which"


@pytest.mark.parametrize(
    "file",
    [
        "checkpoints/00001/run.json",
        "checkpoints/00000/run.json",
        "checkpoints/job.json",
        "mirror/job.json",
    ],
)
def test_a_newer_checkpoint_is_refused_by_name_and_nothing_is_changed(file, tmp_path, server):
    folder = restored(NEWEST, tmp_path / "job")
    mirrored = {}
    if file.startswith("mirror"):
        shutil.copyfile(folder / "checkpoints/job.json", folder / file)
        mirrored = {"checkpoints_remote_dir": str(folder / "mirror")}
    from_the_future(folder / file)
    before = kept(folder)
    for changes in (mirrored, mirrored | {"accept_changes": True}):
        with pytest.raises(VersionMismatch) as refused:
            run(folder, server.url, int("00000/" not in file), **changes)
        assert f"{folder / file} {REFUSAL}" in str(refused.value)
        assert "Install datatrove-ckpt 7.1.0 or newer" in str(refused.value)
    assert not server.asked
    assert kept(folder) == before


@pytest.mark.parametrize("what, known", [("manifest", "1"), ("run", f"{FORMAT}")])
def test_a_mirror_that_a_newer_version_wrote_to_is_not_restored_from_an_older_version(
    what, known, tmp_path
):
    """Older versions of the mirror lack work: to go on with one of them would pay for it twice."""
    mirror = tmp_path / "mirror/00001"
    shutil.copytree(RELEASES / NEWEST / "mirror/00001", mirror)
    newest = max(mirror.glob("generation-*.json"))
    content = orjson.loads(verified_body(newest.read_bytes()) or b"")
    content["run"]["written_by"] = "7.1.0"
    changed = content if what == "manifest" else content["run"]
    changed["format"] = FORMAT + 1
    newest.write_bytes(add_checksum(orjson.dumps(content)))
    with pytest.raises(
        VersionMismatch, match=rf"7\.1\.0 \(format {FORMAT + 1}\).* format {known}\."
    ):
        restore(str(mirror), tmp_path / "checkpoints/00001")
    assert not (tmp_path / "checkpoints/00001").exists()
