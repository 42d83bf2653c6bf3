"""Public pipelines as one YAML file each, with a Python module only where a rollout is one: their
rows are what plain Python makes of the same answers; kill -9 at any point changes no byte.
"""

import json
import os
import re
import shutil
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import xxhash

from datatrove_ckpt.testing import FakeServer, outputs
from tests import processes
from tests.pages import ROOT
from tests.patience import until
from tests.yaml_jobs import write_rows

PORTS = ROOT / "tests/data/ports"
SENTIMENTS = ("positive", "neutral", "negative")


def number(*parts):
    return xxhash.xxh3_64_intdigest(" ".join(map(str, parts)).encode())


def reply(payload, times):
    """The same text for the same payload, of the form that its question asks for."""
    asked = payload["messages"][-1]["content"]
    n = number(payload["model"], asked)
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
}
FLAGS = ("--sync-seconds=0.05", "--max-concurrent-generations=4", "--records-per-chunk=7")


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


def table(folder, name):
    files = sorted(Path(folder, name, "output").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def ask(text, model="m"):
    return reply({"messages": [{"content": text}], "model": model}, 0)


def test_reviews(command):
    with FakeServer(reply) as server:
        command("run", "reviews.yaml", f"--endpoint={server.url}")
    kept, rejected = defaultdict(list), []
    for row in INPUTS["reviews"][1]:
        text = ask(
            f"Analyze this product review: {row['review_text']}\nCategory: {row['category']}\n"
            f"Rating: {row['rating']}"
        )
        if text == "no JSON":
            rejected.append(row["review_id"])
        else:
            found = json.loads(text)
            line = f"Review {row['review_id']}: {found['sentiment']} [{found['complaints'][0]}]"
            kept[row["category"]].append(line)
    assert [row["review_id"] for row in table("reviews", "rejected")] == rejected
    assert rejected
    themes = {row["id"]: row for row in table("reviews", "themes")}
    for category, lines in kept.items():
        assert themes[category]["text"].split("\n") == lines
        assert themes[category]["reviews"] == len(lines)
    (strategy,) = table("reviews", "strategy")
    assert strategy["text"].count("\n") == len(kept) - 1


def test_math(command):
    with FakeServer(reply) as server:
        command("run", "math.yaml", f"--endpoint={server.url}")
    problems = {}
    for row in INPUTS["math"][1]:
        found = re.findall(
            r"Problem \d+: (.*)",
            ask(
                f"Extract all math problems from this discussion, as 'Problem 1: ...'.\n\n{row['discussion']}"
            ),
        )
        problems |= {f"{row['id']}/{k}": text for k, text in enumerate(found)}
    assert {row["id"]: row["problem"] for row in table("math", "extract")} == problems
    final, rejected, proofs = set(), set(), set()
    for name, problem in problems.items():
        if (
            ask(f"Say 'proof' if this problem is a proof question, else 'not'.\n\n{problem}")
            == "proof"
        ):
            proofs.add(name)
            continue
        if ask(f"Say 'invalid' if this problem is invalid, else 'not'.\n\n{problem}") == "invalid":
            continue
        boxed = {}
        for k in range(4):
            text = ask(
                f"Solve the following math problem, try {k}. Put the final answer inside "
                f"\\boxed{{}}.\n\n{problem}"
            )
            match = re.search(r"\\boxed\{(.*?)\}", text)
            boxed[f"{name}#{k}"] = match[1] if match else ""
        votes = Counter(value for value in boxed.values() if value)
        if not votes:
            continue
        expected = min(votes, key=lambda value: (-votes[value], value))
        for one, value in boxed.items():
            judgement = ask(
                f"Problem: {problem}\nPredicted answer: {value}\nExpected answer: {expected}\n"
                "Judgement: Yes or No",
                "judge",
            )
            (final if value == expected or "Yes" in judgement else rejected).add(one)
    assert {row["id"] for row in table("math", "proofs")} == proofs
    assert {row["id"] for row in table("math", "final")} == final
    assert {row["id"] for row in table("math", "rejected")} == rejected
    assert len(final) > 10
    assert rejected


def test_feedback(command):
    with FakeServer(reply) as server:
        command("run", "feedback.yaml", f"--endpoint={server.url}")
    pairs, unrated = {}, set()
    for row in INPUTS["feedback"][1]:
        answers = [ask(row["prompt"], model) for model in ("m1", "m2", "m3")]
        texts = "\n".join(f"<text {k}>\n{answer}" for k, answer in enumerate(answers, 1))
        ratings = re.findall(
            r"Rating: (\d)",
            ask(f"Rating: [Rating]\n## Instruction\n{row['prompt']}\n{texts}", "judge"),
        )
        if not ratings:
            unrated.add(row["id"])
        elif len({*ratings}) > 1:
            order = sorted(range(3), key=lambda k: (-int(ratings[k]), k))
            pairs[row["id"]] = answers[order[0]], answers[order[-1]]
    found = {row["id"]: (row["chosen"], row["rejected"]) for row in table("feedback", "pairs")}
    assert found == pairs
    assert {row["id"] for row in table("feedback", "unrated")} == unrated
    assert pairs
    assert unrated


def rows_of(folder):
    found = outputs(Path(folder))
    return {path: data for path, data in found.items() if "/output/" in path or "/input/" in path}


@pytest.mark.slow
@pytest.mark.parametrize("port", INPUTS)
def test_kill_9_changes_no_byte_and_repeats_only_what_was_in_flight(port):
    kills = int(os.environ.get("KILLS", "6"))
    with FakeServer(reply, delay=lambda payload, times: 0.01) as server:
        command = [sys.executable, "-m", "datatrove_ckpt", "run", f"{port}.yaml", *FLAGS]
        command.append(f"--endpoint={server.url}")
        done = processes.run(command)
        assert done.returncode == 0, done.stdout + done.stderr
        whole = rows_of(port)
        requests = len(server.payloads)
        shutil.rmtree(port)
        server.payloads.clear()
        server.asked.clear()
        for kill in range(kills):
            target = len(server.payloads) + requests // (kills + 1) + kill % 3
            running = processes.start(command)
            until(lambda: len(server.payloads) >= target or running.poll() is not None)  # noqa: B023
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
        done = processes.run(command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert rows_of(port) == whole
        # At most four are sent and not answered, and four are answered and not recorded.
        assert requests <= len(server.payloads) <= requests + 8 * kills


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
        assert len(table("math", "final")) > 10
        sent = server.asked.total()
        assert processes.run([*command, "--run-folder=other"]).returncode == 0
        assert server.asked.total() == 2 * sent
