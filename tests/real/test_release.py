"""The wheel and the source distribution, as people install them: in empty environments of the
Pythons of this machine, and with the lowest versions of what the package needs.

    pytest tests/real/test_release.py
"""

import os
import subprocess
from pathlib import Path

import pytest

from datatrove_ckpt.testing import FakeServer
from tests.jobs import Budget, ids
from tests.real import environment
from tests.user_modules import python
from tests.yaml_jobs import write_rows

ROOT = Path(__file__).parents[2]
DOCUMENTS = 6
PYTHONS = {minor: path for minor in range(11, 16) if (path := python(minor))}

pytestmark = pytest.mark.timeout(900)  # what an environment needs may have to be fetched


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The folder with both, made of what is committed."""
    source = tmp_path_factory.mktemp("source")
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", "HEAD"], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    environment.uv("build", "--out-dir", str(source / "dist"), str(source))
    return source / "dist"


@pytest.fixture
def wheel(distributions):
    (wheel,) = distributions.glob("*.whl")
    return str(wheel)


@pytest.fixture
def venv(tmp_path):
    return tmp_path / "venv"


def make(venv, minor):
    environment.uv("venv", "--python", PYTHONS[minor], str(venv))


def finish_after_a_refusal(venv):
    """Runs a job whose server refuses its fourth request, and the same command again."""
    folder = venv.with_name("work")
    folder.mkdir()
    rows = [{"id": f"{number}", "text": f"text {number}"} for number in range(DOCUMENTS)]
    write_rows(folder / "in.jsonl", rows)
    budget = Budget()
    with FakeServer(status=budget) as server:
        job = (
            "run --input in.jsonl --prompt {text} --model m --run-folder job --records-per-chunk 2"
        )
        command = [venv / "bin/datatrove-ckpt", *job.split(), "--endpoint", server.url]
        bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for budget.left, code in ((3, 1), (DOCUMENTS, 0)):
            done = subprocess.run(command, cwd=folder, env=bare, capture_output=True, text=True)
            assert done.returncode == code, done.stderr[-3000:]
    assert ids(folder / "job", "*") == [row["id"] for row in rows]


def test_both_can_be_published(distributions, wheel):
    (source,) = distributions.glob("*.tar.gz")
    done = subprocess.run(
        [environment.twine(), "check", "--strict", wheel, source], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("minor", PYTHONS)
def test_the_wheel_runs_a_job_in_an_empty_environment(wheel, venv, minor):
    make(venv, minor)
    environment.install(venv, wheel)
    finish_after_a_refusal(venv)


def test_the_source_distribution_has_what_the_wheel_needs(distributions, wheel, tmp_path):
    (source,) = distributions.glob("*.tar.gz")
    environment.uv("build", "--wheel", "--out-dir", str(tmp_path), str(source))
    (built,) = tmp_path.glob("*.whl")
    names = [subprocess.check_output(["unzip", "-Z1", path]) for path in (built, wheel)]
    assert names[0] == names[1]


def test_the_lowest_versions_that_are_allowed_run_a_job(wheel, venv):
    make(venv, min(PYTHONS))
    lowest = ("--resolution", "lowest-direct", "-r", str(ROOT / "pyproject.toml"))
    environment.install(venv, *lowest, "--extra", "parquet", "--extra", "metrics")
    environment.install(venv, "--no-deps", wheel)
    finish_after_a_refusal(venv)


def test_the_newest_datatrove_runs_a_job(wheel, venv):
    """Also one above the pin, and one that is not released yet: who raises the pin knows by it."""
    make(venv, max(PYTHONS))
    newest = venv.with_name("overrides.txt")
    newest.write_text("datatrove>=0.10.1.dev0\n")
    environment.install(venv, "--overrides", str(newest), wheel)
    finish_after_a_refusal(venv)
