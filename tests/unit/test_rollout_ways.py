"""Rollouts whose answer is a vector, a label or a judge's score."""

import asyncio
import re
from dataclasses import dataclass

import numpy as np
import pytest

from datatrove_ckpt.config.inference_config import models_of
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.rollouts import (
    ChunkedRollout,
    ClassifyRollout,
    EmbedRollout,
    InvalidAnswer,
    JudgeRollout,
    PromptRollout,
    for_config,
)
from tests import golden
from tests.clients import config
from tests.pages import ROOT
from tests.rollouts import Texts, document

FROM_CONFIGS = {
    "score_pattern": re.search("score_pattern: '(.*)'", (ROOT / "configs/judge.yaml").read_text())[
        1
    ]
}  # type: ignore[index]
SCORES = {"news": 0.2, "fiction": 0.7, "other": 0.1}


@dataclass
class Classified:
    label: str
    score: float
    scores: dict[str, float]


class Model(Texts):
    """Also gives one vector and one label."""

    score = 0.7

    async def embed(self, text, **params):
        self.asked.append((text, params))
        return np.array([3, 4, 12], np.float32)

    async def classify(self, text, labels=None, **params):
        self.asked.append((text, params))
        return Classified(
            "fiction", self.score, dict(zip(labels or "012", SCORES.values(), strict=True))
        )


def result(rollout, model, given=None):
    return asyncio.run(rollout(given or document(), model))


def only(rollout):
    """The rollout as a run with one model calls it."""
    return for_config(rollout, config())


# embed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, vector",
    golden.values("vectors", globals()),
)
def test_the_result_is_the_vector_as_float32(settings, vector):
    found = result(EmbedRollout(**settings), Model())
    assert list(found) == ["embedding"]
    assert found["embedding"].dtype == np.float32
    assert found["embedding"] == pytest.approx(vector)


def sent(rollout):
    """What the model is asked of a text that is too long."""
    model = Model()
    result(rollout, model, document("one line\nand more"))
    return model.asked


def test_a_column_gets_the_vector_and_the_result_says_where_it_is():
    given = document()
    assert result(EmbedRollout(column="vector"), Model(), given) == {
        "column": "vector",
        "dimensions": 3,
    }
    assert given.metadata["vector"].tolist() == [3, 4, 12]
    with pytest.raises(
        ConfigError,
        match=r"^column: document 'd1' has metadata 'vector' already. Give another name",
    ):
        result(EmbedRollout(column="vector"), Model(), given)


# classify ----------------------------------------------------------------------------------------


def test_a_score_that_is_equal_to_the_threshold_as_float32_is_kept():
    model = Model()
    model.score = 0.699999988079071
    assert result(ClassifyRollout(threshold=0.7), model)["score"] == model.score


# judge -------------------------------------------------------------------------------------------


def judged(said, **settings):
    found = result(only(JudgeRollout(judge_prompt="Rate {text}", **settings)), Model(said))
    return found and found["score"]


def judged_again(said, **settings):
    """What the judge is told of an answer without a score, and what ends a second one."""
    model = Model(said, "Score: 5, score: 5")
    rollout = JudgeRollout(judge_prompt="Rate {text}", answer_attempts=2, **settings)
    assert result(only(rollout), model)["score"] == 5
    with pytest.raises(InvalidAnswer) as failed:
        result(only(rollout), Model(said, said))
    rollout.invalid_answer = "drop"
    assert result(only(rollout), Model(said, said)) is None
    return model.asked[1]["messages"][2]["content"], str(failed.value)


test_labels_and_scores_are_results_or_the_document_is_dropped = golden.shows(
    "labels_and_scores", globals()
)


def test_a_judgement_that_is_cut_off_is_no_score():
    class CutOff(Model):
        async def __call__(self, payload):
            self.reason = "length" if len(self.texts) > 1 else "stop"
            return await super().__call__(payload)

    model = CutOff("3 reasons", "4")
    assert result(only(JudgeRollout(judge_prompt="Rate {text}")), model)["score"] == 4
    assert model.asked[0] == model.asked[1]


def test_a_column_called_answer_is_not_the_answer_of_the_model():
    given, prompt = document(answer="42"), "{metadata[answer]}, not {answer}?"
    model = Model("41", "1")
    result(only(JudgeRollout("Q {answer}", judge_prompt=prompt)), model, given)
    assert [one["messages"][0]["content"] for one in model.asked] == ["Q 42", "42, not 41?"]
    JudgeRollout(judge_prompt="{metadata[answer]}")


def test_the_first_of_several_models_writes_and_another_one_judges():
    rollout = JudgeRollout("{text}", judge_prompt="Rate {answer}")
    models = {"writer": config(), "judge": config()}
    fitted = for_config(rollout, models_of(models)["writer"])
    assert fitted.judge == "judge"
    for_config(
        JudgeRollout(judge_prompt="{text}"), models_of(dict(reversed(models.items())))["judge"]
    )


@pytest.mark.parametrize("params", [{"n": 1, "tools": []}, {}])
def test_parameters_whose_answers_a_rollout_keeps_whole_are_its_own(params):
    several = config(default_generation_params={"n": 2, "tools": [{}]})
    for_config(ChunkedRollout(generation_params={"n": 1, "tools": []}), several)
    for_config(PromptRollout(generation_params=params), several)


# settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, error",
    [
        ({"prompt": "{text"}, "prompt: the template is broken ("),
        ({"regex": "("}, "regex: '(' is not a regular expression: "),
        (
            {"json_schema": {"type": "objekt"}},
            "json_schema: is not a JSON schema: $.type: 'objekt'",
        ),
    ],
)
def test_settings_that_a_library_refuses_are_refused_at_once(settings, error):
    with pytest.raises(ConfigError) as refused:
        PromptRollout(**settings)
    assert str(refused.value).startswith(error)
