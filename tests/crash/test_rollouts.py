"""Ready-made rollouts, killed whenever answers are kept: the output is that of an undisturbed
run.
"""

import asyncio
from contextlib import suppress

import pytest
from datatrove.data import Document

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.rollouts import (
    CallFailed,
    ChunkedRollout,
    ClassifyRollout,
    EmbedRollout,
    InvalidAnswer,
    JudgeRollout,
)
from datatrove_ckpt.testing import FakeServer
from tests.crashes import OF_FILES, assert_same_output_after_crash
from tests.jobs import chat, runner
from tests.pages import blocks
from tests.typed_answers import PATHS

pytestmark = pytest.mark.usefixtures("code_described_once")


async def pairs(document, generate):
    answer = await generate(chat(document.text))
    return [{"question": word, "answer": answer.text} for word in document.text.split()]


async def retried(document, generate):
    answers = await asyncio.gather(*(generate(chat(document.text)) for _ in range(2)))
    return [answer.text for answer in answers]


def of_recipe(name):
    """The rollout of a file in docs/recipes.md."""
    (text,) = [
        block.text
        for block in blocks("python", "docs/recipes.md")
        if block.text.startswith(f"# {name}.py\n")
    ]
    names = {"__name__": name}
    exec(text, names)
    if name == "search":
        names["search"] = lambda query: [{"title": query, "content": "", "url": "http://a.org"}]
    names["rollout"].__name__ = name
    return names["rollout"]


async def valued(document, generate):
    """Three invalid answers, and a valid one."""
    with suppress(InvalidAnswer):
        await generate(chat(document.text), json_schema={"type": "object"})
    return await generate(chat(f"{document.text} JSON"), json_schema={"type": "object"})


RETRIES = {"seed": 7, "on_loop": {"retry": 1, "temperature": 1}}


async def searching(document, generate):
    found = await generate.once("look", str.split, document.text)
    failed = ""
    try:
        await generate.once("parse", int, found[0], keep_errors=ValueError)
    except CallFailed as error:
        failed = str(error)
    answer = await generate(chat(found[0] + failed))
    return {"found": await generate.once("look", str.split, document.text), "answer": answer.text}


@pytest.mark.matrix(
    "rollout",
    [
        pairs,
        retried,
        searching,
        valued,
        *map(of_recipe, ("code_with_tests", "search", "best_of")),
        ChunkedRollout("Q {text}", max_chars_per_part=12, carry="conversation"),
        JudgeRollout(
            "Q {text}",
            regex="answer [0-9a-f]*[02468ace]",
            judge_prompt="Rate {answer}",
            engine="none",
        ),
        EmbedRollout(column="vector"),
        ClassifyRollout(labels=["bad", "good"]),
    ],
    ids=lambda rollout: getattr(rollout, "__name__", type(rollout).__name__),
)
def test_a_rollout_of_several_requests_ends_the_same_after_a_kill(ram, rollout):
    def attempt(folder):
        more = RETRIES if rollout is retried else {}
        config = InferenceConfig("endpoint", "fake", endpoint_url=[first.url, second.url], **more)
        step = runner(folder, config, rollout, explode=rollout is pairs, records_per_chunk=1)
        step.run([Document(text="It rained. It snowed.", id="a", metadata={"tests": ""})])

    with FakeServer(answer) as first, FakeServer(answer) as second:
        first.paths = second.paths = PATHS
        (ram / "job").mkdir()
        report = assert_same_output_after_crash(
            attempt,
            ram / "job",
            recoveries=False,
            counted=OF_FILES if rollout in (pairs, retried) else ("commit",),
        )
    assert len(report.points) >= 2


def answer(payload, times):
    """By the payload alone: what a server says must not depend on how often it was asked before."""
    question = payload["messages"][-1]["content"]
    if "seed" in payload:
        seed = payload["seed"]
        return f"{seed} {'' if 'temperature' in payload else 'word ' * 90}"
    if question.endswith("JSON"):
        return f'{{"length": {len(question)}}}'
    return f"answer {len(question) * 2:x}"
