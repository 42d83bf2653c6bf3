"""What an answer has beside its text: paid for once, kept through kills, written."""

import orjson
import pytest

from datatrove_ckpt.errors import ServerRefused
from datatrove_ckpt.inference.client.responses import (
    CHAT,
    RetryableError,
    api_for_path,
    api_for_payload,
)
from datatrove_ckpt.run_folder.run_state import read_run_state
from tests import golden
from tests.jobs import chat, in_pieces, rows, run_job
from tests.rank_folders import place_at

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
LOGPROBS = {"content": [{"token": "hi", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
QUESTION = {"n": 2, "logprobs": True}


@pytest.fixture
def whole(server):
    server.message, server.logprobs = {"tool_calls": [CALL]}, LOGPROBS
    return server


async def ask_whole(document, generate):
    result = await generate(chat(document.text, **QUESTION))
    assert result.response_id == "fake"
    assert result.tool_calls == [CALL] == result.choices[1]["tool_calls"]
    assert result.logprobs == LOGPROBS == result.choices[1]["logprobs"]
    return await generate(chat(f"again {document.text}", **QUESTION))


def test_all_of_an_answer_is_written_and_after_a_kill_nothing_is_asked_again(whole, tmp_path):
    run_job(tmp_path / "other", whole, 2, ask_whole)
    refused = in_pieces(tmp_path, whole, ask_whole, config={"max_concurrent_documents": 1})
    assert rows(tmp_path) == rows(tmp_path / "other")
    (result,) = rows(tmp_path)[0]["metadata"]["rollout_results"]
    assert list(result)[:4] == ["text", "finish_reason", "usage", "reasoning"]
    assert result["tool_calls"] == [CALL]
    assert result["logprobs"] == LOGPROBS
    assert [choice["tool_calls"] for choice in result["choices"]] == [[CALL]] * 2
    assert "response_id" not in result
    assert len(whole.payloads) == 4 + 4 + refused


async def ask_other_paths(document, generate):
    """The same payload to two paths, and a completion, which alone has defaults and a seed."""
    payload = {"input": document.text}
    first = await generate(payload, path="/v1/embeddings")
    assert (first.text, first.finish_reason, first.response_id, first.usage) == (
        "",
        "stop",
        "e1",
        {"prompt_tokens": 3},
    )
    second = await generate(payload, path="/tokenize")
    asked = chat(document.text)
    third = await generate(asked, path="/v1/chat/completions")
    assert third.text == (await generate({**asked, "top_p": 1})).text
    return [first, second.answer, third.text]


def test_any_path_of_the_server_is_cached_by_path_and_payload(server, tmp_path):
    kept = {"data": [{"embedding": [0.5, 1]}], "usage": {"prompt_tokens": 3}}
    server.paths = {
        "/v1/embeddings": lambda payload: {"id": "e1", "created": 5, **kept},
        "/tokenize": lambda payload: {"tokens": [1, 2]},
    }
    config = {
        "max_concurrent_documents": 1,
        "default_generation_params": {"temperature": 0.5},
        "seed": 1,
    }
    server._answer = lambda payload, times: (
        f"at {payload['temperature']}, seeded: {'seed' in payload}"
    )
    run_job(tmp_path / "other", server, 2, ask_other_paths, config=config)
    assert len(server.payloads) == 8
    others = [payload for payload in server.payloads if "input" in payload]
    assert others[0] == {"input": others[0]["input"], "model": "fake"}
    refused = in_pieces(tmp_path, server, ask_other_paths, config=config)
    assert rows(tmp_path) == rows(tmp_path / "other")
    (results,) = rows(tmp_path)[0]["metadata"]["rollout_results"]
    assert results[0]["answer"] == kept
    assert results[1:] == [{"tokens": [1, 2]}, "at 0.5, seeded: True"]
    assert len(server.payloads) == 8 + 8 + refused


def test_a_path_that_the_server_lacks_stops_the_run_and_is_named(server, tmp_path):
    async def ask(document, generate):
        return await generate({"input": document.text}, path="/v1/embeddings")

    with pytest.raises(
        ServerRefused, match=r"/v1/embeddings answered HTTP 404 .* have the path /v1/embeddings:"
    ):
        run_job(tmp_path, server, 1, ask)
    server.paths = {"/v1/embeddings": lambda payload: {}}
    server._status, server.error = lambda payload, times: 404, "The model `fake` does not exist."
    with pytest.raises(
        ServerRefused, match=r"Check the model's name and the endpoint's URL\. The server's answer"
    ):
        run_job(tmp_path, server, 1, ask)


def _with_choices(*choices):
    return orjson.dumps(
        {
            "choices": [
                {"message": {"content": "a"}, "finish_reason": "stop", **one} for one in choices
            ]
        }
    )


def test_an_answer_is_cut_off_or_empty_if_one_of_its_choices_is(server, tmp_path):
    lasts = [("a", "length"), ("", "stop"), ("", "length"), ("a", "stop")]

    async def ask(document, generate):
        await generate.embed(document.text)
        return await generate(chat(document.text, n=2), path="/v1/chat/completions")

    def answer(payload):
        text, reason = lasts[int(payload["messages"][0]["content"][-1])]
        last = {"index": 1, "message": {"content": text}, "finish_reason": reason}
        return orjson.loads(_with_choices({"index": 0}, last))

    def embed(payload):
        is_zero = payload["input"] == "text 0"
        return {"data": [{"index": 0, "embedding": [0.0, 0.0 if is_zero else 1.0]}]}

    server.paths = {"/v1/chat/completions": answer, "/v1/embeddings": embed}
    run_job(tmp_path, server, 4, ask)
    place = place_at(tmp_path / "checkpoints")
    counts = read_run_state(place).together.counts
    assert (counts.answers, counts.cut_off, counts.empty) == (8, 2, 2 + 1)


ENDED = {"finish_reason": "tool_calls"}
CALLED = {"id": "c", "type": "custom", "custom": {"name": "look", "input": ""}}


@pytest.mark.parametrize("case", golden.sections("answers"))
def test_an_answer_has_the_choices_calls_and_logprobs_that_were_asked_for(case):
    """``case``: a payload, and choices that are no answer to it, or one."""
    payload, choices = orjson.loads(case)
    said = "an answer"
    try:
        assert api_for_payload(CHAT, payload).parse(_with_choices(*choices)).response_id == ""
    except RetryableError as error:
        said = str(error)
    golden.hold("answers", case, said)


@pytest.mark.parametrize("status", ["failed", "in_progress", "completed", "incomplete"])
def test_a_response_that_failed_is_no_answer(status):
    body = orjson.dumps({"object": "response", "status": status, "error": None, "output": []})
    parse = api_for_path("/v1/responses").parse
    if status in ("completed", "incomplete"):
        assert parse(body).answer["status"] == status
    else:
        with pytest.raises(RetryableError, match=status):
            parse(body)
