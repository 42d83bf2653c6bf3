"""Commands on a run of Hugging Face Jobs: its checkpoints are in the bucket alone, whatever lies on
this machine.
"""

import json
from pathlib import Path
from tempfile import mkdtemp

import pytest
import yaml

from datatrove_ckpt.testing import FakeServer
from tests.hub.jobs import Jobs

BUCKET = "someone/work"
URL = f"hf://buckets/{BUCKET}"


@pytest.fixture(autouse=True)
def here(hub, tmp_path, monkeypatch):
    jobs = Jobs(hub, tmp_path / "jobs")
    rows = (json.dumps({"id": f"id {n}", "text": f"text {n}"}) + "\n" for n in range(3))
    hub.put(BUCKET, {"input/a.jsonl": "".join(rows).encode()}, kind="bucket")
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    jobs.close()


def write(name, **changed):
    """A short form of Jobs."""
    content = {
        "run_folder": f"{URL}/{name}",
        "input": f"{URL}/input/*.jsonl",
        "prompt": "Say {text}",
        "model": "fake",
    }
    content |= {"endpoint": "http://127.0.0.1:1", "records_per_chunk": 2, "mirror_seconds": 0.2}
    content |= {"jobs": {"flavor": "cpu-basic", "poll_interval": 0.1}, **changed}
    Path(f"{name}.yaml").write_text(yaml.safe_dump(content))
    return content


def begin(command, name, **changed):
    """What the run of a file would leave in the bucket, made in this process with a disk that is
    then gone.
    """
    content = write(name, **changed)
    printed = command("run", f"{name}.yaml", "--print-config").out
    long = yaml.safe_load(printed)
    executor, arguments = long["executor"], long["executor"]["init_args"]
    executor["class_path"] = "LocalPipelineExecutor"
    for key in [*content["jobs"], "job_name"]:
        arguments.pop(key, None)
    arguments["pipeline"][1]["init_args"] |= {
        "checkpoints_local_dir": str(Path(mkdtemp(dir=".."), "checkpoints")),
        "checkpoints_remote_dir": f"{URL}/{name}/logs/checkpoints",
    }
    arguments["workers"] = 1  # in this process, where the hub's uploads are replaced
    Path("../long.yaml").write_text(yaml.safe_dump(long))
    command("run", "../long.yaml")


def test_doctor_looks_at_the_mirror_and_says_what_jobs_lack(here, command):
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
        assert "no problem, no warning: " in command("doctor", "w.yaml")
        write("w", endpoint=server.url, tasks=2)
        assert "tasks: 1 -> 2" in command("doctor", "w.yaml", code=1)
        Path("here.jsonl").write_text('{"id": "a", "text": "b"}')
        write("new", endpoint=server.url, input="here.jsonl")
        assert "a job's disk goes with it" in command("doctor", "new.yaml", code=1)
        content = write("new", model="org/model")
        del content["endpoint"]
        Path("new.yaml").write_text(yaml.safe_dump(content))
        assert "no problem, no warning" in command("doctor", "new.yaml")
