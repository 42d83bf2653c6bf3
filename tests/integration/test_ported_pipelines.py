"""Public pipelines as one YAML file each, with a Python module only where a rollout is one: their
rows are what plain Python made of the same answers; kill -9 at any point changes no byte.
"""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import xxhash

from datatrove_ckpt.testing import FakeServer, outputs
from tests import golden, processes
from tests.kept import answers_kept
from tests.pages import ROOT
from tests.patience import until
from tests.yaml_jobs import write_rows

PORTS = ROOT / "tests/data/ports"
SENTIMENTS = ("positive", "neutral", "negative")


ANSWERS = {
    "<|begin_of_text|>": ("hi", "user: What is {n}?", "What is {n}?", "Why is {n} odd?\n"),
    "Rate the quality": (
        "no JSON",
        *(
            f'{{{{"input_quality": "{quality}"}}}}'
            for quality in ("poor", "average", "good", "excellent")
        ),
    ),
    "I want you act": ("#Rewritten Prompt#: {n}", "evolved {n}", "evolved {n} more\n", "do {n}"),
    "evolved": ("Sorry, no answer.", "short", "a long answer {n}", "another long answer {n}"),
    "Come up with a series": (
        "Name a colour of thing {n}.\n10. Draw a map of {n} now.\n11.  Add the numbers up to {n}",
        "Write a program for {n}\n10. Too short\n11 . Is thing {n} nice or bad?",
    ),
    "Task": (" Yes", "No", "no, it is not", "yes"),
    "Generate an input": (
        "Class label: good\nText {n}\nClass label: bad\nOther {n}\n",
        "Class label: bad:\nText\nClass label: same\nsame",
        "none",
    ),
    "Come up with examples": (
        "Example 1\nInput: in {n}\nOutput: out {n}\nExample 2\nOutput: alone",
        "Output: only {n}",
        "Example 1\nInput: {n}\nOutput: {n}",
    ),
    "For the following paragraph": ("Here is a paraphrased version:\nOther {n}", "Other {n}"),
    "Read the text": ("- Question: {n}? Answer: a\n- Question: b? Answer: {n}", "I cannot."),
    "Paraphrase the provided": ("Paraphrased Text: short {n}", "Short {n}"),
    "Rewrite knowledge": ("Passage 1:\nFacts of {n}", "Facts of {n}", "Passage:\n"),
    "Extract the key": ("- one {n}\n-  two", "* one {n}"),
}


def number(*parts):
    return xxhash.xxh3_64_intdigest(" ".join(map(str, parts)).encode())


def reply(payload, times):
    """The same text for the same payload, of the form that its question asks for."""
    asked = payload.get("prompt") or payload["messages"][-1]["content"]
    n = number(payload["model"], asked, *filter(None, [payload.get("seed")]))
    for start, answers in ANSWERS.items():
        if asked.startswith(start):
            return answers[n % len(answers)].format(n=n % 17)
    if asked.startswith("Analyze this product review"):
        found = {"sentiment": SENTIMENTS[n % 3], "complaints": [f"c{n % 5}"]}
        return "no JSON" if n % 7 == 0 else json.dumps(found)
    if asked.startswith("Analyze all reviews"):
        return json.dumps({"themes": [f"t{n % 9}"]})
    if asked.startswith("Extract"):
        return "\n".join(f"Problem {k + 1}: problem {n % 1000}.{k}" for k in range(n % 3))
    if asked.startswith("Say 'proof'"):
        return ("proof", "not\n")[n % 2]
    if asked.startswith("Say 'invalid'"):
        return ("invalid", "not", "not\n")[n % 3]
    if asked.startswith("Solve"):
        return f"So \\boxed{{{n % 3}}}" if n % 5 else "I do not know."
    if asked.startswith("Problem:"):
        return f"Judgement: {'Yes' if n % 2 else 'No'}"
    if asked.startswith("Rating:"):
        return "\n".join(f"Rating: {(n >> k) % 5 + 1}" for k in (0, 8, 16)) if n % 3 else "None."
    return f"answer {n % 1000} of {payload['model']}"


INPUTS = {
    "reviews": (
        "reviews.jsonl",
        [
            {
                "review_id": f"r{n:02d}",
                "review_text": f"review {n}",
                "category": f"c{n % 4}",
                "rating": n % 5,
            }
            for n in range(40)
        ],
    ),
    "math": ("forum.jsonl", [{"id": f"f{n:02d}", "discussion": f"forum {n}"} for n in range(30)]),
    "feedback": (
        "instructions.jsonl",
        [{"id": f"i{n:02d}", "prompt": f"do {n}"} for n in range(15)],
    ),
    "magpie": ("none.jsonl", []),
    "evol": (
        "alpaca.jsonl",
        [{"id": f"a{n:02d}", "instruction": f"do {n}", "input": ""} for n in range(30)],
    ),
    "instruct": (
        "seeds.jsonl",
        [{"id": f"s{n:02d}", "instruction": f"Seed task {n}"} for n in range(20)],
    ),
    "nemotron": (
        "crawl.jsonl",
        [
            {"id": f"c{n:02d}", "text": f"text of page {n} " * (n % 5), "bucketed_results": n}
            for n in range(20)
        ],
    ),
}
NOT_SHOWN = {"rollout_results", "file_path"}
SLOTS = 4  # requests at one time
FLAGS = ("--sync-seconds=0.05", f"--max-concurrent-generations={SLOTS}", "--records-per-chunk=7")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for path in PORTS.iterdir():
        if path.is_file():
            shutil.copy(path, ".")
    for name, rows in INPUTS.values():
        write_rows(name, rows)
    return tmp_path


def ask(text, model="m"):
    return reply({"messages": [{"content": text}], "model": model}, 0)


def run_port(command, name):
    with FakeServer(reply) as server:
        command("run", f"{name}.yaml", f"--endpoint={server.url}")


def columns(port, step, *names, part="output"):
    """The rows of a step as a set, without order."""
    files = sorted(Path(port, step, part).glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    found = {tuple(row[name] for name in names) for row in rows}
    assert len(found) == len(rows)
    return found


def shown(value):
    """A value as a text; of a long one its beginning and its hash."""
    text = str(value)
    return text if len(text) < 60 else f"{text[:40]}... {number(text):016x}"


@pytest.mark.parametrize("port", ["reviews", "math", "feedback", "magpie", "nemotron"])
def test_the_rows_are_those_that_plain_python_made_of_the_same_answers(port, command):
    """Until 30 November 2026 it made them here, at each run."""
    run_port(command, port)
    lines = []
    for folder in sorted(Path(port).glob("*/output")):
        rows = [row for file in folder.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
        lines += [f"{folder.parent.name}: {len(rows)}"]
        lines += sorted(
            json.dumps({name: shown(row[name]) for name in sorted(row.keys() - NOT_SHOWN)})
            for row in rows
        )
    golden.hold("ports", port, "\n".join(lines))


def test_evol(command):
    run_port(command, "evol")
    result, rejected = set(), set()
    drawn = columns("evol", "evolved", "id", "given", "method", part="input")
    assert {id_ for id_, *_ in drawn} == {row["id"] for row in INPUTS["evol"][1]}
    assert len({method for *_, method in drawn}) == 5
    for id_, given, method in drawn:
        text = ask(
            f"I want you act as a Prompt Rewriter.\n{method}\n#The Given Prompt#:\n{given}\n"
            "#Rewritten Prompt#:\n"
        )
        output = "" if "#" in text or text.strip() == given.strip() else ask(text)
        if len(output) >= 12 and "sorry" not in output.lower():
            result.add((id_, text, output))
        else:
            rejected.add((id_, text))
    assert columns("evol", "result", "id", "instruction", "output") == result
    assert columns("evol", "rejected", "id", "instruction") == rejected
    assert result
    assert rejected


def test_instruct(command):
    run_port(command, "instruct")
    drawn = columns("instruct", "proposed", "id", "tasks", part="input")
    assert len(drawn) == 12
    tasks = set()
    for _, seeds in drawn:
        assert len(set(re.findall("Seed task [0-9]+", seeds))) == 8
        answer = ask(f"Come up with a series of tasks:\n{seeds}\n9.")
        proposed = [" ".join(task.split()) for task in re.split(r"\n\d+\s?\. ", answer)]
        tasks |= {task for task in proposed if len(task.split()) > 3 and "map" not in task}
    tasks = {task for task in tasks if not task.startswith("Write a program")}
    assert {task for (task,) in columns("instruct", "tasks", "task")} == tasks
    instances = set()
    for task in tasks:
        if "yes" in ask(f"Task: {task}\nIs it classification?").lower():
            answer = ask(
                f"Generate an input that corresponds to each of the class labels.\n\nTask: {task}\n"
            )
            parts = [part.strip().partition("\n") for part in answer.split("Class label:")[1:]]
            pairs = [(text.strip(), label) for label, _, text in parts]
        else:
            answer = ask(f"Come up with examples for the following task.\n\nTask: {task}\n")
            parts = [part.partition("Output:") for part in re.split(r"Example \d*", answer)]
            pairs = [(a.replace("Input:", "").strip(), b.strip()) for a, _, b in parts]
        instances |= {
            (task, text, output)
            for text, output in pairs
            if output not in ("", text) and not output.endswith(":")
        }
    assert columns("instruct", "instances", "task", "input", "output") == instances
    rejected = tasks - {task for task, *_ in instances}
    assert {task for (task,) in columns("instruct", "rejected", "task")} == rejected
    assert instances
    assert rejected


def rows_of(folder):
    found = outputs(Path(folder))
    return {path: data for path, data in found.items() if "/output/" in path or "/input/" in path}


@pytest.mark.slow
@pytest.mark.parametrize("port", INPUTS)
def test_kill_9_changes_no_byte_and_repeats_only_what_was_in_flight(port, command):
    kills = int(os.environ.get("KILLS", "3"))
    killer = SimpleNamespace(process=None, answers=0, last=0)

    def kept():
        return sum(map(answers_kept, Path(port).glob("*/checkpoints")))

    def answer(payload, times):
        """Kills the process when all answers but those on their way are written down."""
        killer.answers += 1
        if killer.process is not None and killer.answers == killer.last:
            until(lambda: kept() >= killer.kept + killer.answers - SLOTS)
            os.killpg(killer.process.pid, signal.SIGKILL)
        return reply(payload, times)

    with FakeServer(answer, delay=lambda payload, times: 0.01) as server:
        words = ["run", f"{port}.yaml", *FLAGS, f"--endpoint={server.url}"]
        command(*words)
        whole = rows_of(port)
        requests = len(server.payloads)
        shutil.rmtree(port)
        server.payloads.clear()
        for kill in range(kills):
            killer.kept = kept()
            killer.answers = 0
            killer.last = requests // (kills + 1) + kill % 3
            killer.process = processes.start([sys.executable, "-m", "datatrove_ckpt", *words])
            killer.process.communicate()
            assert killer.process.returncode == -signal.SIGKILL
        killer.process = None
        command(*words)
        assert rows_of(port) == whole
        assert requests <= len(server.payloads) <= requests + 2 * SLOTS * kills


@pytest.mark.slow
def test_two_starts_at_once_end_with_the_rows_of_one():
    """One is refused while the other waits for its first answer, and nothing is sent twice."""
    with FakeServer(reply, hold_after=0) as server:
        command = [sys.executable, "-m", "datatrove_ckpt", "run", "math.yaml", *FLAGS]
        command.append(f"--endpoint={server.url}")
        both = [processes.start(command) for _ in range(2)]
        until(lambda: any(running.poll() is not None for running in both))
        server.release()
        said = [running.communicate()[0] for running in both]
        assert sorted(running.returncode for running in both) == [0, 1], said
        refused = next(text for text, running in zip(said, both, strict=True) if running.returncode)
        assert "Another process works on this task" in refused
        assert "math/run.lock" in refused
        assert len(columns("math", "final", "id")) > 10
        sent = server.asked.total()
        assert processes.run([*command, "--run-folder=other"]).returncode == 0
        assert server.asked.total() == 2 * sent
