"""A script for datatrove's runner works with its import line changed, and a page in docs/ says what
differs.
"""

import ast
import asyncio
import json

import pytest
from datatrove.pipeline.inference import run_inference as theirs
from datatrove.pipeline.inference import types as types_of_datatrove

import datatrove_ckpt
from datatrove_ckpt import InferenceConfig, InferenceError, InferenceRunner, ServerError
from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.config.inference_config import SINGLE_NODE, EngineLaunch
from datatrove_ckpt.inference.client.client import ModelServers
from datatrove_ckpt.testing import FakeServer
from tests.jobs import (
    ask,
    chat,
    config,
    documents,
    rejects,
    rejects_documents,
    run_job,
    runner,
    writer,
)
from tests.pages import ROOT, pages, table_rows

_NAMES = "InferenceConfig, InferenceError, InferenceResult, InferenceRunner, ServerError"


def test_the_submodules_are_modules_with_all_names():
    import datatrove_ckpt.run_inference as run_inference
    import datatrove_ckpt.types as types

    assert {*_NAMES.split(", ")} <= {*dir(run_inference)}
    assert types.RolloutFunction.__module__ == "datatrove.pipeline.inference.types"
    assert types.InferenceError is run_inference.InferenceError


def test_a_request_is_the_one_that_datatrove_sends_in_the_same_order(tmp_path, server):
    """Engines answer in the order of a schema: a reason that comes after the answer is no
    reason.
    """
    schema = {
        "type": "object",
        "properties": {"why": {"type": "string"}, "answer": {"type": "string"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    defaults = {"top_p": 0.5, "chat_template_kwargs": {"z": 1, "a": {"y": 1, "b": 2}}, "seed": 1}
    written = {
        "seed": 2,
        "tools": [tool],
        "guided_json": schema,
        "documents": [{"title": "t", "body": "b"}],
    }
    sent = []

    class Server:
        async def make_request(self, payload):
            sent.append(payload)
            return {"choices": [{"message": {"content": ""}, "finish_reason": "stop"}]}

    async def rollout(document, generate):
        return await generate(chat("x", **written))

    async def by_datatrove(payload):
        theirs_config = theirs.InferenceConfig("dummy", "fake", default_generation_params=defaults)
        step = theirs.InferenceRunner(rollout, theirs_config, writer(tmp_path))
        return await step._send_request(Server(), payload, asyncio.Semaphore())

    asyncio.run(rollout(documents(1)[0], by_datatrove))
    run_job(tmp_path, server, 1, rollout, config={"default_generation_params": defaults})
    assert [json.dumps(one) for one in server.payloads] == [json.dumps(one) for one in sent]


# the table of differences ------------------------------------------------------------------------

PAGE = "docs/coming-from-datatrove.md"
TABLE = (
    pages()[PAGE]
    .partition("<!-- differences: start -->")[2]
    .partition("<!-- differences: end -->")[0]
)
ROWS = table_rows(TABLE)


def missing(names):
    """Those that the page does not name."""
    return [name for name in names if f"`{name}`" not in TABLE]


@pytest.mark.slow
def test_each_row_names_a_test_that_exists():
    assert len(ROWS) > 30
    for row in ROWS:
        path, _, name = row[-1].strip("`").partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        functions = [
            node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        assert name in {function.name for function in functions}, row
        assert all(row[:3]), row


def test_the_page_names_each_attribute_that_is_missing(tmp_path):
    config = theirs.InferenceConfig("dummy", "m")
    runner_of_datatrove = theirs.InferenceRunner(ask, config, writer(tmp_path))
    ours = InferenceRunner(ask, config, writer(tmp_path))
    names = {
        name
        for name in (*dir(runner_of_datatrove), *vars(runner_of_datatrove))
        if not name.startswith("_")
    }
    assert missing(sorted(names - {*dir(ours), *vars(ours)})) == []


def test_the_page_names_each_import_that_is_missing():
    of_datatrove = {
        name
        for name, value in vars(theirs).items()
        if isinstance(value, type) and value.__module__.startswith("datatrove.pipeline.inference")
    }
    offered = {*datatrove_ckpt.__all__, *vars(types_of_datatrove)}
    assert missing(sorted(of_datatrove - offered)) == []


def test_a_request_without_a_limit_has_one_of_an_hour():
    config = InferenceConfig("dummy", "m")
    assert config.request_timeout is None
    assert ModelServers(config).timeout == 3600


def test_a_server_error_of_a_rollout_is_a_failure_of_its_document(tmp_path):
    async def rollout(document, generate):
        raise ServerError("mine")

    with FakeServer() as server, pytest.raises(InferenceError, match=r"'id 0'.*mine"):
        run_job(tmp_path, server, 1, rollout)


@pytest.mark.matrix("status", [400, 413, 414, 422, 431])
def test_each_status_of_a_rejection_skips(tmp_path, status):
    with FakeServer(status=rejects(["text 1"], status)) as server:
        step = runner(tmp_path, server, skip_bad_requests=True)
        step.run(documents(3))
    assert step.stats.stats["skipped_bad_requests"].total == 1


def test_payload_and_config_stay_as_they_are(tmp_path, server):
    payload = chat("x")
    before = json.dumps(payload)

    async def rollout(document, generate):
        return await generate(payload)

    settings = config(server, default_generation_params={"seed": 1}, model_kwargs={"a": 1})
    InferenceRunner(rollout, settings, writer(tmp_path)).run(documents(2))
    assert json.dumps(payload) == before
    assert settings.model_kwargs == {"a": 1}


def test_sglang_cuts_no_prompt_unasked():
    plain = InferenceConfig("sglang", "m")
    asked = InferenceConfig("sglang", "m", model_kwargs={"allow-auto-truncate": True})
    assert [
        "--allow-auto-truncate"
        in one.engine.command(EngineLaunch(one, None, 1, Secret("k"), SINGLE_NODE)).argv
        for one in (plain, asked)
    ] == [False, True]


def test_documents_in_memory_get_no_marks(tmp_path):
    async def rollout(document, generate):
        return None if document.id == "id 0" else await ask(document, generate)

    given = documents(2)
    with FakeServer(status=rejects_documents) as server:
        runner(tmp_path, server, rollout, skip_bad_requests=True).run(given)
    assert [document.metadata for document in given] == [{"rollout_results": []}, {}]


@pytest.mark.slow
def test_server_logs_have_the_rank_in_their_names(tmp_path):
    settings = InferenceConfig(
        "dummy", "m", server_log_folder=str(tmp_path / "logs"), reuse_servers=False
    )
    step = InferenceRunner(ask, settings, writer(tmp_path))
    step.run(documents(1), rank=3)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["server_rank_00003.log"]
