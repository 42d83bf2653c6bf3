"""Rollouts of several requests: parts with overlap and carried context, and the best of several
answers.
"""

import asyncio

from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt.rollouts import ChunkedRollout, split_text
from tests.unit.test_rollouts import document
from tests.words import write_tokenizer


def requests(rollout, text, answers=()):
    """The payloads in turn, and the result. The n-th answer is "An"."""
    sent = []

    async def generate(payload):
        sent.append(payload)
        given = answers[len(sent) - 1] if answers else f"A{len(sent)}"
        return InferenceResult(given, "stop", {"completion_tokens": 1})

    return sent, asyncio.run(rollout(document(text), generate))


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


def test_characters_per_token_estimate_the_parts():
    text = "one two six ten"
    estimated = ChunkedRollout(max_tokens_per_part=2, chars_per_token=3.5)
    assert [talk[0] for talk in talks(estimated, text)] == [
        f"u: {part}" for part in split_text(text, 7)
    ]


def test_a_conversation_carries_the_parts_before():
    rollout = ChunkedRollout("Q {text}", "S", max_chars_per_part=3, carry="conversation")
    assert talks(rollout, "one two six") == [
        ["s: S", "u: Q one"],
        ["s: S", "u: Q one", "a: A1", "u: Q two"],
        ["s: S", "u: Q two", "a: A2", "u: Q six"],
    ]
    longer = ChunkedRollout(max_chars_per_part=3, carry="conversation", carried_parts=2)
    assert talks(longer, "one two six")[2] == ["u: one", "a: A1", "u: two", "a: A2", "u: six"]


def test_an_answer_is_continued():
    rollout = ChunkedRollout("Q {text}", max_chars_per_part=3, separator="|", carry="continue")
    sent, result = requests(rollout, "one two six")
    assert [one["messages"] for one in sent[1:]] == [
        [{"role": "user", "content": "Q one|two"}, {"role": "assistant", "content": "A1"}],
        [{"role": "user", "content": "Q two|six"}, {"role": "assistant", "content": "A2"}],
    ]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    assert [{name: one.get(name) for name in flags} for one in sent] == [
        dict.fromkeys(flags),
        flags,
        flags,
    ]
    assert result.text == "A1|A2|A3"
