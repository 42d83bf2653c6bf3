"""What a job of many ranks must not do for each of them; docs/internals/scale.md has the figures of
10,000.
"""

import builtins
import io
import shutil
import traceback
from collections import Counter
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint.identity import Fence
from datatrove_ckpt.generation import step
from datatrove_ckpt.run_folder.run_plan import RunPlan
from datatrove_ckpt.testing import FakeServer
from tests.bench.ranks import make, measure
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job


def test_a_resume_reads_what_is_kept_of_a_rank_twice_before_it_and_once_as_its_owner_and_twice_after_it(
    here, command, monkeypatch
):
    """None of them may trust what was there before. The reads of the fence, which guard what
    follows, are not counted.

    What the job must agree about (``run.json``) is compared before its output is, which needs the
    commits. The plan and its identity are built once for all checks, and the identity once more by the
    rank.
    """
    built = Counter()

    def count_calls(home, name):
        plain = getattr(home, name)

        def counted(*given):
            built[name] += 1
            return plain(*given)

        monkeypatch.setattr(home, name, counted)

    reads = Counter()
    plain_open = open

    def count(path, mode="r", *given, **named):
        opened = plain_open(path, mode, *given, **named)  # a file that is missing is not read
        codes = {frame.f_code for frame, _ in traceback.walk_stack(None)}
        if mode in ("r", "rb") and Fence.check.__code__ not in codes:
            reads[Path(str(path)).name] += 1
        return opened

    with FakeServer() as server:
        text = job_yaml(ENDPOINT.replace("URL", server.url)) + "          records_per_chunk: 2\n"
        write_job(here, text, [f"text {index}" for index in range(10)])
        command("run", "job.yaml")
        (here / "output/00000_00004.jsonl").unlink()
        command("repair", "checkpoints", "--logging-dir", "logs")
        monkeypatch.setattr(io, "open", count)
        monkeypatch.setattr(builtins, "open", count)
        count_calls(RunPlan, "_find_runners")
        count_calls(step, "run_identity")
        said = command("run", "job.yaml")
    assert "10 of 10 documents" in said
    assert reads["run.json"] == 6  # the card at the end reads each once
    assert reads["commits.jsonl"] == 4
    assert reads["00000.txt"] == 2  # the repair has removed it
    assert built == {"_find_runners": 1, "run_identity": 2}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.real_process
def test_ten_thousand_ranks_take_ten_times_as_long_as_a_thousand_and_little_memory(
    tmp_path,
):
    """Four chunks each, of the 83 in docs/internals/scale.md.

    Quadratic work would take a hundred times as long.
    """
    costs = {}
    for ranks in (1_000, 10_000):
        (folder := tmp_path / str(ranks)).mkdir()
        make(folder, ranks, 4)
        costs[ranks] = {
            tool: measure(folder, tool, ranks) for tool in ("status", "status --json", "run")
        }
        shutil.rmtree(folder)
    for tool, memory in (("status", 80), ("status --json", 150), ("run", 180)):
        assert costs[10_000][tool].memory < memory, costs
        assert costs[10_000][tool].cpu < 25 * costs[1_000][tool].cpu, costs
