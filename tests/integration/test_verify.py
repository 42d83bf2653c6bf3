"""verify, repair and status: every kind of damage is found and named, and what can be fixed is,
byte for byte.
"""

import asyncio
import json
import re
import shutil
from itertools import islice

import orjson
import pytest
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum, read_lines
from datatrove_ckpt.checkpoint.commits import CommitLog
from datatrove_ckpt.checkpoint.journal import ChunkJournal
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.errors import OutputMismatch, StorageFailed
from datatrove_ckpt.run_folder.verify import check_output
from datatrove_ckpt.testing import FakeServer, outputs
from tests.crashes import CopyingDisk, assert_same_output_after_crash, disk_in_place
from tests.jobs import documents, letters, rejects, runner
from tests.kept import edit
from tests.patience import until_async
from tests.power_loss import CopyingPowerLossDisk


@pytest.fixture(scope="module")
def server():
    """Documents 1 and 4 are dead letters."""
    with FakeServer(status=rejects(["text 1", "text 4"])) as running:
        yield running


def run(folder, server):
    """Two ranks of 7 documents each: chunks of 2, 2, 2 and 1, with dead letters in chunks 0 and
    2.
    """
    server.asked.clear()
    step = runner(folder, server, skip_bad_requests=True)
    for rank in range(2):
        step.run(documents(7), rank=rank, world_size=2)


@pytest.fixture(scope="module")
def kept(tmp_path_factory, server):
    """A job that was run once, and is put in place again for every test: run.json holds the
    output's full path.
    """
    folder = tmp_path_factory.mktemp("kept")
    run(folder / "job", server)
    shutil.copytree(folder / "job", folder / "undamaged")
    return folder


@pytest.fixture
def job(kept, server):
    shutil.rmtree(kept / "job")
    shutil.copytree(kept / "undamaged", kept / "job")
    server.asked.clear()
    return kept / "job"


@pytest.fixture
def undamaged(kept):
    return outputs(kept / "undamaged/output")


def chunk_file(folder, chunk, rank=0):
    return folder / "output" / f"{rank:05d}_chunk_{chunk:05d}.jsonl"


def edit_commits(folder, change, rank=0):
    """Rewrites the commit log; ``change`` gives each line's new content, or None to leave it
    out.
    """
    path = folder / "checkpoints" / f"{rank:05d}" / "commits.jsonl"
    changed = [change(orjson.loads(line.body)) for line in read_lines(path)]
    path.write_bytes(
        b"".join(add_checksum(orjson.dumps(content)) for content in changed if content is not None)
    )


def edit_settings(folder, rank, **changes):
    edit(folder / "checkpoints" / f"{rank:05d}" / "run.json", **changes)


# clean -------------------------------------------------------------------------------------------


def test_an_owners_record_in_the_output_folder_is_not_foreign_to_it(job, said):
    """As at the root of a bucket, or where another run has a folder below as its output."""
    for name in (".datatrove-ckpt-owner-0123456789abcdef", ".b.datatrove-ckpt-owner-0"):
        (job / "output" / name).write_text("{}")
    assert "(checked: sizes and contents)" in said("verify", job, "--full")


def test_a_checkpoint_inside_the_output_folder_is_not_foreign_to_it(tmp_path, server, said):
    output = JsonlWriter(str(tmp_path), "${rank}_${chunk_index}.jsonl", compression=None)
    runner(tmp_path, server, output_writer=output).run(documents(1))
    said("verify", tmp_path)


# damage ------------------------------------------------------------------------------------------


def remove(job):
    chunk_file(job, 1).unlink()


def rewrite(change):
    return lambda job: chunk_file(job, 1).write_bytes(change(chunk_file(job, 1).read_bytes()))


MENDABLE = {
    "missing": (remove, "task 0, chunk 1: 00000_chunk_00001.jsonl is missing."),
    "truncated": (
        rewrite(lambda data: data[:-1]),
        "task 0, chunk 1: 00000_chunk_00001.jsonl is truncated: it has ",
    ),
    "grown": (
        rewrite(lambda data: data + b"\n"),
        "task 0, chunk 1: 00000_chunk_00001.jsonl is grown: it has ",
    ),
    "altered": (
        rewrite(lambda data: data.replace(b"answer", b"ANSWER", 1)),
        "task 0, chunk 1: 00000_chunk_00001.jsonl is altered: its xxh128 is ",
    ),
}


def share_a_file(job):
    mine = chunk_file(job, 1).name

    def change(commit):
        if commit["chunk_index"] == 2:
            commit["files"][0]["path"] = mine
        return commit

    edit_commits(job, change, rank=1)
    chunk_file(job, 2, rank=1).unlink()


def lose_a_commit(job):
    """So that no other file names it."""
    (job / "checkpoints/00000/publishing.jsonl").write_text("{}\n{}\n")
    (job / "checkpoints/last_chunk/00000.txt").unlink()
    (job / "checkpoints/00000/shard.json").write_text("{}")
    edit_commits(job, lambda commit: None if commit["chunk_index"] in (1, 2) else commit)


def shift(job, by):
    edit_commits(
        job, lambda c: c | {"first_ordinal": c["first_ordinal"] + by * (c["chunk_index"] > 1)}
    )


def lose_a_dead_letter(job):
    path = job / "checkpoints/00000/dead_letters.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])


OTHER_DAMAGE = {
    "foreign": (
        lambda job: (job / "output/notes.txt").write_text("mine"),
        ["notes.txt is named by no commit."],
    ),
    "duplicate": (
        share_a_file,
        [
            "task 0, chunk 1: 00000_chunk_00001.jsonl is named by task 0, chunk 1 and by task 1, chunk 2."
        ],
    ),
    "lost": (
        lose_a_commit,
        [
            "task 0, chunk 1: no commit covers documents 2 to 5 (chunks 1 to 2). Restore commits.jsonl",
            "00000_chunk_00001.jsonl is named by no commit.",
        ],
    ),
    "lost inside": (
        lambda job: shift(job, 1),
        ["task 0: no commit covers documents 4. Restore commits.jsonl"],
    ),
    "overlap": (
        lambda job: shift(job, -1),
        ["task 0, chunk 2: an earlier commit also covers documents 3. Restore"],
    ),
    "another version": (
        lambda job: edit_commits(job, lambda commit: commit | {"from": "the future"}),
        ["line 1: the line is no commit of this version"],
    ),
    "corrupt settings": (
        lambda job: (job / "checkpoints/00001/run.json").write_text("{"),
        ["task 1: ", "run.json does not hold a run"],
    ),
    "input unknown": (
        lambda job: (job / "checkpoints/00000/shard.json").unlink(),
        ["shard.json is missing. Restore it from a copy, or write"],
    ),
    "identity": (
        lambda job: edit_settings(
            job,
            1,
            model="other",
            accepted_changes=[{"field": "model", "old": "fake", "new": "a third"}],
        ),
        ['task 1: has other settings than the run: model: "other" -> "fake".'],
    ),
    "one too many": (
        lambda job: [edit_settings(job, rank, tasks=1) for rank in range(2)],
        ["task 1: is one too many: the run has 1 task."],
    ),
    "dead_letters": (
        lose_a_dead_letter,
        [
            "task 0, chunk 2: ",
            "dead_letters.jsonl holds 0 dead letters of this chunk instead of 1.",
        ],
    ),
}


@pytest.mark.filterwarnings("ignore:unclosed file")
@pytest.mark.parametrize("kind", OTHER_DAMAGE)
def test_damage_that_repair_cannot_fix_is_named_and_left_alone(job, said, kind):
    damage, messages = OTHER_DAMAGE[kind]
    damage(job)
    text = said("verify", job, code=1)
    for message in messages:
        assert message in text
    before = outputs(job)
    assert f"not repaired: {messages[0]}" in text or messages[-1] in said("repair", job, code=1)
    assert outputs(job) == before


def test_what_cannot_be_read_is_no_reason_to_make_it_again(job, said, monkeypatch):
    def refuse(*args):
        raise PermissionError("not yours")

    monkeypatch.setattr("datatrove_ckpt.run_folder.verify.content_hash", refuse)
    text = said("repair", job, "--full", code=1)
    assert text.count("cannot be read: PermissionError: not yours") == 8
    assert "Repair can do nothing" in text


# unfinished --------------------------------------------------------------------------------------


@pytest.mark.matrix("is_new", [False, True])
def test_a_rank_that_has_finished_while_others_were_looked_at_is_looked_at_again(
    tmp_path, server, said, monkeypatch, is_new
):
    def run(rank, number):
        runner(tmp_path, server, skip_bad_requests=True).run(
            documents(number), rank=rank, world_size=2
        )

    def check(*arguments, **options):
        run(1, 4)
        return check_output(*arguments, **options)

    run(0, 4)
    if not is_new:
        run(1, 2)

    monkeypatch.setattr("datatrove_ckpt.run_folder.verify.check_output", check)
    said("verify", tmp_path, code=3 if is_new else 0)


def test_a_published_file_that_is_not_committed_yet_is_not_foreign(
    tmp_path, server, said, monkeypatch
):
    def refuse(self, commit):
        raise StorageFailed("as asked")

    with monkeypatch.context() as patch:
        patch.setattr(CommitLog, "append", refuse)
        with pytest.raises(StorageFailed):
            runner(tmp_path, server).run(documents(1))
    assert chunk_file(tmp_path, 0).exists()
    text = said("verify", tmp_path, code=3)
    assert "task 0, chunk 0: 00000_chunk_00000.jsonl is published but not committed yet." in text


def test_changes_that_were_accepted_between_two_ranks_are_no_problem(tmp_path, server, said):
    """Of the prompt, or of the output's place: a finished rank keeps the settings that it had."""
    runner(tmp_path, server, metadata_key="first").run(documents(1), rank=0, world_size=2)
    (tmp_path / "output").rename(tmp_path / "moved")
    moved = JsonlWriter(
        str(tmp_path / "moved"), "${rank}_chunk_${chunk_index}.jsonl", compression=None
    )
    step = runner(tmp_path, server, metadata_key="second", output_writer=moved, accept_changes=True)
    step.run(documents(1), rank=1, world_size=2)
    said("verify", tmp_path, "--full")
    for rank in range(2):
        edit_settings(tmp_path, rank, accepted_changes=[])
    (tmp_path / "checkpoints/job.json").unlink()
    assert "has other settings than the run" in said("verify", tmp_path, code=1)


def test_status_and_verify_work_while_a_run_is_on_and_its_rank_is_not_repaired(
    tmp_path, server, said
):
    seen = {}

    async def rollout(document, generate):
        if document.id == "id 2":
            commits = tmp_path / "checkpoints/00000/commits.jsonl"
            await until_async(lambda: commits.exists() and commits.stat().st_size)
            for name, code in (("status", 0), ("verify", 3), ("repair", 1)):
                seen[name] = await asyncio.to_thread(said, name, tmp_path, code=code)
            chunk_file(tmp_path, 0).unlink()
            seen["repair of a lost file"] = await asyncio.to_thread(
                said, "repair", tmp_path, code=1
            )
        return True

    with pytest.raises(OutputMismatch, match=r"00000_chunk_00000\.jsonl is missing"):
        runner(tmp_path, server, rollout).run(documents(3))
    assert "1 task (1 running)" in seen["status"]
    assert "2 done" in seen["status"]
    assert (
        "task 0: is not finished: the run is active, ended early, or must be run again."
        in seen["verify"]
    )
    at_work = "task 0: a process works on it. Stop it, and run again.\n"
    assert seen["repair"] == f"not repaired: {at_work}Repair can do nothing.\n"
    assert (
        "error: Another call of run or run_async in this process works on this task"
        in seen["repair of a lost file"]
    )
    said("verify", tmp_path, code=1)


# repair ------------------------------------------------------------------------------------------


def test_where_a_file_may_be_another_runs_it_stays_and_repair_says_so(job, said, tmp_path):
    moved = job.rename(tmp_path / "moved")
    file = chunk_file(moved, 1)
    file.write_bytes(file.read_bytes()[:-9])
    text = said("repair", moved, "--output", moved / "output")
    job.mkdir()  # for the next test
    assert f"\n{file.name} stays: it may be another run's. Move it away" in text
    assert file.exists()


@pytest.mark.matrix("kind", [*reversed(MENDABLE)])
def test_a_damaged_file_is_named_with_what_to_do_and_its_repaired_chunk_alone_is_made_again(
    job, server, said, undamaged, kind
):
    damage, message = MENDABLE[kind]
    damage(job)
    text = said("verify", job, "--full", code=1)
    assert text.startswith(message)
    advice = f"To redo it: datatrove-ckpt repair {job}/checkpoints --full, then run again.\n"
    assert text.splitlines(keepends=True)[0].endswith(advice)
    assert text.splitlines()[1].startswith("1 problem: 2 tasks, 14 documents")
    said("verify", job, code=1)
    text = said("repair", job, "--full")
    assert text.startswith(
        "task 0, chunk 1: take back its commit, to have 2 documents processed again; remove 00000_chunk_00001.jsonl\n"
        "Done. Now remove LOGGING_DIR/completions/00000"
    )
    assert not chunk_file(job, 1).exists()
    assert not (job / "checkpoints/last_chunk/00000.txt").exists()
    assert re.search(r"\b8\d(\.\d)? % of the input", said("status", job))
    text = said("verify", job, "--full", code=3)
    assert text.splitlines()[0] == "task 0, chunk 1: is not started, although later chunks are."
    run(job, server)
    assert set(server.asked) == {"text 2", "text 3"}
    assert outputs(job / "output") == undamaged
    said("verify", job, "--full")
    assert (job / "checkpoints/last_chunk/00000.txt").read_text() == "3\n"


@pytest.mark.matrix("chunks", [(0, 2), (0, 1, 2, 3), (2, 3)])
def test_dead_letters_of_repaired_chunks_are_there_once(job, server, said, undamaged, chunks):
    for chunk in chunks:
        for rank in range(2):
            chunk_file(job, chunk, rank).unlink()
    text = said("repair", job)
    assert text.count("1 dead letter among them") == 2 * len({0, 2} & set(chunks))
    said("verify", job, code=3)
    run(job, server)
    assert set(server.asked) == {
        f"text {ordinal}" for c in chunks for ordinal in (2 * c, 2 * c + 1) if ordinal < 7
    }
    assert outputs(job / "output") == undamaged
    said("verify", job, "--full")
    assert sorted(letter["ordinal"] for letter in letters(job)) == [1, 4]
    # And again, now that the commits come in another order, and a blank lies between the letters.
    chunk_file(job, chunks[-1]).unlink()
    said("repair", job)
    run(job, server)
    assert outputs(job / "output") == undamaged
    said("verify", job, "--full")


@pytest.fixture(params=[(0,), (0, 2)], ids=["letters between", "letters at the end"])
def damaged(ram, server, said, request):
    """A job of one rank, marked complete, with truncated chunks that have dead letters."""
    folder = ram / "job"
    runner(folder, server, skip_bad_requests=True).run(documents(7))
    (folder / "logs/completions").mkdir(parents=True)
    for rank in range(2):
        (folder / f"logs/completions/{rank:05d}").touch()
    shutil.copytree(folder / "output", ram / "undamaged")
    for chunk in request.param:
        path = chunk_file(folder, chunk)
        path.write_bytes(path.read_bytes()[:-1])
    return folder


def crashes(repair, folder, disk_type, points):
    """Crashes a repair at each of its effects; puts every folder that this may leave behind in
    place, once.
    """
    disk = disk_type(folder, disk_type is CopyingDisk)
    with disk_in_place(disk):
        repair()
    points.extend(disk.points)
    seen = []
    for _, crash in disk.left():
        state = {
            name: content for name, content in outputs(folder).items() if "run.json" not in name
        }
        if state not in seen:
            seen.append(state)
            yield crash


@pytest.mark.matrix(
    "disk_type, run_first, every",
    [(CopyingDisk, False, 5), (CopyingDisk, False, 1), (CopyingPowerLossDisk, True, 1)],
)
def test_a_repair_that_crashes_at_any_effect_does_no_harm_and_is_repaired(
    damaged, server, said, disk_type, run_first, every
):
    undamaged = outputs(damaged.with_name("undamaged"))
    marker = damaged / "logs/completions/00000"
    options = ("--logging-dir", str(damaged / "logs"))

    def life():
        """As datatrove's executor would."""
        if not marker.exists():
            runner(damaged, server, skip_bad_requests=True).run(documents(7))
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()

    points = []
    left = crashes(lambda: said("repair", damaged, *options, code=None), damaged, disk_type, points)
    for point in islice(left, 0, None, every):
        assert said("verify", damaged, code=None).code in (1, 3), f"{point}: not seen"
        if run_first:
            try:
                life()
            except OutputMismatch:
                said("verify", damaged, code=1)  # refused with a reason
            assert said("verify", damaged, code=None).code in (0, 1), f"{point}: not seen"
        said("repair", damaged, *options)
        life()
        assert outputs(damaged / "output") == undamaged, point
        said("verify", damaged, "--full")
        assert sorted(letter["ordinal"] for letter in letters(damaged)) == [1, 4], point
    effects = (
        "remove 00000",
        "remove 00000_chunk_00000.jsonl",
        "remove 00000.txt",
        "rename commits.jsonl",
    )
    order = [points.index(effect) for effect in effects]
    assert order == sorted(order), (
        "the marker first, then the output, then what names the commits, then the commits"
    )
    assert {"truncate dead_letters.jsonl", "rename dead_letters.jsonl"} & {*points}
    assert marker.with_name("00001").exists(), "that of a rank without damage"


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("disk_type", [CopyingDisk, CopyingPowerLossDisk])
def test_a_crash_at_any_effect_of_a_repair_and_of_the_run_after_it_ends_in_the_same_bytes(
    damaged, server, said, disk_type
):
    def life(folder):
        said("repair", folder)
        runner(folder, server, skip_bad_requests=True).run(documents(7))

    torn = disk_type is CopyingDisk
    print(
        assert_same_output_after_crash(life, damaged, torn=torn, disk_type=disk_type, recoveries=0)
    )
    assert outputs(damaged / "output") == outputs(damaged.with_name("undamaged"))


@pytest.mark.matrix("left", ["journal", "cache"])
def test_a_repair_uses_a_journal_or_cached_answers_that_are_still_there(
    job,
    server,
    said,
    undamaged,
    monkeypatch,
    left,
):
    """A crash after a commit leaves the journal and the answers, or, a moment later, the
    answers.
    """
    shutil.rmtree(job)
    with monkeypatch.context() as patch:
        if left == "journal":
            patch.setattr(ChunkJournal, "remove", lambda self: None)
        else:
            patch.setattr(RequestCache, "drop_chunk", lambda self, chunk_index: None)
            patch.setattr(RequestCache, "remove", RequestCache.close)
        run(job, server)
    assert bool([*job.glob("checkpoints/00000/chunk_*")]) == (left == "journal")
    said("verify", job, code=3)
    remove(job)
    said("repair", job)
    run(job, server)
    assert not server.asked
    assert outputs(job / "output") == undamaged
    said("verify", job, "--full")


def move_letters(job):
    path = job / "checkpoints/00000/dead_letters.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    chunk_file(job, 0).unlink()


@pytest.mark.parametrize(
    "damage, says",
    [
        (move_letters, "task 0: cannot be redone: its dead letters in"),
        (
            None,
            "not repaired: task 0, chunk 1: cannot be redone: it is of an older input",
        ),
    ],
)
def test_what_cannot_be_redone_is_left_alone(job, server, said, damage, says):
    if damage is None:  # the input grew: chunks of 2, 1, 2, 1
        shutil.rmtree(job)
        for number in (3, 6):
            runner(job, server, skip_bad_requests=True).run(documents(number))
        chunk_file(job, 1).unlink()
    else:
        damage(job)
    before = outputs(job)
    assert says in said("repair", job, code=1)
    assert outputs(job) == before


# with datatrove ----------------------------------------------------------------------------------


def retry(folder, server):
    step = runner(folder, server, skip_bad_requests=True, retry_dead_letters=True)
    for rank in range(2):
        step.run([], rank=rank, world_size=2)


def test_files_of_retried_dead_letters_are_verified_and_repaired_too(job, said, undamaged):
    with FakeServer() as mended:
        retry(job, mended)
        text = said("verify", job, "--full")
        assert "2 tasks, 14 documents (14 written, 0 dropped, 0 dead letters) in 10 files" in text
        totals = json.loads(said("verify", job, "--json").out)["totals"]
        assert (totals["written"], totals["dead"]) == (14, 0)
        made = outputs(job / "output")
        retried = job / "output/00001_chunk_retry1_00000.jsonl"
        retried.unlink()
        text = said("verify", job, code=1)
        assert text.startswith(
            "retry-00001, task 1, chunk 0: 00001_chunk_retry1_00000.jsonl is missing."
        )
        assert "retries    4 dead letters retried, 4 of them written" in said("status", job)
        assert (
            "Run the pipeline again to process these chunks, as a retry of dead letters."
            in said("repair", job)
        )
        retry(job, mended)
    assert outputs(job / "output") == made
    said("verify", job, "--full")
    (job / "checkpoints/00000/commits.jsonl").write_bytes(b"x\n" * 2)
    known = "9 documents (9 written, 0 dropped, 0 dead"  # what rank 1 and the retries have
    assert known in said("verify", job, code=1)
    assert "  documents  9 done: 9 written in 6 chunks, 0 dropped, 0 dead\n" in said(
        "status", job, code=1
    )


# names -------------------------------------------------------------------------------------------
