"""What is said about prompts: how much a prefix cache can save, and what keeps it from doing so."""

import asyncio
import random

import duckdb
import pytest
import yaml
from datatrove.data import Document

from datatrove_ckpt.generation.recorded_requests import unsent_prompts
from datatrove_ckpt.rollouts import (
    BatchRollout,
    ChunkedRollout,
    CompletionRollout,
    PromptRollout,
    chat,
)
from datatrove_ckpt.run_folder.environment_checks import check_prompts


def own_text(seed, length):
    """A text that begins and ends like no other one."""
    chance = random.Random(seed)
    return "".join(chance.choices('abcdefghij klmnopqrstuvwxyz\n"é中😀', k=length))


def said(prompts, servers=1):
    return {found.what: found.message for found in check_prompts(prompts, servers)}


def prompts_of(rollout_fn, documents):
    return asyncio.run(unsent_prompts(rollout_fn, documents))


def documents(number, length=300):
    return [Document(own_text(index, length), str(index)) for index in range(number)]


# the beginning and the end -----------------------------------------------------------------------


def test_a_beginning_that_all_prompts_share_is_said_with_its_share():
    instruction = "Résumé: 总结 😀 " * 20
    prompts = [f"{instruction}{index:02}{own_text(index, 258)}" for index in range(100)]
    assert said(prompts) == {
        "prompts": "520 characters on average; the first 260 (50.0 %) are the same in all 100: a prefix "
        "cache computes them once."
    }


def test_an_instruction_after_the_document_is_said_with_what_its_move_would_save():
    instruction = "Now write a summary of this. " * 10
    prompts = [own_text(index, 870) + instruction for index in range(20)]
    assert said(prompts) == {
        "end of prompts": "the last 290 characters of all 20 prompts are the same. Before the text that "
        "differs, a prefix cache would save 25.0 % of each prompt."
    }


@pytest.mark.parametrize(
    "prompts",
    [
        [],
        ["one document " * 100],
        ["one document " * 100, "", ""],
        ["Say: rain", "Say: snow"],
        [f"{'b' * 80}{own_text(index, 2000)}" for index in range(9)],
        [f"{index}{own_text(index, 900)}" for index in range(9)],
    ],
)
def test_where_there_is_nothing_to_say_nothing_is_said(prompts):
    assert said(prompts) == {}


def test_equal_prompts_are_a_beginning_and_neither_an_end_nor_apart():
    assert list(said(["one document " * 10_000] * 50)) == ["prompts"]
    assert "first 650 (100 %) are the same in all 2:" in said(["one document " * 50] * 2)["prompts"]


# the order ---------------------------------------------------------------------------------------


def questions(places):
    """Prompts with a document of 6,000 characters each, in this order."""
    return [f"{'i' * 300}{own_text(place, 6000)}Q{at}" for at, place in enumerate(places)]


def test_rows_that_share_a_text_and_are_apart_are_said_with_their_distance():
    found = said(questions([*range(100), *range(30)]))
    assert found["order"].startswith(
        "30 of the first 130 prompts share 6,001 characters with an earlier prompt, 100 rows before (averages), "
    )


def test_the_line_that_the_advice_names_sorts_the_rows(here):
    order = said(questions([*range(100), *range(30)]))["order"]
    line = order[order.index("input: ") :].replace("FILE", "rows.jsonl").replace("COLUMN", "doc")
    here.joinpath("rows.jsonl").write_text('{"doc": "b"}\n{"doc": "a"}\n{"doc": "b"}\n')
    query = yaml.safe_load(line)["input"]["sql"]
    assert duckdb.sql(query).fetchall() == [("a",), ("b",), ("b",)]


@pytest.mark.parametrize(
    "places, servers",
    [
        (sorted([*range(100)] * 2), 1),
        ([*range(50)] * 2, 1),
        (sorted([*range(50)] * 2) * 2, 1),
        ([*range(100)] * 2, 2),
        ([*range(100), 0], 1),
        ([*range(100)], 1),
    ],
)
def test_an_order_that_costs_nothing_is_not_mentioned(places, servers):
    assert "order" not in said(questions(places), servers)


def test_two_questions_about_a_text_that_fills_a_cache_are_neighbours():
    prompts = [own_text(index // 2, 500_000) + "?" * index for index in range(6)]
    assert "order" not in said(prompts)


# prompts that are not sent -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "rollout_fn",
    [
        PromptRollout("Sum up: {text}", system_prompt="You are brief. " * 20),
        PromptRollout("Sum up: {text}", "You are brief. " * 20, choice=["a", "b"], engine="vllm"),
        ChunkedRollout("{text}", system_prompt="You are brief. " * 20, max_chars_per_part=100),
        CompletionRollout("You are brief. " * 20 + "{text}"),
    ],
)
def test_the_prompts_of_ready_made_rollouts_are_known_without_a_request(rollout_fn):
    prompts = prompts_of(rollout_fn, documents(20))
    assert len(prompts) >= 20
    assert "are the same in all " in said(prompts)["prompts"]


def test_a_rollout_of_the_user_is_not_called():
    called = []

    async def rollout(document, generate):
        called.append(document)

    class Own(PromptRollout):
        async def __call__(self, document, generate, **shared):
            called.append(document)

    assert prompts_of(rollout, documents(2)) == []
    assert prompts_of(Own("{text}"), documents(2)) == []
    assert called == []


def test_documents_without_a_request_count_for_nothing():
    found = documents(3)
    found[0].metadata["title"] = "T"
    assert len(prompts_of(PromptRollout("{title}: {text}"), found)) == 1
    assert prompts_of(BatchRollout(), found) == []
    assert len(prompts_of(chat, found)) == 3
