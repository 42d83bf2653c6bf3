"""Every kind of damage to a half-finished checkpoint: a run refuses it clearly, or ends in the same
bytes.
"""

import itertools
import json
import random
import shutil
import sys
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum, read_shard
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.identity import read_run
from datatrove_ckpt.checkpoint.layout import PUBLISHING, STAGING
from datatrove_ckpt.errors import CheckpointCorrupt, CkptError, ServerUnavailable
from datatrove_ckpt.testing import FakeServer, outputs
from tests.crashes import OF_FILES, CopyingDisk, copy_tree, disk_in_place
from tests.jobs import STOPS_SOON, documents, runner
from tests.mirrors import ONE_BY_ONE, ask_twice
from tests.power_loss import CopyingPowerLossDisk

pytestmark = pytest.mark.usefixtures("code_described_once")

RANK = Path("checkpoints/00000")
FILES = (
    "00000/run.json",
    "00000/commits.jsonl",
    "00000/chunk_00002.jsonl",
    "00000/replay.sqlite3",
    "00000/dead_letters.jsonl",
    "00000/history.jsonl",
    "00000/lock",
    "last_chunk/00000.txt",
)
TEXT = ("run.json", "commits.jsonl", "chunk_00002.jsonl", "dead_letters.jsonl", "history.jsonl")


def statuses(broken):
    """Documents 1 and 2 are dead letters.

    ``broken``: document 5 gets an answer and no second one.
    """

    def status(payload, times):
        content = payload["messages"][-1]["content"]
        if broken and content == "text 5 again":
            return 500
        return 400 if content in ("text 1", "text 2") else None

    return status


@pytest.fixture(scope="module")
def server():
    with FakeServer(status=statuses(broken=False)) as running:
        yield running


def run(folder, server, patience=None):
    step = runner(
        folder, server, ask_twice, skip_bad_requests=True, config=ONE_BY_ONE | (patience or {})
    )
    step.run(documents(6))


def dead(folder):
    """The dead letters without what differs from attempt to attempt."""
    text = (folder / RANK / "dead_letters.jsonl").read_text()
    return [
        {name: letter[name] for name in ("ordinal", "document")}
        for letter in map(json.loads, text.splitlines())
    ]


class Half:
    """A job that was stopped in chunk 2, as a folder that is put back before each test, and its
    result.
    """

    def __init__(self, root, server):
        self.job, self.template = root / "job", root / "half"
        with FakeServer(status=statuses(broken=True)) as broken, pytest.raises(ServerUnavailable):
            run(self.job, broken, STOPS_SOON)
        copy_tree(self.job, self.template)
        assert {path.name for path in (self.job / RANK).iterdir()} == {
            *(Path(name).name for name in FILES[:-1]),
            PUBLISHING,
            STAGING,
        }
        run(self.job, server)
        self.output, self.dead = outputs(self.job / "output"), dead(self.job)
        assert len(self.output) == 3
        assert len(self.dead) == 2
        copy_tree(self.job, root / "whole")
        self.whole = root / "whole"

    def restore(self, finished=False):
        copy_tree(self.whole if finished else self.template, self.job)
        return self.job


@pytest.fixture(scope="module")
def half(tmp_path_factory, server):
    return Half(tmp_path_factory.mktemp("half"), server)


# mutations ---------------------------------------------------------------------------------------


def edit(name, change, *given):
    def mutate(folder):
        path = folder / "checkpoints" / name
        path.write_bytes(change(path.read_bytes(), *given))

    return mutate


def replace_by_folder(name):
    def mutate(folder):
        path = folder / "checkpoints" / name
        path.unlink(missing_ok=True)
        path.mkdir()

    return mutate


def foreign(name, content):
    return lambda folder: (folder / RANK / name).write_bytes(content) and None


def flipped(data, at, bit):
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


def lines_changed(data, how, index):
    lines = data.splitlines(keepends=True)
    index %= len(lines)
    if how == "double":
        lines.insert(index, lines[index])
    elif how == "swap":
        lines[0], lines[index] = lines[index], lines[0]
    elif how == "empty":
        lines[index] = b"\n"
    else:
        del lines[index]
    return b"".join(lines)


def cut(data, at):
    return data[:at]


def more(data, added, at=sys.maxsize):
    return data[:at] + added + data[at:]


def zeroed(data, at):
    return data[:at] + bytes(len(data[at : at + 100])) + data[at + 100 :]


def byte_mutations(half, name, places, chance):
    size = (half.template / "checkpoints" / name).stat().st_size
    for place in places:
        at, bit = int(place * size), chance.randrange(8)
        yield f"flip bit {bit} of byte {at}: {name}", edit(name, flipped, at, bit)
        yield f"cut at {at}: {name}", edit(name, cut, at)
        yield f"100 zero bytes at {at}: {name}", edit(name, more, bytes(100), at)
        yield f"100 bytes zeroed at {at}: {name}", edit(name, zeroed, at)


RUNS = (b"[]", b"{}", b'{"owner": []}', b'{"format": 4, "owner": {"fence": "x"}}', b"\xff\xfe")
LINES = (b"[]", b"{}", b"null", b'{"ordinal":1}', b'{"tally":{},"files":[]}')
NAMES = (
    "chunk_9999999999.jsonl",
    "chunk_abc.jsonl",
    "chunk_\u0660\u0660\u0660\u0660\u0663.jsonl",
    "chunk_000003.jsonl",
)


def whole_mutations():
    """Those of which there are few."""
    for name in FILES:
        yield f"no file: {name}", lambda folder, name=name: (folder / "checkpoints" / name).unlink()
        yield f"a folder: {name}", replace_by_folder(name)
        yield f"empty: {name}", edit(name, cut, 0)
    for content in RUNS:
        yield f"run.json is {content!r}", foreign("run.json", content)
    for name, body in itertools.product(FILES[1:3], LINES):
        yield f"a whole line {body!r} at the end: {name}", edit(name, more, add_checksum(body))
    for suffix in ("-wal", "-journal", "-shm"):
        yield f"foreign {suffix}", foreign(f"replay.sqlite3{suffix}", b"foreign" * 1000)
        yield f"a folder {suffix}", replace_by_folder(f"00000/replay.sqlite3{suffix}")
    yield (
        "a log without a database",
        lambda folder: (folder / RANK / "replay.sqlite3").rename(
            folder / RANK / "replay.sqlite3-wal"
        ),
    )
    for name in NAMES:
        yield f"foreign {name}, empty", foreign(name, b"")
        yield f"foreign {name}", foreign(name, b"mine\n")
        yield f"a folder {name}", replace_by_folder(f"00000/{name}")
    yield "garbage of several lines: commits.jsonl", edit(FILES[1], more, b"a\nb\nc")
    yield "garbage of one line: commits.jsonl", edit(FILES[1], more, b"abc\n")


def mutations(half, places, seed):
    chance = random.Random(seed)
    found = list(whole_mutations())
    for name in FILES:
        found += byte_mutations(half, name, [chance.random() for _ in range(places)], chance)
    for name, how, index in itertools.product(
        TEXT, ("double", "swap", "empty", "drop"), range(places)
    ):
        change = edit(f"00000/{name}", lines_changed, how, index)
        found.append((f"{how} line {index}: {name}", change))
    return found


# the oracle --------------------------------------------------------------------------------------


def judge(half, server, said, mutation):
    """Checks one mutation. Returns "refused" or "same"."""
    name, mutate = mutation
    folder = half.restore()
    mutate(folder)
    said("status", folder, code=None)
    text = said("verify", folder, "--output", folder / "output", code=None)
    assert "Traceback" not in text, name
    assert "Another run or node has written it" not in text, f"{name}: disowns output: {text}"
    said("repair", folder, "--dry-run", "--output", folder / "output", code=None)
    before = outputs(folder / "output")
    try:
        run(folder, server)
    except CkptError as error:
        assert str(folder) in str(error), f"{name}: does not say where: {error}"
        assert text.code == 1, f"{name}: refused ({error}), but verify says {text}"
        assert "accept_changes" not in str(error), f"{name}: is called another setting: {error}"
        assert outputs(folder / "output") == before, f"{name}: refused, but the output was changed"
        return "refused"
    assert outputs(folder / "output") == half.output, name
    text = said("verify", folder, "--full", code=None)
    if "dead_letters" not in name:  # its lines are for people, and only counted
        assert dead(folder) == half.dead, name
        assert text.code == 0, f"{name}: {text}"
    return "same"


def judge_all(half, server, said, chosen):
    found = [judge(half, server, said, mutation) for mutation in chosen]
    print(
        f"{len(found)} kinds of damage: {found.count('refused')} refused, {found.count('same')} the same output"
    )
    assert set(found) == {"refused", "same"}


def test_some_damage_is_refused_or_does_not_matter(half, server, said):
    judge_all(half, server, said, random.Random(1).sample(mutations(half, 2, 1), 9))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_damage_is_refused_or_does_not_matter(half, server, said):
    judge_all(half, server, said, mutations(half, 20, 0))


@pytest.mark.matrix(
    ("file", "read", "advice"),
    [
        ("00000/run.json", read_run, "start this task over: move its folder away"),
        ("job.json", read_run, "Remove it: the next start makes it again"),
        ("00000/shard.json", read_shard, "write {} into it"),
    ],
)
def test_every_damaged_byte_is_damage_and_no_other_setting(half, file, read, advice):
    path = half.restore(finished=True) / "checkpoints" / file
    data, good = path.read_bytes(), read(path)
    for at, bit in itertools.product(range(len(data)), (0, 6)):
        path.write_bytes(flipped(data, at, bit))
        with pytest.raises(CheckpointCorrupt) as refused:
            read(path)
        assert str(path) in str(refused.value)
        assert advice in str(refused.value)
    path.write_bytes(data)
    assert read(path) == good


# the commit log ----------------------------------------------------------------------------------

LOGS = {
    "the last line is damaged": lambda data: data[:-9] + b"x" + data[-8:],
    "two bad lines": lambda data: data[: data.index(b"\n") + 1] + b"a\nb",
    "the first line is damaged": lambda data: b"x" + data[1:],
    "the first line is lost": lambda data: lines_changed(data, "drop", 0),
    "the last line is lost": lambda data: lines_changed(data, "drop", 2),
    "a line twice": lambda data: lines_changed(data, "double", 1),
    "another order": lambda data: lines_changed(data, "swap", 2),
}


def lost(job, name):
    path = job / RANK / "commits.jsonl"
    if name == "no file":
        path.unlink()
    else:
        path.write_bytes(LOGS[name](path.read_bytes()))


@pytest.mark.matrix("name", [*LOGS, "no file"])
def test_a_damaged_commit_log_is_refused_by_all_and_rebuilt_by_repair(half, server, said, name):
    folder = half.restore(finished=True)
    lost(folder, name)
    with pytest.raises(CheckpointCorrupt, match="Keep the task's output files") as error:
        run(folder, server)
    for command in ("status", "verify"):
        text = said(command, folder, code=1)
        assert str(error.value) in text
        assert "remove it" not in text
    server.asked.clear()
    said("repair", folder)
    said("verify", folder, code=3)
    run(folder, server)
    assert outputs(folder / "output") == half.output
    assert sorted(letter["ordinal"] for letter in dead(folder)) == [1, 2]
    said("verify", folder, "--full")
    assert server.asked.total() <= {
        "no file": 10,
        "two bad lines": 7,
        "the last line is damaged": 4,
    }.get(name, 4)


@pytest.mark.matrix(
    "disk_type", [CopyingDisk, pytest.param(CopyingPowerLossDisk, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("run_first, step", [(False, 3), (False, 1), (True, 1)])
def test_a_repair_of_the_log_that_crashes_at_any_effect_does_no_harm(
    half,
    server,
    said,
    disk_type,
    run_first,
    step,
):
    """``run_first``: the user runs before the repair is repeated; a run that finds the log damaged
    refuses it.
    """
    lost(half.restore(finished=True), "the first line is lost")
    disk = disk_type(half.job, counted=OF_FILES)
    with disk_in_place(disk):
        said("repair", half.job)
    assert len(disk.points) > 5
    for number, crash in disk.left():
        if number % step:
            continue
        if run_first:
            try:
                run(half.job, server)
            except CheckpointCorrupt:
                said("verify", half.job, code=1)
        said("repair", half.job)
        run(half.job, server)
        assert outputs(half.job / "output") == half.output
        assert sorted(letter["ordinal"] for letter in dead(half.job)) == [1, 2], crash
        said("verify", half.job, "--full")


def removed_rank(folder):
    """With its output, as messages say: output that no checkpoint knows is refused."""
    shutil.rmtree(folder / RANK)
    shutil.rmtree(folder / "output")


def test_a_commit_names_only_files_in_the_output_folder(half, server):
    for name in ("../../precious", "/precious", "a/../../precious", ""):
        path = half.restore() / RANK / "commits.jsonl"
        (commit, *_) = read_commits(path).values()
        commit.files[0].path = name
        path.write_bytes(add_checksum(commit.to_json()))
        with pytest.raises(CheckpointCorrupt, match="is no name of an output file"):
            run(half.job, server)


def rewritten_cache(folder):
    path = folder / RANK / "replay.sqlite3"
    path.write_bytes(b"damaged" * 2000)
    path.with_name("replay.sqlite3-wal").write_bytes(b"damaged" * 2000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage, effects",
    [(rewritten_cache, {"rename replay.sqlite3"}), (removed_rank, {"remove 00000.txt"})],
)
@pytest.mark.parametrize(
    "disk_type", [CopyingDisk, pytest.param(CopyingPowerLossDisk, marks=pytest.mark.slow)]
)
def test_a_start_that_meets_damage_may_crash_at_any_effect(
    half,
    server,
    damage,
    effects,
    disk_type,
):
    damage(half.restore())
    disk = disk_type(half.job)
    with disk_in_place(disk):
        run(half.job, server)
    # The start, and a few effects after it.
    seen = {point.partition(".damaged")[0] for point in disk.points[:14]}
    for number, crash in disk.left():
        if number == 14:
            break
        run(half.job, server)
        assert outputs(half.job / "output") == half.output, crash
        assert dead(half.job) == half.dead, crash
        damage_seen = list((half.job / RANK).glob("replay.sqlite3.damaged-*"))
        assert len(damage_seen) <= 3
    assert effects & seen
