"""``run --sample``: what it says of the whole run, compared with the whole run."""

import gzip
import json
import random
import re
from collections import Counter
from contextlib import ExitStack
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datatrove_ckpt.checkpoint.lock import Lock
from datatrove_ckpt.testing import FakeServer, outputs
from tests.jobs import rejects
from tests.yaml_jobs import write_input, write_rows

PRICES = "{prompt: 2, cached: 0.2, cache_write: 2.5, completion: 8, tiers: {flex: 0.4}}"


def words(seed, spread):
    """Words whose number is lognormal, from the seed."""
    return "word " * max(1, int(random.Random(str(seed)).lognormvariate(2.5, spread)))


def job(server, given, *more):
    words = ("run", "--input", given, "--prompt", "Say {text}", "--model", "m")
    return (*words, "--endpoint", server.url, *more)


def jsonl(folder, rows):
    write_rows(folder / "1.jsonl", rows)


def several(folder, rows, count=4):
    for number in range(count):
        part = "".join(f"{json.dumps(row)}\n" for row in rows[number::count])
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(part.encode()))


def csv(folder, rows):
    lines = "".join(f"{row['id']},{row['text']}\n" for row in rows)
    (folder / "1.csv").write_text(f"id,text\n{lines}")


def parquet(folder, rows):
    pq.write_table(pa.Table.from_pylist(rows), folder / "1.parquet", row_group_size=200)


JOBS = {
    "JSON lines": (jsonl, 0.3, 0.3, ()),
    "long texts": (jsonl, 1.2, 0.3, ()),
    "long answers": (jsonl, 0.3, 1.2, ()),
    "both": (jsonl, 1.0, 1.0, ()),
    "gzip, tasks": (several, 0.7, 0.7, ("--tasks=4",)),
    "gzip, a task": (several, 0.7, 0.7, ("--tasks=1",)),
    "many tasks": (partial(several, count=20), 0.3, 0.3, ("--tasks=20",)),
    "CSV": (csv, 0.7, 0.7, ()),
    "Parquet": (parquet, 0.7, 0.7, ()),
    "a limit": (jsonl, 0.7, 0.7, ("--limit=300", "--tasks=1")),
    "rollouts": (jsonl, 0.7, 0.7, ("--rollouts-per-document=3",)),
    "cache writes": (jsonl, 1.0, 0.3, ()),
}
NUMBER = r"([\d,.]+(?: [kM])?)"


def caching(payload):
    """A usage: a third of the prompts is written to the server's cache, others begin there."""
    prompt = len(payload["messages"][0]["content"].split())
    written = prompt * (random.Random(str(payload)).random() < 0.3)
    details = {"cached_tokens": (prompt - written) // 2, "cache_write_tokens": written}
    return {"prompt_tokens": prompt, "completion_tokens": 9, "prompt_tokens_details": details}


def number(text):
    digits, _, unit = text.replace(",", "").partition(" ")
    return float(digits) * {"": 1, "k": 1e3, "M": 1e6}[unit]


def likely(said, kind):
    """The estimate, and its range."""
    found = re.search(rf"^  {kind} .*?{NUMBER}(?: \({NUMBER} to {NUMBER}\))?$", said, re.MULTILINE)
    value, low, high = found.groups()
    return number(value), number(low or value), number(high or value)


@pytest.mark.slow
def test_nine_times_in_ten_a_whole_run_takes_what_its_sample_says(tmp_path, command):
    outside = []
    for name, (write, text_spread, answer_spread, flags) in JOBS.items():
        folder = tmp_path / name
        (folder / "in").mkdir(parents=True)
        rows = [{"id": str(seed), "text": words(seed, text_spread)} for seed in range(600)]
        write(folder / "in", rows)

        def answer(payload, times, spread=answer_spread, caches=name == "cache writes"):
            if caches:
                server.usage = caching(payload)
            return words(payload, spread)

        with FakeServer(answer) as server:
            run = job(server, folder / "in", "--prices", PRICES, *flags)
            said = command(*run, "--run-folder", folder / "sampled", "--sample", 50).out
            command(*run, "--run-folder", folder / "run")
        work = command.json("status", folder / "run")["totals"]["work"]
        truth = {
            "requests": work["requests"],
            "prompt tokens": work["prompt_tokens"],
            "completion tokens": work["completion_tokens"],
            "cost": work["cost"] / 1e9,
            "cost, flex": 0.4 * work["cost"] / 1e9,
        }
        for kind, amount in truth.items():
            value, low, high = likely(said, kind)
            assert low <= value <= high <= 8 * low
            if not 0.99 * low <= amount <= 1.01 * high:  # three digits are printed
                outside.append((name, kind, low, amount, high))
    assert len(outside) <= len(JOBS) * len(truth) / 10, outside


def test_a_sample_of_the_whole_input_is_exact_and_says_what_is_wrong_with_its_answers(
    tmp_path, command
):
    jsonl(tmp_path, [{"id": "1", "text": "a b"}, {"id": "2", "text": "c"}])
    with FakeServer(
        lambda payload, times: "" if payload["messages"][0]["content"] == "Say c" else "x"
    ) as server:
        server.finish_reason = "length"
        said = command(*job(server, tmp_path), "--run-folder", tmp_path / "run", "--sample", 5).out
    assert "estimate for 2 documents:\n" in said
    assert likely(said, "requests") == (2, 2, 2)
    assert likely(said, "prompt tokens") == (5, 5, 5)
    assert " and 1 of 2 answers is empty.\n" in said
    assert "cost" not in said


@pytest.mark.parametrize("number", [9, 12])
def test_a_sample_takes_documents_of_all_tasks(here, server, command, number):
    write_input(here, *[[f"{task}{index}" for index in range(5)] for task in "abc"])
    words = job(server, "input", "--run-folder", "run", "--tasks=3")
    said = command(*words, "--sample", number)
    assert len(server.asked) == number
    assert {asked.removeprefix("Say ")[0] for asked in server.asked} == {*"abc"}
    assert "reorders" not in said


def test_an_estimate_counts_in_whole_numbers(tmp_path, command):
    jsonl(tmp_path, [{"id": str(number), "text": "a" * number} for number in range(1, 8)])
    with FakeServer() as server:
        said = command(*job(server, tmp_path), "--run-folder", tmp_path / "run", "--sample", 3).out
    estimates = re.findall(
        r"estimate for (.*) documents:|^  (?:requests|\S+ tokens) .*   (.*)$", said, re.M
    )
    assert len(estimates) == 4
    assert "." not in str(estimates)


# Settings of a sample of 6 documents, and of the run of 20; how many requests the run still sends.
TAKEN = {
    "equal requests": ({}, {}, 14),
    "a seed for each request": ({"seed": 3}, {"seed": 3}, 14),
    "more rollouts": ({}, {"rollouts-per-document": 2}, 34),
    "another prompt": ({"prompt": "Tell {text}"}, {}, 20),
    "another server": ({"endpoint": "the same by another name"}, {}, 20),
    "another number of tasks": ({"tasks": 1}, {}, 16),  # the second task begins to count anew
    "stopped": ({}, {}, 17),
}


@pytest.mark.matrix("case", TAKEN)
def test_the_run_takes_what_a_sample_was_answered(here, command, case):
    of_sample, of_run, left = TAKEN[case]
    write_input(here, *[[f"{part} {number}" for number in range(10)] for part in "ab"])
    refused = set()
    with FakeServer(status=rejects(refused, 401)) as server:
        settings = {
            "prompt": "Say {text}",
            "tasks": 2,
            "endpoint": server.url,
            "max-concurrent-generations": 1,
            "prices": PRICES,
        }

        def run(*flags, **changed):
            words = [f"--{name}={value}" for name, value in {**settings, **changed}.items()]
            return command("run", "--input", "input", "--model", "m", *words, *flags, code=None)

        if "endpoint" in of_sample:
            of_sample = {"endpoint": server.url.replace("127.0.0.1", "localhost")}
        if case == "stopped":
            refused.add("Say b 5")
        run("--run-folder", "run", "--sample", 6, **of_sample)
        refused.clear()
        sent = Counter()
        for folder in ("run", "whole"):
            server.payloads.clear()
            run("--run-folder", folder, **of_run)
            sent[folder] = len(server.payloads)
    assert sent["run"] == left
    assert outputs(here / "run/output") == outputs(here / "whole/output")
    state = command.json("status", "run")
    whole = command.json("status", "whole")["totals"]["work"]
    work = state["totals"]["work"]
    assert work["cached"] == sent["whole"] - left
    assert state["sampled"]["cost"] > 0
    if work["cached"] and case != "another number of tasks":  # which takes a half of them
        assert work["cost"] + state["sampled"]["cost"] == whole["cost"]


def test_the_cost_of_the_whole_input_counts_the_answers_of_samples(here, server, command):
    write_input(here, [f"text {number}" for number in range(10, 30)])
    slow = ("--records-per-chunk=1", "--max-concurrent-generations=1")
    words = job(server, "input", "--run-folder", "run", "--prices", PRICES, *slow)
    command(*words, "--sample", 5)
    command(*words, "--until", 8)
    estimated = re.search(r"; about ([\d.]+) for the whole input", command("status", "run").out)[1]
    command(*words)
    state = command.json("status", "run")
    paid = state["totals"]["work"]["cost"] + state["sampled"]["cost"]
    assert float(estimated) == pytest.approx(paid / 1e9, rel=0.2)


@pytest.mark.parametrize("state", ["runs", "damaged"])
def test_a_sample_that_runs_or_is_damaged_is_left_out(here, server, command, state):
    write_input(here, ["a", "b"])
    words = job(server, "input", "--run-folder", "run")
    command(*words, "--sample", 1)
    folder = here / "run/checkpoints/sample-00001"
    with ExitStack() as stack:
        if state == "runs":
            stack.callback(Lock(folder / "00000/lock").release)
        else:
            (folder / "sampled.json").write_text("{")
        said = command(*words)
    assert sorted(server.asked.values()) == [1, 2]
    assert ("are not used" in said) == (state == "damaged")


def test_an_input_without_rows_is_one_message(here, server, command):
    jsonl(here, [])
    words = job(server, "1.jsonl", "--run-folder", "run")
    said = command(*words, "--sample", 5, code=1).error
    assert said.endswith(
        "error: no document reaches the InferenceRunner from the input or the steps before."
    )
    assert not (here / "run/checkpoints").exists()
