"""What `run`, `doctor` and `verify` say of the same job when something is wrong: tests/data/refusals.txt, word by word.

Who means to change a message writes the file anew, and reads the difference:

    DATATROVE_CKPT_WRITE_GOLDEN=1 python -m pytest -n 0 -m "" tests/integration/test_refusals.py
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, suppress
from pathlib import Path
from typing import Any

import pytest
from datatrove.io import DataFolder

from datatrove_ckpt import __version__
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.preflight import probes
from datatrove_ckpt.testing import FakeServer
from tests.commands import Command, Printed
from tests.kept import edit
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

GOLDEN = Path(__file__).parents[1] / "data" / "refusals.txt"
TASKS = 2
TEXTS = (("a", "b", "c", "d", "e"), ("f", "g", "h"))
STEP = "--pipeline.1"
_MACHINE = re.compile(r"^\w+ +\w+, (syncs|room|space|file system|open files|locks|SQLite):")
"""What the doctor says of this machine."""
Change = Callable[[Path], object]


def rank(number: int, name: str) -> Callable[[Path], Path]:
    return lambda job: job / "checkpoints" / f"{number:05d}" / name


def only(folder: str, pattern: str = "*") -> Callable[[Path], Path]:
    return lambda job: min((job / folder).glob(pattern))


def cut(path: Callable[[Path], Path], size: int = -10) -> Change:
    return lambda job: path(job).write_bytes(path(job).read_bytes()[:size])


def gone(path: Callable[[Path], Path]) -> Change:
    return lambda job: shutil.rmtree(path(job)) if path(job).is_dir() else path(job).unlink()


def add(name: str, text: str = "") -> Change:
    def change(job: Path) -> None:
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        with (job / name).open("a") as file:
            file.write(text)

    return change


def swap(path: Callable[[Path], Path], old: bytes, new: bytes) -> Change:
    return lambda job: path(job).write_bytes(path(job).read_bytes().replace(old, new, 1))


def folder(name: str) -> Callable[[Path], Path]:
    return lambda job: job / name


def moved(job: Path) -> None:
    (job / "output").rename(job / "elsewhere")


def no_documents(job: Path) -> None:
    for path in (job / "input").iterdir():
        path.write_text('{"content": "a"}')


def locked(job: Path) -> Callable[[], None]:
    file = rank(0, "lock")(job).open("r+")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file.close


def datatroves(job: Path) -> None:
    shutil.copytree(GOLDEN.parent / "datatrove_0_9_0" / "checkpoints", job / "checkpoints")


def copied_over(job: Path) -> None:
    shutil.copyfile(rank(0, "commits.jsonl")(job), rank(1, "commits.jsonl")(job))


class Refusal:
    """For the server: once it is asked to, it refuses the fourth document's request, when a chunk is committed."""

    commits: Path | None = None

    def __call__(self, payload: dict[str, Any], times: int) -> int | None:
        if self.commits is None or not payload["messages"][-1]["content"].endswith(" d"):
            return None
        while not self.commits.exists() or not self.commits.read_bytes():
            time.sleep(0.01)
        return 403


NEW, DONE, STOPPED = "new", "done", "stopped"
SITUATIONS: dict[str, tuple[str, Change | None, tuple[str, ...]]] = {
    "the input folder is missing": (NEW, gone(folder("input")), ()),
    "no input file matches": (NEW, None, ("--pipeline.0.glob_pattern=*.csv",)),
    "the input holds no documents": (NEW, no_documents, ()),
    "an input file that is compressed is none": (NEW, add("input/2.jsonl.gz", "text"), ()),
    "the output would be read": (NEW, None, (f"{STEP}.output_writer.output_folder=input",)),
    "output_filename lacks rank": (NEW, None, (f"{STEP}.output_writer.output_filename=x_${{chunk_index}}.jsonl",)),
    "output_filename lacks chunk_index": (NEW, None, (f"{STEP}.output_writer.output_filename=${{rank}}.jsonl",)),
    "a setting that there is not": (NEW, None, (f"{STEP}.records_per_chunks=3",)),
    "a setting of another type": (NEW, None, (f"{STEP}.records_per_chunk=many",)),
    "a value that no server takes": (NEW, None, (f"{STEP}.config.default_generation_params={{temperature: hot}}",)),
    "a rollout that there is not": (NEW, None, (f"{STEP}.rollout_fn=no_such_module.rollout",)),
    "a prompt of a column that there is not": (NEW, None, (f"{STEP}.rollout_fn.prompt=Say {{metadata[title]}}",)),
    "the key is not set": (NEW, None, (f"{STEP}.config.api_key_env=NO_SUCH_KEY",)),
    "the server has another model": (NEW, None, (f"{STEP}.config.model_name_or_path=other",)),
    "the address holds a secret": (NEW, None, (f"{STEP}.config.endpoint_url=http://127.0.0.1:9/v1?api_key=s3cr3t-s3cr3t",)),
    "logging_dir is a file": (NEW, add("logs"), ()),
    "checkpoints_local_dir is a file": (NEW, add("checkpoints"), ()),
    "the output folder holds a file of the template": (NEW, add("output/00000_00000.jsonl", "{}\n"), ()),
    "the checkpoints are datatrove's": (NEW, datatroves, ()),
    "nothing is wrong": (DONE, None, ()),
    "another prompt, done": (DONE, None, (f"{STEP}.rollout_fn.prompt=Tell {{text}}",)),
    "another number of tasks": (DONE, None, ("--executor.tasks=3",)),
    "another size of chunks": (DONE, None, (f"{STEP}.records_per_chunk=3",)),
    "another output folder": (DONE, None, (f"{STEP}.output_writer.output_folder=elsewhere",)),
    "an output file is missing": (DONE, gone(only("output")), ()),
    "an output file is cut": (DONE, cut(only("output")), ()),
    "an output file of no commit": (DONE, add("output/00001_00007.jsonl", "{}\n"), ()),
    "an output file of a rank that there is not": (DONE, add("output/00005_00000.jsonl", "{}\n"), ()),
    "the output folder was moved": (DONE, moved, ()),
    "an input file is gone": (DONE, gone(only("input")), ()),
    "an input file has grown": (DONE, add("input/0.jsonl", '\n{"text": "more", "id": "more"}'), ()),
    "commits are gone": (DONE, gone(rank(0, "commits.jsonl")), ()),
    "commits are cut": (DONE, cut(rank(0, "commits.jsonl"), -200), ()),
    "a commit is altered": (DONE, swap(rank(0, "commits.jsonl"), b'"read":2', b'"read":1'), ()),
    "commits of another rank": (DONE, copied_over, ()),
    "run.json is gone": (DONE, gone(rank(0, "run.json")), ()),
    "run.json is altered": (DONE, swap(rank(0, "run.json"), b'"fake"', b'"mine"'), ()),
    "run.json is of a newer version": (
        DONE, lambda job: edit(rank(0, "run.json")(job), format=999, written_by="7.1.0"), ()),
    "job.json is cut": (DONE, cut(folder("checkpoints/job.json")), ()),
    "the checkpoints are gone": (DONE, gone(folder("checkpoints")), ()),
    "the checkpoints of a rank are gone": (DONE, gone(folder("checkpoints/00000")), ()),
    "another prompt, stopped": (STOPPED, None, (f"{STEP}.rollout_fn.prompt=Tell {{text}}",)),
    "another model, stopped": (STOPPED, None, (f"{STEP}.config.model_name_or_path=other",)),
    "a committed file is missing, stopped": (STOPPED, gone(only("output", "*.jsonl")), ()),
    "a file of no commit, stopped": (STOPPED, add("output/00000_00009.jsonl", "{}\n"), ()),
    "the journal is altered": (STOPPED, swap(only("checkpoints/00000", "chunk_*"), b"text", b"tixt"), ()),
    "the cache is no database": (STOPPED, lambda job: rank(0, "replay.sqlite3")(job).write_bytes(b"no" * 3000), ()),
    "the input has changed, stopped": (STOPPED, swap(only("input"), b'"a"', b'"another"'), ()),
    "the rank runs": (STOPPED, locked, ()),
}  # fmt: skip


BY_DEFAULT = """no input file matches; the output would be read; the key is not set; the checkpoints are datatrove's;
another prompt, done; an output file is missing; an output file of no commit; an input file has grown; commits are cut;
run.json is gone; run.json is of a newer version; the checkpoints of a rank are gone; another prompt, stopped;
a file of no commit, stopped; the rank runs""".replace("\n", " ").split("; ")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, FakeServer]]:
    """The folder "job", and beside it what it holds in each state: run.json holds its path."""
    top, refusal = tmp_path_factory.mktemp("jobs"), Refusal()
    job = top / "job"
    with FakeServer(status=refusal) as server:
        text = job_yaml(ENDPOINT.replace("URL", server.url) + ", max_concurrent_generations: 1", TASKS)
        for state in (NEW, DONE, STOPPED):
            shutil.rmtree(job, ignore_errors=True)
            job.mkdir()
            write_job(job, text + "          records_per_chunk: 2\n", *TEXTS)
            refusal.commits = rank(0, "commits.jsonl")(job) if state == STOPPED else None
            DataFolder.clear_instance_cache()
            with chdir(job):
                assert state == NEW or main(["run", "job.yaml"]) == (state == STOPPED)
            shutil.copytree(job, top / state)
        refusal.commits = None
        yield job, server


def test_those_by_default_are_there() -> None:
    assert set(BY_DEFAULT) <= SITUATIONS.keys() == read().keys()


@pytest.mark.xdist_group("refusals")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DEFAULT else pytest.mark.slow) for name in SITUATIONS]
)
def test_what_three_doors_say(
    name: str, jobs: tuple[Path, FakeServer], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_repeats", lambda seconds, at_most: iter(range(1)))
    state, change, overrides = SITUATIONS[name]
    job, server = jobs
    shutil.rmtree(job)
    shutil.copytree(job.parent / state, job)
    monkeypatch.chdir(job)
    with ExitStack() as stack:
        undo = change(job) if change is not None else None
        if callable(undo):
            stack.callback(undo)
        found = ""
        for door in ("verify", "doctor", "run"):
            DataFolder.clear_instance_cache()
            said = command(door, "job.yaml", *overrides, code=None)
            found += f"--- {door}: exit code {said.code}\n{shown(door, said, job, server)}"
    sections = read()
    if os.environ.get("DATATROVE_CKPT_WRITE_GOLDEN"):
        write({**sections, name: found})
        return
    assert found == sections.get(name, ""), name


def shown(door: str, said: Printed, job: Path, server: FakeServer) -> str:
    """What counts of it, without what differs from run to run."""
    text = said.out + said.err
    if door == "doctor" and said.out:
        lines = said.out.splitlines(keepends=True)[:-1]
        text = "".join(line for line in lines if not line.startswith("ok ") and not _MACHINE.search(line)) or "nothing"
    if door == "run":
        text = said.error if "error: " in said.err else said.out
    for old, new in ((str(job), "JOB"), (server.url, "URL"), (socket.gethostname(), "HOST"), (__version__, "VERSION")):
        text = text.replace(old, new)
    return re.sub("probe-[0-9a-f]+", "probe", text).strip() + "\n"


def read() -> dict[str, str]:
    sections: dict[str, str] = {}
    with suppress(FileNotFoundError):
        for part in GOLDEN.read_text().split("=== ")[1:]:
            name, _, text = part.partition("\n")
            sections[name] = text.rstrip("\n") + "\n"
    return sections


def write(sections: dict[str, str]) -> None:
    GOLDEN.write_text("\n".join(f"=== {name}\n{sections[name]}" for name in SITUATIONS if name in sections))
