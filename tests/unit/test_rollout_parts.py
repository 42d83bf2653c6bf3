"""Rollouts of several requests: parts with overlap and carried context, and the best of several answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.errors import ConfigError, DocumentFailed
from datatrove_ckpt.rollouts import BestOfRollout, ChunkedRollout, for_config, split_text
from datatrove_ckpt.testing import FakeServer
from tests.jobs import rows, runner
from tests.unit.test_rollouts import document
from tests.words import write_tokenizer


def requests(rollout: Any, text: str, answers: Sequence[str] = ()) -> tuple[list[dict[str, Any]], Any]:
    """The payloads in turn, and the result. The n-th answer is "An"."""
    sent: list[dict[str, Any]] = []

    async def generate(payload: dict[str, Any]) -> InferenceResult:
        sent.append(payload)
        given = answers[len(sent) - 1] if answers else f"A{len(sent)}"
        return InferenceResult(given, "stop", {"completion_tokens": 1})

    return sent, asyncio.run(rollout(document(text), generate))


def talks(rollout: Any, text: str) -> list[list[str]]:
    """Each request's messages, with the first letter of their roles."""
    sent, _ = requests(rollout, text)
    return [[f"{one['role'][0]}: {one['content']}" for one in payload["messages"]] for payload in sent]


# parts ---------------------------------------------------------------------------------------------------------------


def test_parts_are_measured_in_tokens(tmp_path: Path) -> None:
    words = write_tokenizer(tmp_path / "words")
    rollout = ChunkedRollout(max_tokens_per_part=4, tokenizer=words)
    text = "One two three. Four.\n\nFive six seven eight nine ten."
    parts = ["One two three.", "Four.\n\nFive six", "seven eight nine", "ten."]
    assert talks(rollout, text) == [[f"u: {part}"] for part in parts]


def test_parts_of_tokens_are_no_longer_than_they_may_be_and_lose_nothing() -> None:
    text = "\n\n".join(f"Sentence {n} of a paragraph. " * (n % 7 + 1) for n in range(40)) + "x" * 300
    starts = range(0, len(text), 3)  # three characters each
    for limit in (1, 7, 60):
        parts = split_text(text, limit, starts=starts)
        assert max(map(len, parts)) <= 3 * limit + 2
        assert "".join("".join(parts).split()) == "".join(text.split())


def test_characters_per_token_estimate_the_parts() -> None:
    text = "one two six ten"
    estimated = ChunkedRollout(max_tokens_per_part=2, chars_per_token=3.5)
    assert [talk[0] for talk in talks(estimated, text)] == [f"u: {part}" for part in split_text(text, 7)]


def test_a_conversation_carries_the_parts_before() -> None:
    rollout = ChunkedRollout("Q {text}", "S", max_chars_per_part=3, carry="conversation")
    assert talks(rollout, "one two six") == [
        ["s: S", "u: Q one"],
        ["s: S", "u: Q one", "a: A1", "u: Q two"],
        ["s: S", "u: Q two", "a: A2", "u: Q six"],
    ]
    longer = ChunkedRollout(max_chars_per_part=3, carry="conversation", carried_parts=2)
    assert talks(longer, "one two six")[2] == ["u: one", "a: A1", "u: two", "a: A2", "u: six"]


def test_an_answer_is_continued() -> None:
    rollout = ChunkedRollout("Q {text}", max_chars_per_part=3, separator="|", carry="continue")
    sent, result = requests(rollout, "one two six")
    assert [one["messages"] for one in sent[1:]] == [
        [{"role": "user", "content": "Q one|two"}, {"role": "assistant", "content": "A1"}],
        [{"role": "user", "content": "Q two|six"}, {"role": "assistant", "content": "A2"}],
    ]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    assert [{name: one.get(name) for name in flags} for one in sent] == [dict.fromkeys(flags), flags, flags]
    assert result.text == "A1|A2|A3"


# best of several -----------------------------------------------------------------------------------------------------


def test_a_judge_chooses_the_best_of_several_and_all_are_kept() -> None:
    rollout = BestOfRollout("Q {text}", "S", candidates=3, judge_prompt="Rate {answer} of {id}: {text}")
    sent, result = requests(rollout, "rain", ["a", "b", "c", "Score: 3.5", "9 of 10", "none"])
    assert [one["messages"][-1]["content"] for one in sent] == [
        *["Q rain"] * 3, "Rate a of d1: rain", "Rate b of d1: rain", "Rate c of d1: rain"
    ]  # fmt: skip
    assert sent[0]["messages"][0] == {"role": "system", "content": "S"}
    assert sent[3]["temperature"] == 0
    assert result == {
        "text": "b",
        "finish_reason": "stop",
        "usage": {"completion_tokens": 6},
        "reasoning": "",
        "candidates": [
            {"text": "a", "finish_reason": "stop", "score": 3.5},
            {"text": "b", "finish_reason": "stop", "score": 9.0},
            {"text": "c", "finish_reason": "stop", "score": None},
        ],
    }


def test_the_judge_reads_no_more_of_a_long_text_than_fits() -> None:
    rollout = BestOfRollout("Q {text}", candidates=2, max_chars=20, judge_prompt="Rate {answer} of {text}")
    sent, _ = requests(rollout, "rain " * 9, ["a", "b" * 10, "1", "2"])
    assert [len(one["messages"][-1]["content"]) for one in sent] == [20, 20, 20, 20]


@pytest.mark.parametrize(
    ("scores", "best"), [(["2", "2"], "a"), (["-1", "-0.5"], "b"), (["no", "-3"], "b"), (["no", "no"], "a")]
)
def test_the_highest_score_wins_and_of_equals_the_first(scores: list[str], best: str) -> None:
    rollout = BestOfRollout(candidates=2, judge_prompt="{answer}?", judge_params={"max_tokens": 4})
    sent, result = requests(rollout, "rain", ["a", "b", *scores])
    assert result["text"] == best
    assert sent[2] == {"messages": [{"role": "user", "content": "a?"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("pattern", "answers", "best"),
    [
        (None, ["a", "b ", "b"], "b "),
        (r"= (\d+)", ["1 = 2", "so = 3", "= 9, = 3"], "so = 3"),
        (r"\d+", ["none", "no", "7"], "7"),
    ],
)
def test_without_a_judge_the_most_frequent_answer_wins(pattern: str | None, answers: list[str], best: str) -> None:
    rollout = BestOfRollout(candidates=3, vote_pattern=pattern)
    assert requests(rollout, "rain", answers)[1]["text"] == best


def test_invalid_answers_are_no_candidates() -> None:
    rollout = BestOfRollout(candidates=3, regex=r"\d", answer_attempts=1, invalid_answer="drop")
    _, result = requests(rollout, "rain", ["x", "1", "1"])
    assert [one["text"] for one in result["candidates"]] == ["1", "1"]
    assert requests(rollout, "rain", ["x", "x", "x"])[1] is None


def test_candidates_without_temperature_are_refused() -> None:
    config = InferenceConfig("vllm", "m", default_generation_params={"temperature": 0})
    with pytest.raises(ConfigError, match=r"^candidates: at temperature 0"):
        for_config(BestOfRollout(), config)


# in a run ------------------------------------------------------------------------------------------------------------


def test_each_candidate_keeps_its_own_answer_when_the_document_is_processed_again(tmp_path: Path) -> None:
    """Equal payloads are different samples, whose answers the cache tells apart: none is paid for twice."""

    def attempt(judge: Callable[[dict[str, Any], int], str]) -> None:
        def answer(payload: dict[str, Any], times: int) -> str:
            asked = payload["messages"][-1]["content"]
            return judge(payload, times) if asked.startswith("Rate") else f"candidate {times}"

        with FakeServer(answer, status=lambda payload, times: None if judge(payload, 0) else 400) as server:
            rollout = BestOfRollout(candidates=3, judge_prompt="Rate {answer}")
            try:
                runner(tmp_path, server, rollout, retry_errors=True).run([Document(text="rain", id="1")])
            finally:
                asked.append(len(server.payloads))

    asked: list[int] = []
    is_judge = lambda payload: payload["messages"][-1]["content"].startswith("Rate")  # noqa: E731
    with pytest.raises(DocumentFailed):
        attempt(lambda payload, times: "" if is_judge(payload) else "x")
    attempt(lambda payload, times: payload["messages"][-1]["content"][-1])
    assert asked == [6, 3]
    (result,) = rows(tmp_path)[0]["metadata"]["rollout_results"]
    assert [one["text"] for one in result["candidates"]] == ["candidate 0", "candidate 1", "candidate 2"]
    assert (result["text"], result["candidates"][2]["score"]) == ("candidate 2", 2.0)
