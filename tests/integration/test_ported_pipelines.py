"""Public pipelines as one YAML file each, with a Python module only where a rollout is one: their
rows are what plain Python made of the same answers; kill -9 at any point changes no byte.
"""

import json
import os
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


def run_port(command, name):
    with FakeServer(reply) as server:
        command("run", f"{name}.yaml", f"--endpoint={server.url}")


def shown(value):
    """A value as a text; of a long one its beginning and its hash."""
    text = str(value)
    return text if len(text) < 60 else f"{text[:40]}... {number(text):016x}"


@pytest.mark.parametrize("port", INPUTS)
def test_the_rows_are_those_that_plain_python_made_of_the_same_answers(port, command):
    """Until 30 November 2026 it made them here, at each run (and of evol and instruct, too)."""
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
