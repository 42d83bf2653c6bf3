"""A real local Ray, through datatrove's executor: a plain run, and actors and their workers killed
in the middle.

    pytest tests/real/test_ray.py
"""

import json
import os
from pathlib import Path

import pytest

from tests import processes
from tests.real import environment
from tests.real.cluster_job import DOCUMENTS, IN_FLIGHT

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)  # the first one also installs Ray


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += [environment.ray_python(), "-m", "tests.real.ray_job", str(folder)]
    settings = {
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }
    # 15 otherwise: every other process of the machine goes first.
    settings["RAY_worker_niceness"] = "0"
    done = processes.run(command, cwd=ROOT, env={**os.environ, **settings}, timeout=500)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-10000:]
    return {
        row.pop("case"): row
        for row in map(json.loads, (folder / "results").read_text().splitlines())
    }


@pytest.mark.parametrize(
    "case, runs, at_most",
    [
        ("plain run of 2", 1, 0),
        ("kill -9 of the actor", 1, IN_FLIGHT),  # Ray starts the rank again by itself
        ("SIGTERM to the actor", 1, IN_FLIGHT),
        ("SIGTERM to the task's process", 2, IN_FLIGHT),
        # Both actors wait without end, so the time limit ends them.
        ("kill -9 of the task's process", 2, IN_FLIGHT),
    ],
)
def test_every_document_once(results, case, runs, at_most):
    result = results[case]
    assert result["same output"]
    assert result["documents"] == 2 * DOCUMENTS
    assert result["complete in the end"] == [0, 1]
    assert result.get("complete", []) == []
    assert result["runs"] == runs
    assert 0 <= result["again"] <= at_most
