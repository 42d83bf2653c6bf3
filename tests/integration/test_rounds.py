"""What docs/tasks.md says of a loop of runs, of pages, of draws and of ``choices``."""

import random
import re
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

import datatrove_ckpt
from datatrove_ckpt.errors import ConfigError, ServerRefused
from datatrove_ckpt.rollouts import PromptRollout
from datatrove_ckpt.testing import FakeServer
from tests.jobs import Budget, chat, documents, rows, runner
from tests.pages import ROOT, blocks


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def counts(payload, times):
    """An answer by the prompt alone, of which some repeat in each round."""
    prompt = payload["messages"][0]["content"]
    return f"question {len(prompt) % 7}"


def rounds(server):
    """The page's loop, at a server, until five are accepted."""
    (block,) = [each for each in blocks("python", "docs/tasks.md") if "accepted" in each.text]
    text = block.text.replace(
        'server_type="dummy",  # canned answers',
        f'endpoint="{server.url}", max_concurrent_generations=1,',
    )
    text = text.replace("unlike these: {seen}", "unlike these: {id} {seen}").replace(
        ">= 100", ">= 5"
    )
    names = {}
    exec(text, names)
    return names["accepted"], names["number"]


def test_a_loop_of_runs_passes_finished_rounds_without_a_request(tmp_path):
    budget = Budget(10**9)
    with FakeServer(counts, status=budget) as server:
        wanted, number = rounds(server)
        assert len(set(wanted)) == len(wanted) >= 5
        assert number > 0
        asked = len(server.payloads)
        assert rounds(server) == (wanted, number)
        assert len(server.payloads) == asked
        Path("runs").rename("other")
        server.payloads.clear()
        budget.left = asked // 2
        with pytest.raises(ServerRefused):
            rounds(server)
        budget.left = 10**9
        assert rounds(server) == (wanted, number)
        assert len(server.payloads) == asked + 1, "one was refused"


def test_a_relation_of_duckdb_is_an_input_and_is_compared_at_each_start(server):
    data = pa.table(
        {"id": ["b", "a", "c"], "text": ["x", "y", "z"], "n": pa.array([1, 2, 3], pa.uint64())}
    )

    def run(query):
        job = {"run_folder": "runs/x", "prompt": "{text}", "model": "m", "endpoint": server.url}
        with duckdb.connect() as connection:
            connection.register("data", data)
            return datatrove_ckpt.run(input=connection.sql(query), **job)

    for _ in range(2):
        output = run("select * from data where n > 1 order by id")
    assert [(row.id, row.text, row.metadata["n"]) for row in output] == [
        ("a", "y", 2),
        ("c", "z", 3),
    ]
    assert server.asked == {"y": 1, "z": 1}
    with pytest.raises(ConfigError, match=r"differ from runs/x/input/rows.parquet"):
        run("select * from data order by id")


def test_pages_are_put_back_into_documents(server):
    (query,) = re.findall(r"`(select\s+split_part[^`]*)`", (ROOT / "docs/tasks.md").read_text())
    pages = pa.table(
        {
            "id": ["a.pdf#2", "a.pdf#10", "a.pdf#1", "b/c.pdf#1"],
            "page": [2, 10, 1, 1],
            "answer": ["two", "ten", "one", "alone"],
        }
    )
    with duckdb.connect() as connection:
        connection.register("pages", pages)
        found = connection.sql(f"{query} order by id").fetchall()
    assert found == [("a.pdf", "one\ftwo\ften"), ("b/c.pdf", "alone")]


async def drawn(document, generate):
    draws = random.Random(document.id)
    return await generate(chat(f"{document.text} {draws.choice('abcdefgh')} {draws.random()}"))


def test_draws_of_a_documents_id_are_the_same_requests_after_a_stop(tmp_path):
    budget = Budget(3)
    with FakeServer(status=budget) as server:
        step = runner(tmp_path, server, drawn, config={"max_concurrent_generations": 1})
        with pytest.raises(ServerRefused):
            step.run(documents(5))
        budget.left = 9
        step.run(documents(5))
        assert len(server.asked) == 5
        assert len(server.payloads) == 6


def test_choices_have_the_form_that_the_page_says(tmp_path):
    with FakeServer(lambda payload, times: "fine") as server:
        rollout = PromptRollout("{text}", generation_params={"n": 3})
        runner(tmp_path, server, rollout).run(documents(1))
    (result,) = rows(tmp_path)[0]["metadata"]["rollout_results"]
    assert len(result["choices"]) == 3
    named = re.search(
        r"a list of objects with(.*?)such as", (ROOT / "docs/tasks.md").read_text(), re.DOTALL
    )
    assert {*result["choices"][0]} <= {*re.findall(r"`(\w+)`", named[1])}
    assert result["choices"][1]["text"] == "fine"
