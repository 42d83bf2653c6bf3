"""Answers of a given form: what each engine is asked for, what counts as valid, and what follows if
nothing is.
"""

import asyncio

import pytest
from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt import InferenceConfig, rollouts
from datatrove_ckpt.config.generation_params import refuse_near_misses
from datatrove_ckpt.errors import DocumentError
from datatrove_ckpt.generation.results import put_answer
from datatrove_ckpt.output.document_codec import PathResult
from datatrove_ckpt.rollouts import (
    InvalidAnswer,
    PromptRollout,
    for_config,
)
from datatrove_ckpt.user_code.code_identity import code_identity
from tests import golden
from tests.jobs import rows, run_job, runner
from tests.rollouts import Texts, asked, document

SCHEMA = {
    "type": "object",
    "properties": {"why": {"type": "string"}, "answer": {"type": "integer"}},
    "required": ["why", "answer"],
}
GOOD = '{"why": "it rains", "answer": 7}'
TREE = {"allOf": [{"anyOf": [{"properties": {"in": {"$ref": "#"}}}]}]}
DEEP = "[" * 199 + "7" + "]" * 199
THOUGHT = '{"why": "<think>no</think>", "answer": 7}'


def config(server_type="vllm", **changes):
    url = "http://127.0.0.1:1" if server_type == "endpoint" else None
    given = {"server_type": server_type, "model_name_or_path": "m", "endpoint_url": url, **changes}
    return InferenceConfig(**given)


def sent(rollout, server_type):
    """The payload's keys that ask the engine for the form."""
    fitted = for_config(rollout, config(server_type, use_chat=True))
    fitted.invalid_answer, fitted.answer_attempts = "drop", 1
    return {
        name: value
        for name, value in asked(fitted, document()).items()
        if name not in ("messages", "prompt")
    }


def answer(rollout, *answers):
    result = asyncio.run(rollout(document(), Texts(*answers)))
    return None if result is None else str(result.text)


# what the engines are asked, and what is valid ---------------------------------------------------


test_each_engine_gets_its_own_fields_and_a_valid_answer_loses_what_surrounds_it = golden.shows(
    "valid_answers", globals()
)


@golden.rows("invalid_answers")
def test_an_invalid_answer_fails_with_what_is_wrong(code):
    golden.refuse("invalid_answers", code, globals())


def test_an_answer_that_was_cut_off_in_blanks_is_named_as_that():
    rollout = PromptRollout(json_schema=SCHEMA, answer_attempts=1)
    for blanks, problem in (
        ("\n  " * 40, "it ends in blanks up to max_tokens"),
        ("\n", "it is not JSON"),
    ):
        server = Texts('{"why":' + blanks, reason="length")
        with pytest.raises(InvalidAnswer, match=f"The last problem: {problem}"):
            asyncio.run(rollout(document(), server))


# what follows ------------------------------------------------------------------------------------


SHOWN = [
    {"role": "assistant", "content": "?"},
    {
        "role": "user",
        "content": "That answer is not valid: it is not one of yes, no. Answer again, correctly and completely, and write nothing else.",
    },
]


@pytest.mark.parametrize("reason, shown", [("stop", SHOWN), ("length", [])])
def test_the_model_is_shown_its_answer_if_that_is_wanted_and_it_was_not_cut_off(reason, shown):
    """With a long answer the conversation would not fit into the context either."""
    server = Texts("?", "no", reason=reason)
    asyncio.run(PromptRollout(choice=["yes", "no"], show_error=True)(document(), server))
    first, second = (one["messages"] for one in server.asked)
    assert second == [*first, *shown]


def test_the_form_and_the_engine_are_part_of_the_identity():
    fields = code_identity(
        for_config(PromptRollout(json_schema=SCHEMA), config("sglang")), None
    ).fields
    schema = fields["rollout_fn.json_schema"]
    assert schema.items() >= (SCHEMA | {"properties": schema["properties"]}).items()
    assert schema["properties"].items() >= SCHEMA["properties"].items()
    assert fields["rollout_fn.form_for"] == "sglang"


# in a run ----------------------------------------------------------------------------------------


def test_a_parameter_that_is_nearly_a_known_one_is_sent_inside_extra_body(tmp_path, server):
    params = {"extra_body": {"temprature": 0.5}, "my_own_parameter": 1}
    step = runner(tmp_path, server, PromptRollout(), config={"default_generation_params": params})
    step.run([Document(text="x", id="1")])
    assert server.payloads[0].items() >= {"temprature": 0.5, "my_own_parameter": 1}.items()


OF_OTHER_SERVERS = [
    "mirostat_mode",
    "repetition_penalty_range",
    "encoder_repetition_penalty",
    "repetition_range",
    "mode",
    "mirostat",
    "penalty_range",
    "typical",
    "top_n_tokens",
    "min_temp",
    "max_temp",
    "top_h",
    "nsigma",
    "tfs",
    "smoothing_factor",
    "truncate",
    "max_tokens_second",
    "min_length",
    "guidance_scale",
    "stop_regex",
    "stop_words",
    "stop_sequences",
    "random_seed",
    "safe_prompt",
    "prompt_mode",
    "banned_tokens",
    "n_probs",
    "n_keep",
    "min_keep",
    "grammar_string",
    "logit_bias_exp",
    "lora",
    "k",
    "p",
]


def test_a_parameter_of_other_servers_is_no_typing_error():
    refuse_near_misses(OF_OTHER_SERVERS, "payload")
    refuse_near_misses(["presence_penalties"], "payload")


SCORED = {"text": GOOD, "finish_reason": "stop", "score": 8.0}


@golden.rows("answers_under_a_name")
@pytest.mark.parametrize("number", [1, 2])
def test_what_stands_under_the_name_of_the_answers(code, number, tmp_path, server):
    names = {**vars(rollouts), "InferenceResult": InferenceResult, "PathResult": PathResult}
    rollout, result = eval(code, {**globals(), **names})
    step = runner(
        tmp_path, server, rollout, answer="summary", config={"rollouts_per_document": number}
    )
    one = document()
    put_answer(step, one, [result] * number)
    found = one.metadata["summary"]
    if number == 2:
        first, found = found
        assert first == found
    golden.hold("answers_under_a_name", code, repr(found))


@pytest.mark.parametrize("returned, summaries", [([7, 8], [[7, 8]]), (None, [])])
def test_a_rollout_may_put_into_the_column_what_it_returns(tmp_path, server, returned, summaries):
    async def rollout(document, generate):
        document.metadata["summary"] = [7, 8]
        return returned

    run_job(tmp_path, server, 1, rollout, answer="summary")
    assert [row["metadata"]["summary"] for row in rows(tmp_path)] == summaries


def test_a_rollout_that_returns_another_value_than_it_puts_into_the_column_fails(tmp_path, server):
    async def rollout(document, generate):
        document.metadata["summary"] = "mine"
        return "other"

    with pytest.raises(DocumentError, match=r"has set metadata\['summary'\], where its result"):
        run_job(tmp_path, server, 1, rollout, answer="summary")


def test_a_rollout_may_put_a_part_of_a_whole_answer_into_the_column(tmp_path, server):
    async def rollout(document, generate):
        answer = await generate({"messages": [{"role": "user", "content": document.text}]})
        document.metadata["summary"] = len(answer.text)
        return answer

    run_job(tmp_path, server, 1, rollout, answer="summary")
    assert [type(row["metadata"]["summary"]) for row in rows(tmp_path)] == [int]
