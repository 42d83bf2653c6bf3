"""docs/tutorial.md, docs/recipes.md and docs/tasks.md, line by line, as a person types them."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from datatrove_ckpt.run_folder.documents import OutputPath
from datatrove_ckpt.testing import FakeServer
from tests.pages import ROOT, blocks, write_documents
from tests.typed_answers import PATHS
from tests.typed_in import RECIPES, TASKS, TUTORIAL, here_instead, of, printed, type_in, write_files
from tests.yaml_jobs import write_rows

REFUSED = "datatrove-ckpt run facts.yaml --prompt 'Give this text a title: {text}'"
ENDS_WITH = {"timeout -s KILL 10 datatrove-ckpt run facts.yaml": 137, REFUSED: 1}
"""Lines of the tutorial that are to fail, with their exit codes."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_runs_as_typed(here):
    """With a real model. The quick start before it has shorter answers here."""
    shutil.copytree(ROOT / "configs", "configs")
    quickstart = Path("configs/quickstart.yaml")
    assert "max_tokens: 160" in quickstart.read_text()
    quickstart.write_text(quickstart.read_text().replace("max_tokens: 160", "max_tokens: 5"))
    type_in("datatrove-ckpt run configs/quickstart.yaml")
    write_files(TUTORIAL)
    lines = [line for block in blocks("bash", TUTORIAL) for line in block.lines]
    assert set(ENDS_WITH) <= set(lines)
    said = {line: type_in(line, ENDS_WITH.get(line, 0)) for line in lines}
    shown = next(
        line.strip()
        for line in (ROOT / TUTORIAL).read_text().splitlines()
        if line.endswith('-> "Give this text a title: {text}"')
    )
    for part in shown.split("[...]"):
        assert part in said[REFUSED]
    for name, count in {"facts": 24, "titles": 24, "checked": 4}.items():
        rows = [
            row
            for path in sorted(Path("runs", name, "output").iterdir())
            for row in path.read_text().splitlines()
        ]
        assert len({json.loads(row)["id"] for row in rows}) == len(rows) == count
    assert (
        "judged     finished; 4 done: 4 written in 1 chunk"
        in said["datatrove-ckpt status runs/quiz"]
    )


# recipes -----------------------------------------------------------------------------------------


def headings():
    return re.findall(r"^## (.*)$", (ROOT / RECIPES).read_text(), re.MULTILINE)


def run_line(line, code=0):
    words = shlex.split(line)
    if words[0] == "datatrove-ckpt":
        printed([sys.executable, "-m", "datatrove_ckpt", *words[1:]], code)
    else:
        type_in(line, code)


@pytest.mark.matrix("heading", [heading for heading in headings() if of(heading)])
def test_a_recipe_runs_as_typed(here, heading):
    """In the situation of its heading: a run that is finished, or one that a failure has
    stopped.
    """
    lines = [line for block in of(heading) for line in block.lines]
    failures = [
        status
        for word, status in (("--finished-from", 403), ("--retry-dead-letters", 400))
        if word in str(lines)
    ]
    for name in ("documents", "more_documents"):
        Path(name).mkdir()
        rows = [{"id": f"{name} {number}", "text": f"text {number}"} for number in range(6)]
        write_rows(f"{name}/a.jsonl", rows)
    with FakeServer(
        lambda payload, times: "9",  # of ten, as a judge says
        status=lambda payload, times: (
            failures[0] if failures and "text 3" in str(payload) else None
        ),
    ) as server:
        server.paths["/search"] = lambda payload: {"results": []}
        write_files(RECIPES, server)
        run_line("datatrove-ckpt run job.yaml", 1 if failures else 0)
        failures.clear()  # the cause is corrected
        for line in lines:
            run_line(here_instead(line, server))


# tasks -------------------------------------------------------------------------------------------


def fitting(payload, times):
    """An answer of the form that the request asks for."""
    if "structured_outputs" in payload:
        return payload["structured_outputs"]["choice"][0]
    if "response_format" in payload:
        schema = payload["response_format"]["json_schema"]["schema"]
        one = schema.get("items", schema)
        known = one.get("properties", {})
        answer = {name: [] if name in known else "x" for name in one["required"]}
        return json.dumps([answer, answer] if schema["type"] == "array" else answer)
    return "9"


@pytest.fixture
def type_tasks(here, command):
    """Types the lines of the page of tasks, each with further flags, in a folder with their input."""
    write_documents(here)
    for name in ("pictures/a.png", "scans/a.pdf"):
        Path(name).parent.mkdir()
        Image.new("RGB", (20, 10)).save(name)

    def type_each(*flags):
        for block in blocks("bash", TASKS):
            for line in block.lines:
                words = shlex.split(line)
                if words[0] == "datatrove-ckpt":
                    assert "1 dead" not in command(*words[1:], *flags).out, line
                else:
                    type_in(line)

    return type_each


@pytest.mark.slow
def test_each_task_runs_without_a_server_as_the_page_says(type_tasks):
    write_files(RECIPES)
    flag = "--server-type dummy"
    assert f"add `{flag}`" in (ROOT / TASKS).read_text().replace("\n", " ")
    type_tasks(*flag.split())


def test_each_task_runs_as_typed(type_tasks):
    with FakeServer(fitting) as server:
        server.paths = PATHS
        write_files(RECIPES, server)
        type_tasks()
    pairs = [row.metadata for row in OutputPath("runs/pairs/output")]
    assert [(row["n"], row["question"], row["answer"]) for row in pairs[:3]] == [
        (0, "x", "x"),
        (1, "x", "x"),
        (0, "x", "x"),
    ]
    made = {path.name for path in Path("runs").iterdir() if (path / "output").is_dir()}
    assert len(made) == sum(block.text.count("--run-folder") for block in blocks("bash", TASKS))
