"""The short form of a job: what it is written out as, what it refuses, and that it runs and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

import datatrove_ckpt
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.cli.short_form import read_config
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.testing import FakeServer, outputs

JOB = {"run_folder": "runs/x", "input": "documents", "prompt": "Say {text}", "model": "m", "endpoint": "http://x"}
ROWS = [{"id": f"id {number}", "text": f"text {number}"} for number in range(3)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("documents").mkdir()
    Path("documents/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def expanded(*overrides: str, **settings: Any) -> dict[str, Any]:
    """The executor's arguments; and those of reader and runner as ``reader`` and ``runner``."""
    Path("job.yaml").write_text(yaml.safe_dump({**JOB, **settings}))
    node = read_config("job.yaml", list(overrides))["executor"]
    reader, runner = node["init_args"]["pipeline"]
    return {"class_path": node["class_path"], **node["init_args"], "reader": reader, "runner": runner["init_args"]}


def test_every_setting_goes_where_it_belongs() -> None:
    found = expanded(
        "--limit=2", "--max-tokens=60", "--pipeline.1.drain_seconds=3", max_concurrent_generations=8, keep_answers=True
    )
    assert found["reader"]["init_args"]["limit"] == 2
    assert found["runner"]["config"]["default_generation_params"] == {"max_tokens": 60}
    assert found["runner"]["config"]["max_concurrent_generations"] == 8
    assert (found["runner"]["keep_answers"], found["runner"]["drain_seconds"]) == (True, 3)
    assert (found["tasks"], found["logging_dir"]) == (1, "runs/x/logs")


@pytest.mark.parametrize(
    ("given", "reader", "arguments"),
    [
        ("documents", "JsonlReader", {"data_folder": "documents", "glob_pattern": "**/*.jsonl*"}),
        ("documents/", "JsonlReader", {"data_folder": "documents/", "glob_pattern": "**/*.jsonl*"}),
        ("documents/a.jsonl", "JsonlReader", {"data_folder": "documents", "glob_pattern": "a.json[l]"}),
        ("documents/*.jsonl", "JsonlReader", {"data_folder": "documents", "glob_pattern": "*.jsonl"}),
        ("zipped", "JsonlReader", {"data_folder": "zipped", "glob_pattern": "**/*.jsonl*"}),
        ("tables", "ParquetReader", {"data_folder": "tables", "glob_pattern": "**/*.parquet*"}),
        ("arrow/*", "IpcReader", {"data_folder": "arrow", "glob_pattern": "*"}),
        ("sheet.csv", "CSVReader", {"data_folder": ".", "glob_pattern": "sheet.cs[v]"}),
        ("saved", "HuggingFaceDatasetReader", {"dataset": "saved", "load_from_disk": True}),
        ("hf://datasets/o/n", "HuggingFaceDatasetReader", {"dataset": "o/n", "streaming": True}),
    ],
)
def test_the_reader_is_told_by_looking(given: str, reader: str, arguments: dict[str, Any]) -> None:
    for name in ("zipped/a.jsonl.gz", "tables/deep/a.parquet", "tables/README.md", "arrow/a.arrow", "sheet.csv"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("saved").mkdir()
    Path("saved/dataset_info.json").touch()
    found = expanded(input=given)["reader"]
    assert found["class_path"] == reader
    assert arguments.items() <= found["init_args"].items()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input": None}, 'job.yaml: missing key "input"'),
        ({"tasks": "many"}, 'job.yaml: tasks: "many" is not an int or null'),
        ({"slurm": "gpu"}, 'job.yaml: slurm: "gpu" is not a mapping or null'),
        ({"prompt": None}, "give prompt, or rollout"),
        ({"input": "documents/*.csv"}, r"input: documents/\*.csv holds none of \.jsonl.*no file at all"),
        ({"input": "mixed"}, r"mixed holds \.csv and \.jsonl. Name files of one kind"),
        ({"input": "both"}, r"both holds \.json and \.jsonl"),
        ({"input": "backup"}, r"backup holds b.jsonl.bak, too"),
        ({"input": "*/[ab]*"}, r"holds \.csv and "),
        ({"input": "upper"}, r"upper holds B.JSONL, too"),
        ({"input": "dict"}, r"dict holds several splits, such as dict/train"),
        (
            {"input": "s3://user:word@b c/x.jsonl"},
            r"input: s3://\*\*\* \S+ \*\*\*@b c/x.jsonl cannot be listed|cannot be listed",
        ),
        ({"max_tokens": 5, "generation_params": {"max_tokens": 6}}, "max_tokens: is in generation_params, too"),
        ({"input": "nowhere/"}, "input: nowhere/ cannot be listed: .*there is no folder nowhere/"),
        ({"input": None, "inputs": "documents"}, 'unknown key "inputs", did you mean "input"'),
        ({"rollout": "my.rollout"}, "give prompt, or rollout"),
        ({"prompt": "@nowhere.txt"}, "prompt: nowhere.txt cannot be read"),
        ({"model": None}, "model: is missing; give the name that the endpoint knows"),
        ({"max_token": 5}, 'unknown key "max_token", did you mean "max_tokens"'),
        ({"run_folder": "s3://b/x"}, "run_folder: must be a folder of this machine"),
    ],
)
def test_what_cannot_work_is_one_line(settings: dict[str, Any], message: str) -> None:
    strays = (
        "both/a.jsonl",
        "both/b.json",
        "backup/a.jsonl",
        "backup/b.jsonl.bak",
        "backup/README.md",
        "upper/a.jsonl",
        "upper/B.JSONL",
        "dict/dataset_dict.json",
    )
    for name in ("mixed/a.jsonl", "mixed/b.csv", *strays):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    with pytest.raises(ConfigError, match=message) as refused:
        expanded(**settings)
    assert "\n" not in str(refused.value)


def test_the_engine_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = expanded(endpoint=None, model="o/m")["runner"]["config"]
    assert (config["server_type"], config["model_name_or_path"]) == ("llamacpp", "hf://o/m")
    assert expanded(endpoint=None, model="o/m.gguf")["runner"]["config"]["model_name_or_path"] == "o/m.gguf"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    gguf = expanded(endpoint=None, model="package://p/m.gguf")["runner"]["config"]
    assert gguf["server_type"] == "llamacpp", "no other engine takes that"
    config = expanded(endpoint=None)["runner"]["config"]
    assert (config["server_type"], config["replicas"]) == ("vllm", 2)
    assert "replicas" not in expanded("--tp=2", endpoint=None)["runner"]["config"]


def test_a_ready_made_rollout_takes_its_settings_by_name() -> None:
    found = expanded("--max-chars-per-part=100", rollout="ChunkedRollout")["runner"]["rollout_fn"]
    assert found == {"class_path": "ChunkedRollout", "init_args": {"prompt": "Say {text}", "max_chars_per_part": 100}}
    assert expanded(rollout="chat", prompt=None)["runner"]["rollout_fn"] == "chat"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-key=sk-1"], "--api-key: other users can see command lines"),
        (["--max-tokens="], "--max-tokens: its value is empty"),
        (["--prompt.x=1"], '--prompt.x: there is no "x" inside "Say {text}"'),
    ],
)
def test_flags_that_cannot_be_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(yaml.safe_dump(JOB))
    assert main(["run", "job.yaml", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_text_on_the_command_line_that_begins_as_a_comment_is_a_text() -> None:
    found = expanded("--stop=###", "--system-prompt=# You judge", "--regex=#x", "--prompt=# {text}", "--seed=null")[
        "runner"
    ]
    settings = {"system_prompt": "# You judge", "regex": "#x", "prompt": "# {text}"}
    assert found["rollout_fn"]["init_args"] == settings
    assert (found["config"]["default_generation_params"], found["config"]["seed"]) == ({"stop": "###"}, None)


def test_slurm_gets_a_task_for_each_file(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        Path(f"documents/{number}.jsonl").touch()
    found = expanded("--slurm.time=1:00:00", slurm={"partition": "gpu"})
    assert (found["class_path"], found["tasks"], found["partition"]) == ("SlurmPipelineExecutor", 4, "gpu")
    assert (found["time"], found.get("gpus_per_task")) == ("1:00:00", None)
    assert main(["run", "job.yaml", "--dry-run"]) == 0
    assert "#SBATCH --signal=USR1@180" in capsys.readouterr().out


def test_a_job_on_the_command_line_runs_resumes_and_keeps_its_tasks(capfd: pytest.CaptureFixture[str]) -> None:
    Path("prompt.txt").write_text("Say {text}")
    with FakeServer() as server:
        command = ["run", "--input", "documents", "--prompt", "@prompt.txt", "--endpoint", server.url]
        command += ["--model", "m", "--run-folder", "runs/x", "--tasks", "2"]
        assert main(command) == 0
        assert main(command[:-2]) == 0, capfd.readouterr().err  # without --tasks: the run's own
        assert sum(server.asked.values()) == len(ROWS)
    found = outputs(Path("runs/x/output"))
    assert len(found) == 1
    assert "3 of 3 documents" in capfd.readouterr().out


def test_print_config_is_the_long_form_of_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text(yaml.safe_dump({**JOB, "stop": "no"}))
    assert main(["run", "job.yaml", "--print-config"]) == 0
    Path("long.yaml").write_text(capsys.readouterr().out)
    assert read_config("long.yaml", []) == read_config("job.yaml", [])


def test_names_of_the_short_form_are_refused_for_a_long_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("long.yaml").write_text("executor: {}")
    assert main(["run", "long.yaml", "--model", "m"]) == 2
    assert "--model: long.yaml is in the long form" in capsys.readouterr().err


def test_python_runs_the_same_job() -> None:
    async def rollout(document: Any, generate: Any) -> str:
        answer = await generate({"messages": [{"role": "user", "content": document.text}]})
        return str(answer.text)

    with FakeServer() as server:
        folder = datatrove_ckpt.run(
            input="documents", rollout=rollout, model="m", endpoint=server.url, run_folder="runs/y"
        )
    (path,) = folder.iterdir()
    assert [row["id"] for row in map(orjson.loads, path.read_bytes().splitlines())] == [row["id"] for row in ROWS]


@pytest.mark.parametrize("short", [True, False])
def test_the_whole_command_that_helps_is_printed_in_the_form_of_the_file(
    short: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A refused document, and a number of tasks that is no longer that of the file."""

    def refuse(payload: dict[str, Any], times: int) -> int | None:
        return 400 if payload["messages"][-1]["content"] == "Say text 1" else None

    skip = "--skip-bad-requests true" if short else "--pipeline.1.skip_bad_requests=true"
    accept = "--accept-changes true" if short else "--pipeline.1.accept_changes=true"
    tasks = "--tasks 2" if short else "--executor.tasks=2"
    with FakeServer(status=refuse) as server:
        Path("job.yaml").write_text(yaml.safe_dump({**JOB, "endpoint": server.url, "tasks": 3}))
        if not short:
            main(["run", "job.yaml", "--print-config"])
            Path("job.yaml").write_text(capfd.readouterr().out)
        assert main(["run", "job.yaml"]) == 1
        said = capfd.readouterr().err
        assert f"as a dead letter, add {skip} to the command. " in said
        command = "datatrove-ckpt run job.yaml"
        assert f"The whole command: {command} {accept}\nor: {command} {skip}\n" in said
        assert main(["reshard", "job.yaml", "--tasks", "2"]) == 0
        capfd.readouterr()
        assert main(["run", "job.yaml"]) == 1
        said = capfd.readouterr().err
        assert f"Go on with 2 tasks ({command} {tasks}), or choose another" in said
        assert said.index(f"{command} {tasks}") < said.index("datatrove-ckpt reshard job.yaml --tasks 3")
        assert main(["run", "job.yaml", *tasks.split(), *skip.split()]) == 0
