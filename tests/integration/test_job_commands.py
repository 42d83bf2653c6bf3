"""Commands on a run of Hugging Face Jobs: its checkpoints are in the bucket alone, whatever lies on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import yaml

from datatrove_ckpt.jobs_executor import JobsPipelineExecutor, _Job
from datatrove_ckpt.testing import FakeServer
from tests.commands import Command
from tests.hub import FakeHub
from tests.hub.jobs import Jobs

BUCKET = "someone/work"
URL = f"hf://buckets/{BUCKET}"
ROWS = 12


@pytest.fixture(autouse=True)
def here(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    jobs = Jobs(hub, tmp_path / "jobs")
    rows = (json.dumps({"id": f"id {n}", "text": f"text {n}"}) + "\n" for n in range(ROWS))
    hub.put(BUCKET, {"input/a.jsonl": "".join(rows).encode()}, kind="bucket")
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    jobs.close()


def write(name: str, **changed: Any) -> dict[str, Any]:
    """A short form of Jobs."""
    content = {"run_folder": f"{URL}/{name}", "input": f"{URL}/input/*.jsonl", "prompt": "Say {text}", "model": "fake"}
    content |= {"endpoint": "http://127.0.0.1:1", "records_per_chunk": 2, "mirror_seconds": 0.2}
    content |= {"jobs": {"flavor": "cpu-basic", "poll_interval": 0.1}, **changed}
    Path(f"{name}.yaml").write_text(yaml.safe_dump(content))
    return content


def begin(command: Command, name: str, code: int = 0, **changed: Any) -> None:
    """What the run of a file would leave in the bucket, made in this process with a disk that is then gone."""
    content = write(name, **changed)
    printed = command("run", f"{name}.yaml", "--print-config").out
    long = yaml.safe_load(printed)
    executor, arguments = long["executor"], long["executor"]["init_args"]
    executor["class_path"] = "LocalPipelineExecutor"
    for key in [*content["jobs"], "job_name"]:
        arguments.pop(key, None)
    arguments["pipeline"][1]["init_args"] |= {
        "checkpoints_local_dir": str(Path(mkdtemp(dir=".."), "checkpoints")),
        "checkpoints_remote_dir": changed.get("checkpoints_remote_dir", f"{URL}/{name}/logs/checkpoints"),
    }
    Path("../long.yaml").write_text(yaml.safe_dump(long))
    for rank in range(arguments["tasks"]):  # in this process, where the hub's uploads are replaced
        command("run", "../long.yaml", "--rank", rank, code=code if rank else 0)


def test_doctor_looks_at_the_mirror_and_says_what_jobs_lack(here: Path, command: Command) -> None:
    with FakeServer() as server:
        begin(command, "w", endpoint=server.url)
        long = yaml.safe_load(Path("../long.yaml").read_text())
        runner = long["executor"]["init_args"]["pipeline"][1]["init_args"]
        del runner["checkpoints_remote_dir"]
        runner |= {"checkpoints_local_dir": "checkpoints"}
        runner["output_writer"]["init_args"]["output_folder"] = "output"
        long["executor"]["init_args"]["logging_dir"] = "logs"
        Path("local.yaml").write_text(yaml.safe_dump(long))
        command("run", "local.yaml", "--pipeline.0.limit=2")
        said = command("doctor", "w.yaml")
        assert "no problem, 1 warning: " in said
        assert f"{server.url} is this machine, which the jobs cannot reach" in said
        write("w", endpoint=server.url, tasks=2)
        assert "tasks: 1 -> 2" in command("doctor", "w.yaml", code=1)
        Path("here.jsonl").write_text('{"id": "a", "text": "b"}')
        write("new", endpoint=server.url, input="here.jsonl")
        assert "a job of Hugging Face starts with an empty disk" in command("doctor", "new.yaml", code=1)
        content = write("new", model="org/model")
        del content["endpoint"]
        Path("new.yaml").write_text(yaml.safe_dump(content))
        assert "no problem, no warning" in command("doctor", "new.yaml")


@pytest.mark.parametrize("tasks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_reshard_deals_out_a_copy_of_the_mirror_which_is_the_mirror_from_then_on(
    hub: FakeHub, here: Path, command: Command, tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status(payload: dict[str, Any], times: int) -> int | None:
        return 400 if "text 7" in str(payload) else None

    def of_run(below: str) -> dict[str, bytes]:
        files = hub.files(BUCKET, kind="bucket")
        return {name.removeprefix(below): data for name, data in files.items() if name.startswith(below)}

    rows = hub.files(BUCKET, kind="bucket")["input/a.jsonl"].splitlines(keepends=True)
    hub.put(BUCKET, {"two/a.jsonl": b"".join(rows[:3]), "two/b.jsonl": b"".join(rows[3:])}, kind="bucket")
    settings: dict[str, Any] = {"tasks": 2, "max_concurrent_generations": 1, "input": f"{URL}/two/*.jsonl"}
    with FakeServer(status=status) as server:
        begin(command, "z", code=3, endpoint=server.url, **settings)
    newer = "00001_chunk_00003.jsonl"  # published by a job that was killed before its next upload
    hub.put(BUCKET, {f"z/output/{newer}": rows[9] + rows[10]}, kind="bucket")
    before, mirror = of_run("z/"), of_run("z/logs/checkpoints/")
    with FakeServer() as server:
        settings["endpoint"] = server.url
        write("z", **settings)
        command("reshard", "z.yaml", "--tasks", tasks, "--dry-run")
        with monkeypatch.context() as patch:
            patch.setattr(JobsPipelineExecutor, "_alive", lambda executor: [_Job("job1", "URL-OF-JOB", [0], {})])
            assert "1 job is at work: URL-OF-JOB." in command("reshard", "z.yaml", "--tasks", tasks, code=1).error
        assert of_run("z/") == before
        said = command("reshard", "z.yaml", "--tasks", tasks)
        new = f"{URL}/z/logs/checkpoints.resharded-1"
        flags = f"--executor.tasks={tasks} --pipeline.1.checkpoints_remote_dir={new}"
        named = f"tasks: {tasks} and checkpoints_remote_dir: {new}"
        assert f"Go on with datatrove-ckpt run z.yaml {flags}, or set {named} in the file.\n" in said
        assert of_run("z/logs/checkpoints/") == mirror
        assert newer not in of_run("z/output/")
        assert f"reshard has made {new} of it." in command("run", "z.yaml", code=2)
        assert [path.name for path in here.iterdir()] == ["z.yaml"]
        settings |= {"tasks": tasks, "checkpoints_remote_dir": new, "retry_errors": True}
        if tasks == 1:
            begin(command, "z", **settings)
        else:
            write("z", **settings)
            command("run", "z.yaml")
        assert not {f"text {n}" for n in range(7)} & {question.split(" ", 1)[-1] for question in server.asked}
    ids = [json.loads(line)["id"] for data in of_run("z/output/").values() for line in data.splitlines()]
    assert sorted(ids) == sorted(f"id {n}" for n in range(ROWS))
    assert "no problem" in command("verify", "z.yaml", "--full")
    assert f"{ROWS} done" in command("status", f"{URL}/z")
