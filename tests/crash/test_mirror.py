"""A crash at every effect of mirroring and of restoring, with the node's disk kept or lost, ends in
the same bytes.
"""

import re
import shutil
from collections import Counter

import pytest
from loguru import logger

from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.checkpoint import open_checkpoint
from datatrove_ckpt.errors import CheckpointCorrupt, CkptError
from datatrove_ckpt.mirror import manifests
from datatrove_ckpt.mirror.manifests import VersionStore, VersionWriter
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer
from tests.crashes import EFFECTS, OF_FILES, REMOTE_EFFECTS, assert_same_output_after_crash
from tests.jobs import documents, rejects, runner
from tests.mirrors import (
    ONE_BY_ONE,
    PASSES,
    Job,
    ask_between_passes,
    assert_not_asked_again,
    in_newest_version,
    up_to,
)
from tests.yaml_jobs import write_input

pytestmark = pytest.mark.usefixtures("code_described_once")


@pytest.fixture(autouse=True)
def _every_write_alone(monkeypatch):
    monkeypatch.setattr(open_checkpoint, "MAX_GROUP", 1)
    PASSES.watch(monkeypatch)


@pytest.fixture(autouse=True)
def warnings():
    """A mirror that fails only warns. Here that would make the test prove nothing."""
    warnings = []
    logger.remove()  # hundreds of runs
    logger.add(warnings.append, level="WARNING", format="{message}")
    yield warnings
    assert not [line for line in warnings if "ould not" in line][:3]


@pytest.fixture
def folder(ram):
    (ram / "job").mkdir()
    return ram / "job"


def mirrored(folder, server, **changes):
    """One document after the other, so that each run has the same effects."""
    changes = {
        "checkpoints_remote_dir": str(folder / "remote"),
        "mirror_seconds": 0,
        "config": ONE_BY_ONE,
        **changes,
    }
    return runner(folder, server, ask_between_passes, **changes)


def in_version(folder):
    return in_newest_version(folder / "remote", folder.with_name("scratch"))


def lose_the_node(folder, run=None):
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def keep_the_node(folder, run=None):
    pass


def prove(folder, server, run, after_crash, counted=REMOTE_EFFECTS, **how):
    """All runs, also those of ``after_crash``, ask for nothing that a version holds."""
    known = in_version(folder)

    def run_and_check(folder):
        server.asked.clear()
        run(folder)
        assert_not_asked_again(known, server)

    def note(folder):
        known.update(in_version(folder))
        after_crash(folder, run_and_check)
        known.update(in_version(folder))

    return assert_same_output_after_crash(
        run_and_check, folder, after_crash=note, counted=counted, recoveries=0, **how
    )


def of_documents(server, number):
    return lambda folder: mirrored(folder, server).run(documents(number))


@pytest.mark.parametrize(
    "after_crash, torn, number",
    [
        pytest.param(lose_the_node, False, 3, id="node lost", marks=pytest.mark.full),
        pytest.param(lose_the_node, True, 2, id="node lost, torn puts, each ninth"),
        pytest.param(
            lose_the_node, True, 3, id="node lost, torn puts, two chunks", marks=pytest.mark.slow
        ),
        pytest.param(keep_the_node, True, 3, id="node kept, torn puts", marks=pytest.mark.slow),
    ],
)
def test_a_crash_at_every_effect_of_mirroring_ends_in_the_same_bytes_and_costs_what_came_after_the_version(
    folder, after_crash, torn, number, warnings
):
    step = 1 + 8 * (number == 2)
    with FakeServer() as server:
        job = of_documents(server, number)
        report = prove(folder, server, job, after_crash, torn=torn, step=step)
    print(report)
    assert torn or not [line for line in warnings if "are damaged" in line], (
        "a kill leaves complete versions only"
    )
    effects = Counter(
        re.sub(r"[0-9a-f]{16}-\d+|\d{8}-[0-9a-f]{16}", "", point) for point in report.points
    )
    for effect in ("put ", "copy ", "put generation-.json", "delete generation-.json", "delete "):
        assert effects[effect] > 2, effects


def stopped_in_the_middle(folder):
    """Leaves a mirror of committed chunks, a journal and answers, and nothing of the node."""
    job = Job(folder)
    job.run_until("text 5 again")
    assert (job.rank / "chunk_00001.jsonl").exists()
    job.lose_the_node()
    assert in_version(folder) == up_to("text 5 again")


ALL = (*EFFECTS, *REMOTE_EFFECTS)


@pytest.mark.matrix(
    "after_crash, counted, step",
    [(keep_the_node, OF_FILES, 9), (keep_the_node, ALL, 1), (lose_the_node, ALL, 1)],
)
def test_a_crash_at_every_effect_of_restoring_ends_in_the_same_bytes_and_asks_for_nothing_again(
    folder, after_crash, counted, step
):
    stopped_in_the_middle(folder)
    with FakeServer() as server:
        job = lambda folder: Job(folder).run(server)  # noqa: E731
        report = prove(folder, server, job, after_crash, counted, torn=True, step=step)
    print(report)
    for step in (
        "create chunk_00001.jsonl",
        "write commits.jsonl",
        "commit replay.sqlite3",
        "rename 00000",
    ):
        assert any(point.startswith(step) for point in report.points), step


@pytest.mark.timeout(3000)
@pytest.mark.full
def test_a_crash_at_every_effect_of_every_recovery_from_a_lost_node_ends_in_the_same_bytes(
    folder,
):

    def lose_it_once(folder):
        if not (folder / "lost").exists():
            (folder / "lost").touch()
            lose_the_node(folder)

    with FakeServer() as server:
        job = of_documents(server, 1)
        print(assert_same_output_after_crash(job, folder, torn=True, after_crash=lose_it_once))


# The proofs above are worth something only if a wrong order fails them. --------------------------


@pytest.mark.slow
def test_collecting_garbage_before_the_manifest_is_noticed(folder, monkeypatch):
    waiting = []
    write, collect_garbage = VersionStore.write_manifest, VersionWriter._collect_garbage

    def collect_first(self, *args):
        collect_garbage(self, *args)
        write(*waiting.pop())

    monkeypatch.setattr(manifests, "KEPT_VERSIONS", 1)
    monkeypatch.setattr(VersionStore, "write_manifest", lambda *args: waiting.append(args))
    monkeypatch.setattr(VersionWriter, "_collect_garbage", collect_first)
    with (
        FakeServer() as server,
        pytest.raises(CheckpointCorrupt, match="There are objects, but no version"),
    ):
        prove(folder, server, of_documents(server, 2), lose_the_node)


# another node ------------------------------------------------------------------------------------


def prove_with_another_node(folder, after_crash, step):
    with FakeServer() as server:
        job = lambda folder: executor(folder, server).run()  # noqa: E731
        print(prove(folder, server, job, after_crash, ALL, step=step))


def executor(folder, server):
    reader = JsonlReader(str(folder / "input"))
    logs = str(folder / "logs")
    return LocalPipelineExecutor([reader, mirrored(folder, server)], 1, 1, logging_dir=logs)


def leave_the_node(folder):
    (folder / "checkpoints").mkdir(exist_ok=True)  # a crash before the first effect left none
    (folder / "checkpoints").rename(folder / "other")


def go_back(folder, run=None):
    lose_the_node(folder)
    (folder / "other").rename(folder / "checkpoints")


def finish_on_another_node(folder, run):
    leave_the_node(folder)
    run(folder)
    go_back(folder)


@pytest.mark.matrix("step", [50, 3, pytest.param(1, marks=pytest.mark.full)])
def test_killed_at_every_effect_finished_on_another_node_and_run_again_is_complete(folder, step):
    write_input(folder, [f"text {n}" for n in range(3)])
    prove_with_another_node(folder, finish_on_another_node, step)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("after_crash", [go_back, finish_on_another_node])
def test_another_node_is_killed_at_every_effect_and_the_first_or_a_third_one_goes_on(
    folder, after_crash, step
):
    write_input(folder, [f"text {n}" for n in range(4)])
    with FakeServer(status=rejects(["text 3"], 401)) as server, pytest.raises(CkptError):
        executor(folder, server).run()
    leave_the_node(folder)
    if after_crash is finish_on_another_node:
        shutil.rmtree(folder / "other")
    prove_with_another_node(folder, after_crash, step)
