"""The models of a run change: their order, their names, or what decides about the answers of one
that is not first.
"""

import os
import re

import orjson
import pytest

from datatrove_ckpt.checkpoint.identity import fields_without_secrets
from datatrove_ckpt.checkpoint.layout import CACHE
from datatrove_ckpt.checkpoint.request_cache import RequestCache, payload_hash
from datatrove_ckpt.errors import (
    CheckpointMismatch,
    ConfigError,
    DocumentFailed,
    ServerRefused,
)
from datatrove_ckpt.testing import FakeServer
from tests.jobs import chat, config, documents, letters, rejects, rejects_documents, rows, run_job
from tests.two_models import runner as runner_of_both
from tests.two_models import says


@pytest.fixture
def a():
    with says("a") as server:
        yield server


@pytest.fixture
def b():
    with says("b") as server:
        yield server


async def first_then_second(document, generate):
    """All models get the same payload, the one that was first in the first attempt at first."""
    order = os.environ["ORDER"].split()
    return {name: (await getattr(generate, name)(chat(document.text))).text for name in order}


def attempt(folder, models, seed=None, **changes):
    configs = {name: config(server, seed=seed) for name, server in models.items()}
    run_job(folder, configs, 1, first_then_second, **changes)


@pytest.mark.parametrize("seed", [None, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "names, kept",
    [("judge=b writer=a", True), ("judge=a writer=b", True), ("author=a critic=b", False)],
)
def test_an_answer_stays_with_the_name_of_its_model(here, a, b, names, kept, seed, monkeypatch):
    """All have the same model name and payload.

    An endpoint may move, so the name is what a model is known by.
    """
    b._status = lambda payload, times: 401
    monkeypatch.setenv("ORDER", "writer judge")
    with pytest.raises(ServerRefused):
        attempt(here, {"writer": a, "judge": b}, seed)
    b._status = lambda payload, times: None
    servers = {"a": a, "b": b}
    models = {pair[:-2]: servers[pair[-1]] for pair in names.split()}
    with pytest.raises(CheckpointMismatch, match="models: "):
        attempt(here, models, seed)
    monkeypatch.setenv("ORDER", " ".join(models))
    attempt(here, models, seed, accept_changes=True)
    (row,) = rows(here)
    own = {pair[:-2]: f"{pair[-1]} on text 0" for pair in names.split()}
    assert row["metadata"]["rollout_results"] == [own | ({"writer": "a on text 0"} if kept else {})]
    assert len(a.payloads) + len(b.payloads) == (3 if kept else 4)


def test_the_key_of_a_single_model_is_the_hash_of_its_payload(here, a):
    a._status = rejects(["second"], 401)

    async def two(document, generate):
        return [(await generate(chat(text))).text for text in (document.text, "second")]

    with pytest.raises(ServerRefused):
        run_job(here, a, 1, two)
    cache = RequestCache(here / "checkpoints/00000" / CACHE)
    (key,) = cache.answers(0)
    cache.close()
    sent = next(one for one in a.payloads if "second" not in str(one))
    assert key.payload_hash == payload_hash(orjson.dumps(sent, option=orjson.OPT_SORT_KEYS))
    a._status = lambda payload, times: None
    run_job(here, {"writer": config(a)}, 1, two)
    assert len([one for one in a.payloads if "second" not in str(one)]) == 1


async def by_paths(document, generate):
    """All paths get the same payload, in this order."""
    found = {}
    for path in os.environ["ORDER"].split():
        answer = await generate(chat(document.text), path=path)
        found[path] = answer.text or answer.answer
    return found


def test_an_answer_stays_with_the_path_of_its_request(here, a, monkeypatch):
    a.paths["/other"] = lambda payload: {"from": "another path"}
    monkeypatch.setenv("ORDER", "/v1/chat/completions no-path")
    with pytest.raises(ConfigError, match="no-path"):
        run_job(here, a, 1, by_paths)
    monkeypatch.setenv("ORDER", "/other /v1/chat/completions")
    run_job(here, a, 1, by_paths)
    (row,) = rows(here)
    assert row["metadata"]["rollout_results"] == [
        {"/other": {"from": "another path"}, "/v1/chat/completions": "a on text 0"}
    ]
    assert a.asked.total() == 2


# rejections --------------------------------------------------------------------------------------


def test_a_rejection_names_its_model(here, a):
    with FakeServer(status=rejects_documents) as judges:
        named = r"failed: refused with 400 \(judge: BadRequestError: HTTP 400\)"
        for asked in ("If the server was at fault", "The request was not sent this time"):
            with pytest.raises(DocumentFailed, match=rf"{named}.*{asked}"):
                runner_of_both(here, a, judges).run(documents(1))
        runner_of_both(here, a, judges, skip_bad_requests=True).run(documents(1))
    (letter,) = letters(here)
    assert letter["error"] == "refused with 400 (judge: BadRequestError: HTTP 400)"


# identities --------------------------------------------------------------------------------------


def test_secrets_among_the_parameters_of_a_named_model_are_not_kept():
    for name in (
        "default_generation_params",
        "judge.default_generation_params",
        "judge.model_kwargs",
    ):
        assert b"s3cret" not in orjson.dumps(
            fields_without_secrets({name: {"api_key": "s3cret-s3cret"}})
        ), name


# answers_from ------------------------------------------------------------------------------------

REVISION = {"model_kwargs": {"revision": "v2"}}


@pytest.fixture
def old(here):
    return str(here / "checkpoints")


@pytest.mark.parametrize(
    "changes, line",
    [
        (REVISION, 'judge.model_kwargs.revision: (not set) -> "v2"'),
        ({"use_chat": False}, "judge.use_chat: true -> "),
    ],
)
def test_old_answers_bind_the_settings_of_each_model(here, old, a, b, changes, line):
    runner_of_both(here, a, b, keep_answers=True).run(documents(2))
    sent = [len(server.payloads) for server in (a, b)]
    with pytest.raises(CheckpointMismatch, match=re.escape(line)):
        runner_of_both(here / "new", a, b, judge=changes, answers_from=old).run(documents(2))
    runner_of_both(here / "new", a, b, judge={"model_name_or_path": "other"}, answers_from=old).run(
        documents(2)
    )
    assert [len(server.payloads) for server in (a, b)] == [sent[0], sent[1] + 2], (
        "another model is in the payload"
    )


def test_no_answer_of_a_model_that_was_changed_midway_is_used(here, old, a, b):
    runner_of_both(here, a, b, keep_answers=True).run(documents(2))
    runner_of_both(here, a, b, keep_answers=True, accept_changes=True, judge=REVISION).run(
        documents(4)
    )
    sent = [len(server.payloads) for server in (a, b)]
    runner_of_both(here / "new", a, b, judge=REVISION, answers_from=old).run(documents(4))
    assert [len(server.payloads) for server in (a, b)] == [number + 4 for number in sent]
