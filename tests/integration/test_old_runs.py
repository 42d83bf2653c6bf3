"""``finished_from`` takes over no results of another model or prompt, unless it says so."""

import json
import shutil
from pathlib import Path

import pytest
from datatrove.io import DataFolder
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import mirror
from datatrove_ckpt.common import object_store
from datatrove_ckpt.errors import CheckpointMismatch, ServerRefused
from datatrove_ckpt.mirror.restore import read_job
from datatrove_ckpt.testing import FakeServer
from tests.jobs import Budget, ask, documents, rows, run_job, runner
from tests.kept import edit
from tests.yaml_jobs import write_rows

NUMBER = 8
OTHER = 'model: "fake" -> "other"'
EARLIER = {"identity_version": 4}
MIXED = {"identity_version": 5, "accepted_changes": [{}]}
UNCHECKED = "were taken over unchecked: no checkpoint there shows all their settings"


@pytest.fixture
def job(here, command):
    """Runs the job of one file, whose flags say what is another in it: see ``run``."""
    (here / "documents").mkdir()
    rows = [{"id": f"id {n}", "text": f"text {n}"} for n in range(NUMBER)]
    write_rows(here / "documents/a.jsonl", rows)
    with FakeServer() as server:
        (here / "job.yaml").write_text(
            f"run_folder: old\ninput: documents\nprompt: Say {{text}}\nmodel: fake\n"
            f"endpoint: {server.url}\n"
        )

        def run(*flags, code=0):
            DataFolder.clear_instance_cache()
            server.asked.clear()
            said = command("run", "job.yaml", *flags, code=code)
            return said, server.asked.total()

        yield run


def refused(job, difference, *flags):
    """Before a request."""
    said, asked = job(*flags, code=1)
    assert difference in said.error
    assert not asked


CHAINS = {
    "a later prompt in the same file": ("--prompt=Tell {text}", "prompt: \"Say {text}\" -> \"Tell {text}\""),
    "another model": ("--model=other", OTHER),
    "other parameters": ("--temperature=0.5", "temperature: (not set) -> 0.5"),
}  # fmt: skip
PLACES = (
    "old",
    "old/output",
    "old/checkpoints",
    "old/output/*${rank}_*",
    "old/checkpoints/${rank}",
)


@pytest.mark.matrix("chain", CHAINS)
def test_results_of_another_run_are_refused_before_a_request_unless_they_are_accepted(job, chain):
    flag, difference = CHAINS[chain]
    job()
    new = (flag, "--run-folder=new")
    for place in PLACES:
        refused(job, difference, *new, f"--finished-from={place}")
        assert not Path("new/checkpoints").exists()
    said, asked = job(*new, "--finished-from=old", "--accept-changes=true")
    assert not asked
    assert UNCHECKED not in said.out
    # All is done, so nothing is compared any more.
    job(*new, "--finished-from=old")


def test_another_run_folder_beside_the_right_one_is_refused(job):
    job()
    job("--prompt=Tell {text}", "--run-folder=another")
    difference = 'prompt: "Tell {text}" -> "Say {text}"'
    refused(job, difference, "--run-folder=new", "--finished-from=[old, another]")


def test_the_same_run_in_other_folders_tasks_and_chunks_is_taken_over_without_a_word(job):
    job("--records-per-chunk=3")
    (Path("documents") / "b.jsonl").write_text('{"id": "more", "text": "more"}')
    said, asked = job(
        "--run-folder=new", "--tasks=2", "--output-format=parquet", "--finished-from=old/output"
    )
    assert asked == 1
    assert "finished_from" not in said.out


def test_the_last_line_says_that_results_without_an_identity_were_taken_over_unchecked(job):
    """A run folder that moved as a whole has its checkpoints still."""
    job()
    shutil.copytree("old/output", "alone")
    said, _ = job("--run-folder=a", "--finished-from=[alone, old/output]")
    assert f"finished_from: results in alone {UNCHECKED}" in said.out.splitlines()[-1]
    assert f"Task 0: finished_from: results in alone {UNCHECKED}" in said.err
    Path("old").rename("moved")
    for place in ("moved", "moved/output"):
        refused(job, OTHER, "--run-folder=b", f"--finished-from={place}", "--model=other")
    for number, changes in enumerate((EARLIER, MIXED)):
        edit(Path("moved/checkpoints/job.json"), **changes)
        said, _ = job(f"--run-folder=c{number}", "--finished-from=moved")
        assert f"results in moved {UNCHECKED}" in said.out


def test_a_copy_is_compared_by_its_own_checkpoints(job):
    job()
    shutil.copytree("old", "copy")
    edit(Path("old/checkpoints/job.json"), model="other")  # which goes on with another model
    said, _ = job("--run-folder=a", "--finished-from=copy/output")
    assert "finished_from" not in said.out
    refused(job, OTHER, "--run-folder=b", "--finished-from=copy/output", "--model=other")


def test_a_run_that_has_accepted_another_prompt_holds_results_of_the_earlier_one(job):
    job("--limit=3")
    edit(
        Path("old/checkpoints/job.json"),
        accepted_changes=[{"field": "rollout_fn.prompt", "old": "Tell {text}"}],
    )
    difference = 'prompt: "Tell {text}" -> "Say {text}"'
    refused(job, difference, "--run-folder=new", "--finished-from=old")
    said, _ = job("--run-folder=new", "--finished-from=old", "--accept-changes=true")
    assert f"results in old {UNCHECKED}" in said.out


@pytest.mark.parametrize("source", ["old", "alone"])
def test_what_was_taken_over_is_not_passed_on_without_a_word(job, source):
    """By a third run, whose settings are those of the second."""
    job()
    shutil.copytree("old/output", "alone")
    second = ("--run-folder=second", "--prompt=Tell {text}", "--accept-changes=true")
    job(*second, f"--finished-from={source}")
    third = ("--run-folder=third", "--prompt=Tell {text}", "--finished-from=second")
    difference = {
        "old": 'prompt: "Say {text}" -> ',
        "alone": 'from: "unchecked results" -> (not set)',
    }
    refused(job, difference[source], *third)
    said, _ = job(*third, "--accept-changes=true")
    assert f"results in second {UNCHECKED}" in said.out


def test_integers_beyond_64_bits_are_compared(job):
    documents = Path("documents/a.jsonl")
    lines = [json.dumps({"id": f"id {n}", "text": "same", "k": 10**30 + n}) for n in range(2)]
    documents.write_text("\n".join(lines))
    job()
    documents.write_text("\n".join([lines[0], lines[1].replace("1}", "7}")]))
    _, asked = job("--run-folder=new", "--finished-from=old")
    assert asked == 1
    assert (
        "1000000000000000000000000000007" in Path("new/output/00000_chunk_00000.jsonl").read_text()
    )


def test_checkpoints_that_are_private_to_another_user_are_said_to_be_unchecked(job, monkeypatch):
    def refuse(url):
        if Path(url).resolve() == Path("old/checkpoints").resolve():
            raise PermissionError(f"Permission denied: {url}/job.json")
        return read_job(url)

    job()
    monkeypatch.setattr(mirror.restore, "read_job", refuse)
    said, asked = job("--run-folder=new", "--finished-from=old/output")
    assert f"results in old/output {UNCHECKED}" in said.out
    assert not asked


def test_another_run_in_the_place_of_the_checkpoints_is_not_taken_for_the_old_one(job):
    job()
    shutil.rmtree("old/checkpoints")
    Path("old").rename("moved")
    job("--run-folder=old", "--prompt=Tell {text}")
    said, _ = job("--run-folder=new", "--finished-from=moved/output")
    assert UNCHECKED in said.out


# without the command, at any time ----------------------------------------------------------------


async def another(document, generate):
    return await ask(document, generate)


@pytest.mark.parametrize("kept", [True, False])
def test_a_task_alone_compares_too(tmp_path, server, kept):
    run_job(tmp_path / "old", server, 3)
    server.asked.clear()
    new = runner(tmp_path / "new", server, another, finished_from=tmp_path / "old/output")
    if not kept:
        new.checkpoints_local_dir = None
    with pytest.raises(CheckpointMismatch, match=r"rollout_fn code: .* -> "):
        new.run(documents(3))
    assert not server.asked
    assert not (tmp_path / "new/checkpoints").exists()


@pytest.mark.usefixtures("empty_memory_file_system")
def test_a_run_at_a_url_with_a_mirror_has_its_identity_there(tmp_path, server, log, monkeypatch):
    monkeypatch.setattr(object_store, "_SETTLES", 0.0)

    def step(folder, name, **settings):
        writer = JsonlWriter(f"memory://{name}", "${rank}_${chunk_index}.jsonl", compression=None)
        return runner(tmp_path / folder, server, output_writer=writer, **settings)

    mirror = str(tmp_path / "mirror")
    step("old", "runs/old", checkpoints_remote_dir=mirror).run(documents(3))
    shutil.rmtree(tmp_path / "old")
    server.asked.clear()
    other = {"config": {"model_name_or_path": "other"}, "finished_from": "memory://runs/old"}
    with pytest.raises(CheckpointMismatch, match='model: "fake" -> "other"'):
        step("new", "runs/new", **other).run(documents(3))
    step("new", "runs/new", finished_from="memory://runs/old").run(documents(3))
    assert not server.asked
    assert not any(UNCHECKED in line for line in log)


def test_an_old_run_that_goes_on_with_another_model_is_noticed_at_the_next_start(tmp_path):
    """The new run itself goes on without the old one."""
    budget = Budget()
    with FakeServer(status=budget) as server:
        old = tmp_path / "old"

        def go(folder, number, left, **settings):
            budget.left = left
            step = runner(folder, server, records_per_chunk=1, **settings)
            if left < number:
                with pytest.raises(ServerRefused):
                    step.run(documents(number))
            else:
                step.run(documents(number))

        other = {"config": {"model_name_or_path": "other"}}
        go(old, 3, 2)
        new = {"finished_from": str(old)}
        go(tmp_path / "new", 9, 3, **new)
        go(old, 3, 9, accept_changes=True, **other)
        for settings in ({}, other):
            with pytest.raises(CheckpointMismatch, match=r'model: "(fake|other)" -> "'):
                go(tmp_path / "new", 9, 9, **new, **settings)
        go(tmp_path / "new", 9, 9)
    assert len(rows(tmp_path / "new")) == 9
