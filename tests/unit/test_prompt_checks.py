"""What is said about prompts: how much a prefix cache can save, and what keeps it from doing so."""

import asyncio
import random

import duckdb
import pytest
import yaml
from datatrove.data import Document

from datatrove_ckpt import rollouts
from datatrove_ckpt.generation.recorded_requests import unsent_prompts
from datatrove_ckpt.rollouts import (
    BatchRollout,
    PromptRollout,
    chat,
)
from datatrove_ckpt.run_folder.environment_checks import check_prompts
from tests import golden


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


# the order ---------------------------------------------------------------------------------------


def questions(places):
    """Prompts with a document of 6,000 characters each, in this order."""
    return [f"{'i' * 300}{own_text(place, 6000)}Q{at}" for at, place in enumerate(places)]


def order(places, servers=1):
    """What is said beside the beginning that all share."""
    found = said(questions(places), servers)
    found.pop("prompts", None)
    return found


test_what_is_said_of_prompts = golden.shows("said_of_prompts", globals())


def test_the_line_that_the_advice_names_sorts_the_rows(here):
    order = said(questions([*range(100), *range(30)]))["order"]
    line = order[order.index("input: ") :].replace("FILE", "rows.jsonl").replace("COLUMN", "doc")
    here.joinpath("rows.jsonl").write_text('{"doc": "b"}\n{"doc": "a"}\n{"doc": "b"}\n')
    query = yaml.safe_load(line)["input"]["sql"]
    assert duckdb.sql(query).fetchall() == [("a",), ("b",), ("b",)]


# prompts that are not sent -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "rollout_fn",
    golden.values("rollouts_that_share", vars(rollouts)),
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
