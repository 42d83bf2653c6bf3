"""A payload is sent as datatrove's client sends it, or is refused by the name of its key before
anything is paid.
"""

import asyncio
import json
import math
import os
import pickle
from dataclasses import dataclass

import orjson
import pytest
from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult as Theirs

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.checkpoint.compare import compare
from datatrove_ckpt.errors import ConfigError, DocumentFailed, ServerError, ServerRefused
from datatrove_ckpt.generation.requests import hash_payload
from tests import golden
from tests.jobs import ask, chat, documents, results, rows, run_job, runner
from tests.recording import recording
from tests.typed_answers import embeddings

__all__ = ["recording"]  # fixtures


KEY = "Bearer k3y-of-a-header"
BODY = {"temperature": 0.5, "chat_template_kwargs": {"z": 1, "a": 2}, "top_k": 5}
HEADERS = {"authorization": KEY, "X-Org": "team-7-of-many", "user-agent": "mine"}
QUERY = {"api-version": "2026-01", "beta": "true", "code": "q5e4r3y2-0"}
EXTRAS = {"extra_body": BODY, "extra_headers": HEADERS, "extra_query": QUERY}


@pytest.fixture
def proxied(recording, monkeypatch):
    """A URL whose requests go through a proxy, which records them."""

    def proxied():
        monkeypatch.setenv("http_proxy", recording.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        return "http://endpoint.example"

    return proxied


def step_of(folder, url, rollout, **settings):
    config = InferenceConfig("endpoint", "fake", endpoint_url=url, api_key="mine", **settings)
    return runner(folder, config, rollout)


def asking(payload):
    async def rollout(document, generate):
        return await generate(chat(document.text, **payload))

    return rollout


def test_texts_share_a_request_only_with_those_of_the_same_extras(tmp_path, server, monkeypatch):
    monkeypatch.setattr(
        "datatrove_ckpt.generation.embedding_batches._LONGEST", 60.0
    )  # it is sent once full
    server.paths = {"/v1/embeddings": embeddings}

    async def rollout(document, generate):
        name = str(int(document.id[-1]) % 2)
        return await generate.embed(
            document.text, extra_body={"user": name}, extra_headers={"X-User": name}
        )

    settings = {"texts_per_request": 4, "max_concurrent_documents": 8}
    run_job(tmp_path, server, 8, rollout, config=settings)
    found = {payload["user"]: payload["input"] for payload in server.payloads}
    assert found == {str(i): [f"text {n}" for n in range(i, 8, 2)] for i in range(2)}


@pytest.mark.parametrize("is_default, is_proxied", [(False, True), (True, False)])
def test_extras_are_merged_as_the_client_of_openai_merges_them(
    tmp_path, recording, proxied, monkeypatch, is_default, is_proxied
):
    """Directly and through a proxy."""
    monkeypatch.setenv("KEPT", "1")
    url = proxied() if is_proxied else recording.url
    url = f"{url}/v1?api-version=old&kept=${{KEPT}}"
    written = {"temperature": 0.1, "top_p": 0.5}
    payload, defaults = (
        ({}, {**written, **EXTRAS})
        if is_default
        else ({**written, **EXTRAS}, {"extra_body": {"n": 9}})
    )
    step_of(tmp_path, url, asking(payload), default_generation_params=defaults).run(documents(1))
    ((path, headers, body),) = recording.requests
    assert path.endswith(
        "/v1/chat/completions?api-version=2026-01&kept=1&beta=true&code=q5e4r3y2-0"
    )
    found = [value for name, value in headers.items() if name.lower() == "authorization"]
    assert found == [KEY]
    assert (headers["X-Org"], headers["User-Agent"]) == ("team-7-of-many", "mine")
    sent = json.loads(body)
    assert set(sent) == {
        "messages",
        "model",
        "temperature",
        "top_p",
        "chat_template_kwargs",
        "top_k",
    }
    assert {name: sent[name] for name in BODY} == BODY
    assert list(sent)[-2:] == ["chat_template_kwargs", "top_k"]
    assert b'{"z":1,"a":2}' in body


@pytest.mark.parametrize("status", [400, 401, 500, 203, 0])
def test_extras_are_in_no_file_and_no_line(tmp_path, recording, proxied, log, capfd, status):
    """The server quotes them, with 203 in an answer that cannot be read; the errors of aiohttp, such
    as at status 0, quote the URL.
    """
    recording.status = status
    url = recording.url if status else proxied()
    secrets = [f"k3y-of-a-header-{status}", f"team-7-of-many-{status}", f"q5e4r3y2-{status}"]
    headers = {"Authorization": f"Bearer {secrets[0]}", "X-Org": secrets[1]}
    extras = {"extra_headers": headers, "extra_query": {"code": secrets[2]}}
    step = step_of(tmp_path, url, asking(extras), server_patience_seconds=0.1)
    with pytest.raises((DocumentFailed, ServerError)) as raised:
        step.run(documents(1))
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    said = f"{raised.value} {raised.value.__cause__} {''.join(log)} {capfd.readouterr()} {files.decode(errors='replace')}"
    assert [secret for secret in secrets if secret in said] == []
    assert recording.requests


def test_a_request_with_a_new_token_in_its_header_is_not_paid_again(
    tmp_path, recording, monkeypatch
):
    """Another query may be another model behind a gateway; an access token lives for an hour."""
    monkeypatch.setenv("OF_THE_HOUR", "first-t0ken")

    async def rollout(document, generate):
        message = chat("x")
        token = os.environ["OF_THE_HOUR"]
        headers = {"extra_headers": {"Authorization": token}}
        texts = [(await generate({**message, **headers})).text]
        texts += [(await generate({**message, **headers, "extra_query": {"v": "1"}})).text]
        if token == "first-t0ken":
            raise ValueError("stop here")
        return "".join(texts)

    url = recording.url
    with pytest.raises(DocumentFailed):
        step_of(tmp_path, url, rollout).run(documents(1))
    monkeypatch.setenv("OF_THE_HOUR", "second-t0ken")
    asked = len(recording.requests)
    step_of(tmp_path, url, rollout).run(documents(1))
    assert [asked, len(recording.requests)] == [2, 2]


NUMBER = "JSON has no nan"


@pytest.mark.parametrize("payload", golden.sections("unsendable"))
def test_what_cannot_be_sent_is_refused_by_the_name_of_its_key(tmp_path, server, payload):
    """By its function's payload, and by the settings."""
    given = eval(payload)
    with pytest.raises(DocumentFailed) as raised:
        run_job(tmp_path, server, 1, asking(given))
    with pytest.raises(ConfigError) as refused:
        runner(tmp_path, server, config={"default_generation_params": given})
    golden.hold("unsendable", payload, f"{raised.value}\n{refused.value}")
    assert server.payloads == []


def test_null_is_sent_where_it_was_written(tmp_path, server):
    payload = {
        "stop": None,
        "tools": [{"default": None}],
        "extra_body": None,
        "extra_headers": None,
    }
    runner(tmp_path, server, asking(payload)).run([Document(text="null", id="0")])
    (sent,) = server.payloads
    assert (sent["stop"], sent["tools"]) == (None, [{"default": None}])
    assert not {"extra_body", "extra_headers"} & set(sent)


TEXT_PART = {"type": "text", "text": "look"}
URL_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
FILLED = golden.sections("filled_messages")  # as Arrow fills messages, and what is sent


def test_keys_of_messages_that_are_null_are_not_sent_and_the_key_of_the_answer_stays(
    tmp_path, server
):
    payload = {"messages": [eval(filled) for filled in FILLED], "stop": None}
    run_job(tmp_path, server, 1, asking(payload))
    (sent,) = server.payloads
    for filled, message in zip(FILLED, sent["messages"], strict=True):
        golden.hold("filled_messages", filled, repr(message))
    assert list(sent["messages"][1]) == ["content", "role", "tool_calls"]
    assert sent["stop"] is None
    assert hash_payload(payload) != hash_payload({**payload, "messages": sent["messages"]})


def test_n_at_a_server_that_ignores_it_is_refused_wherever_it_stands(tmp_path, server):
    server.most_choices = 1
    for index, payload in enumerate([{"n": 3}, {"extra_body": {"n": 3}}]):
        with pytest.raises(ServerRefused, match="n=3"):
            run_job(tmp_path / str(index), server, 1, asking(payload))


def test_a_run_that_sent_extra_body_as_a_key_is_refused_by_its_name(tmp_path, server):
    """Its documents were answered without what stands in it."""
    config = {"default_generation_params": {"extra_body": {"top_k": 5}}}
    identity = runner(tmp_path, server, config=config).identity(1)
    kept = {name: value for name, value in identity.fields.items() if name != "extra_body"}
    (change,) = compare(kept, identity)
    assert (change.field, change.new) == ("extra_body", "merged")
    assert "as a key of that name" in change.note


def test_a_run_that_gets_another_kv_cache_is_refused(tmp_path, server):
    plain = runner(tmp_path, server).identity(1)
    config = {"model_kwargs": {"kv_cache_dtype": "fp8", "max_num_seqs": 8}}
    (change,) = compare(plain.fields, runner(tmp_path, server, config=config).identity(1))
    assert change.lines == ['model_kwargs.kv-cache-dtype: (not set) -> "fp8"']
    assert change.note == "before, types of the KV cache were not recorded"


def test_messages_and_keys_are_what_orjson_can_write(tmp_path, server):
    @dataclass
    class Message:
        content: str
        role: str = "user"

    async def rollout(document, generate):
        return await generate(payload={"messages": [Message(document.text)], 7: 1})

    run_job(tmp_path, server, 1, rollout)
    assert len(rows(tmp_path)) == 1


def test_a_result_may_stand_for_one_of_datatroves(tmp_path, server):
    async def rollout(document, generate):
        result = await ask(document, generate)
        fields = {
            "text": result.text,
            "finish_reason": "stop",
            "usage": result.usage,
            "reasoning": "",
        }
        theirs = Theirs(**fields)
        assert list(vars(result)) == list(vars(theirs))
        assert result == theirs == result
        assert result != Theirs(**{**fields, "text": "other"}) != result
        assert orjson.dumps(result) == orjson.dumps(theirs)
        for same in (result, pickle.loads(pickle.dumps(result))):
            assert (same.response_id, same.model, same.tool_calls) == ("fake", "", ())
        return {"copy": vars(result), **vars(result)}

    run_job(tmp_path, server, 1, rollout)
    ((found,),) = results(tmp_path)
    assert list(found) == ["copy", "text", "finish_reason", "usage", "reasoning"]
    assert list(found["copy"]) == list(found)[1:]


def test_a_payload_that_the_rollout_changes_while_it_waits_is_sent_as_it_was(tmp_path, server):
    """Its hash, by which the answer is kept, is of the same moment."""

    async def rollout(document, generate):
        message = {"role": "user", "content": ""}
        waiting = []
        for turn in range(3):
            message["content"] = f"turn {turn}"
            waiting.append(asyncio.ensure_future(generate({"messages": [message]})))
            await asyncio.sleep(0)  # it begins
        return [answer.text for answer in await asyncio.gather(*waiting)]

    run_job(tmp_path, server, 1, rollout)
    assert server.asked == {"turn 0": 1, "turn 1": 1, "turn 2": 1}


@pytest.mark.parametrize(
    "part", [None, [None], (None,), {"a": None}, [{"content": None}], [{"content": [None]}]]
)
def test_a_null_is_found_wherever_it_is(part):
    payload = {"messages": [{"role": "user", "content": "null"}], "temperature": 0.5}
    assert not hash_payload(payload)[1]
    assert hash_payload(payload | {"extra": part})[1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_lacks_is_refused_wherever_it_is(value):
    for part in (value, [value], {"a": value}, [{"content": value}], [{"content": [value]}]):
        with pytest.raises(ConfigError):
            hash_payload({"messages": [{"role": "user", "content": "x"}], "extra": part})
