"""Ready-made rollouts: what they ask, what they refuse, and that a copy of one is the same run."""

import asyncio

import pytest
from datatrove.pipeline.inference.types import InferenceError, InferenceResult

from datatrove_ckpt import rollouts
from datatrove_ckpt.rollouts import (
    ChunkedRollout,
    PromptRollout,
    split_text,
)
from tests import golden
from tests.rollouts import Texts, asked, document
from tests.words import write_tokenizer


class Server:
    """Answers "<n>: <what was asked>", remembers the payloads, and how many were asked at once."""

    def __init__(self, reasons=(), refuse=""):
        self.payloads = []
        self.reasons = reasons
        self.refuse = refuse
        self.running = self.most = self.ended = 0

    async def __call__(self, payload):
        number = len(self.payloads)
        self.payloads.append(payload)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        asked = payload["messages"][-1]["content"]
        if self.refuse and self.refuse in asked:
            raise InferenceError(None, "refused", payload)
        await asyncio.sleep(0)
        self.ended += 1
        reason = self.reasons[number] if self.reasons else "stop"
        usage = {"prompt_tokens": 10, "details": {"cached": 1}, "tier": "x"}
        return InferenceResult(
            text=f"{number}: {asked}", finish_reason=reason, usage=usage, reasoning=f"r{number}"
        )


BRACES = "{id} {text.__class__} {} } {"


@pytest.mark.parametrize("parallel, at_once", [(True, 3), (False, 1)])
def test_a_long_document_is_asked_about_in_parts_and_joined_in_order(parallel, at_once):
    server = Server()
    rollout = ChunkedRollout(
        "Q {text}", "S", max_chars_per_part=3, separator="|", parallel=parallel
    )
    result = asyncio.run(rollout(document("one\n\ntwo\n\nsix"), server))
    assert result.text == "0: Q one|1: Q two|2: Q six"
    assert result.usage == {"prompt_tokens": 30, "details": {"cached": 3}}
    assert result.reasoning == "r0|r1|r2"
    assert server.payloads[0]["messages"][0] == {"role": "system", "content": "S"}
    assert server.most == at_once


def test_an_answer_with_a_part_cut_off_is_cut_off_and_when_a_part_fails_the_others_are_waited_for():
    for reasons in (("stop", "stop"), ("length", "stop"), ("stop", "length")):
        result = asyncio.run(
            ChunkedRollout(max_chars_per_part=3)(document("one\n\ntwo"), Server(reasons))
        )
        assert result.finish_reason == ("length" if "length" in reasons else "stop")
    server = Server(refuse="one")
    with pytest.raises(InferenceError):
        asyncio.run(ChunkedRollout(max_chars_per_part=3)(document("one\n\ntwo\n\nsix"), server))
    assert server.ended == 2


def requests(rollout, text):
    """The payloads in turn, and the result. The n-th answer is "An"."""
    model = Texts(*(f"A{number}" for number in range(1, 9)))
    return model.asked, asyncio.run(rollout(document(text), model))


def talks(rollout, text):
    """Each request's messages, with the first letter of their roles."""
    sent, _ = requests(rollout, text)
    return [
        [f"{one['role'][0]}: {one['content']}" for one in payload["messages"]] for payload in sent
    ]


# parts -------------------------------------------------------------------------------------------


def test_parts_are_measured_in_tokens(tmp_path):
    words = write_tokenizer(tmp_path / "words")
    rollout = ChunkedRollout(max_tokens_per_part=4, tokenizer=words)
    text = "One two three. Four.\n\nFive six seven eight nine ten."
    parts = ["One two three.", "Four.\n\nFive six", "seven eight nine", "ten."]
    assert talks(rollout, text) == [[f"u: {part}"] for part in parts]


def test_parts_of_tokens_are_no_longer_than_they_may_be_and_lose_nothing():
    text = (
        "\n\n".join(f"Sentence {n} of a paragraph. " * (n % 7 + 1) for n in range(40)) + "x" * 300
    )
    starts = range(0, len(text), 3)  # three characters each
    for limit in (1, 7, 60):
        parts = split_text(text, limit, starts=starts)
        assert max(map(len, parts)) <= 3 * limit + 2
        assert "".join("".join(parts).split()) == "".join(text.split())


def cut(text):
    return asked(PromptRollout(prompt="Say: {text}. End.", max_chars=24), document(text))


test_what_is_asked_and_where_a_text_is_cut = golden.shows("cut_texts", globals(), vars(rollouts))
