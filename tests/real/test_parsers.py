"""The real argument parsers of vLLM and SGLang accept every command line that we can produce. See
environment.py.

For SGLang this is nearly all that can be tested here, because PyPI has no CPU kernels of it. Its
launch is tested up to the place where it would load the model, and its guard of the HTTP server by
itself.
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess

import pytest
from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceResult

from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import SINGLE_NODE, EngineLaunch, NodeGroup
from datatrove_ckpt.rollouts import ChunkedRollout, InvalidAnswer, PromptRollout, for_config
from tests import golden
from tests.real import environment

NODES = [NodeGroup(rank, ("10.0.0.1", "10.0.0.2")) for rank in (0, 1)]

pytestmark = pytest.mark.timeout(900)  # the first one also sets everything up

# Each ``answer`` says what the engine makes of a value. The parsers': of a list of arguments.
_PARSE = """
import contextlib, io
def answer(arguments):
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            return vars(parser.parse_args(arguments))
    except SystemExit:
        return {"error": text.getvalue()[-300:]}
"""
_VLLM = f"""
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
{_PARSE}"""
_SGLANG = f"""
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
{_PARSE}"""
_ASKED = """
import json, sys
for line in sys.stdin:
    code, given = json.loads(line)
    exec(code, names := {})
    for value in given:
        print("ANSWER", json.dumps(names["answer"](value), default=str), flush=True)
"""


@contextlib.contextmanager
def asked(python):
    """``ask(code, given)`` for an engine that is imported once."""
    program = [python, "-c", _ASKED]
    with subprocess.Popen(program, stdin=-1, stdout=-1, text=True) as process:

        def ask(code, given):
            print(json.dumps([code, given]), file=process.stdin, flush=True)
            answers = (line.partition("ANSWER ")[2] for line in process.stdout if "ANSWER " in line)
            found = list(map(json.loads, itertools.islice(answers, len(given))))
            assert len(found) == len(given), "it has ended"
            return found

        yield ask


@pytest.fixture(scope="module")
def vllm():
    with asked(environment.vllm_python()) as ask:
        yield ask


@pytest.fixture(scope="module")
def sglang():
    with asked(environment.sglang_python()) as ask:
        yield ask


def parsed(ask, parser, argvs):
    """What the parser makes of each; it must take them all."""
    values = ask(parser, argvs)
    assert [one for one in values if "error" in one] == []
    return values


def command_of(config, found=None, nodes=SINGLE_NODE):
    return config.engine.command(EngineLaunch(config, found, 4321, Secret("hush-hush-hush"), nodes))


def configs(server_type, kwargs):
    for size, trust, chosen in itertools.product((1, 2), (False, True), kwargs):
        yield InferenceConfig(
            server_type,
            "org/model",
            tp=size,
            dp=size,
            pp=size,
            trust_remote_code=trust,
            model_max_context=4096,
            model_kwargs=chosen,
        )


def test_vllm_accepts_every_command(vllm):
    kwargs = [
        None,
        {"enforce-eager": True, "gpu_memory_utilization": 0.9, "seed": -1},
        {
            "enable-prefix-caching": False,
            "dtype": "bfloat16",
            "speculative-config": {"method": "ngram"},
        },
        {"shutdown-timeout": None, "max-num-seqs": 7},
    ]
    commands = [command_of(config, "vllm") for config in configs("vllm", kwargs)]
    commands += [command_of(config) for config in configs("vllm", kwargs)]
    plain = InferenceConfig(
        "vllm",
        "org/model",
        model_max_context=4096,
        model_kwargs={"distributed-executor-backend": "ray"},
    )
    commands += [command_of(plain, start, nodes) for start in ("vllm", None) for nodes in NODES]
    argvs = [
        command.argv[command.argv.index("serve") + 1 :]
        for command in commands
        if "serve" in command.argv
    ]
    argvs += [command.argv[3:] for command in commands if "serve" not in command.argv]
    for values in parsed(vllm, _VLLM, argvs):
        assert values["host"] == "127.0.0.1"
        assert values["port"] == 4321
        assert values["max_model_len"] == 4096
        assert (
            values["tensor_parallel_size"]
            == values["pipeline_parallel_size"]
            == values["data_parallel_size"]
        )
        assert "org/model" in (values["model"], values["model_tag"])
        assert values["served_model_name"] in ("org/model", ["org/model"])
        assert values["disable_uvicorn_access_log"]
        assert values["shutdown_timeout"] in ("30", 30, "0", 0)
        assert values["api_key"] is None
        assert values["headless"] == (values["node_rank"] == 1)
        assert values["nnodes"] == 1 or values["distributed_executor_backend"] != "ray"


def test_sglang_accepts_every_command(sglang):
    kwargs = [
        None,
        {"mem-fraction-static": 0.8, "random-seed": 1, "disable-radix-cache": True},
        {"chunked_prefill_size": -1, "schedule-policy": "lpm"},
    ]
    argvs = [command_of(config).argv[2:] for config in configs("sglang", kwargs)]
    plain = InferenceConfig("sglang", "org/model", model_max_context=4096)
    argvs += [command_of(plain, nodes=nodes).argv[2:] for nodes in NODES]
    for values in parsed(sglang, _SGLANG, argvs):
        assert values["host"] == "127.0.0.1"
        assert values["port"] == 4321
        assert values["model_path"] == values["served_model_name"] == "org/model"
        assert values["context_length"] == 4096
        assert values["tp_size"] == values["dp_size"] == values["pp_size"]
        assert values["enable_metrics"]


ANSWER = {
    "type": "object",
    "properties": {"why": {"type": "string"}, "answer": {"type": "integer"}},
}
# With the default backend vLLM gives these to another one than xgrammar.
NOT_FOR_XGRAMMAR = golden.values("schemas_not_for_xgrammar", globals())
_XGRAMMAR_REFUSES = """
from vllm.v1.structured_output import backend_xgrammar
answer = backend_xgrammar.has_xgrammar_unsupported_json_features
"""


def with_schema(server_type, schema, **settings):
    config = InferenceConfig(server_type, "org/model", model_max_context=4096, **settings)
    for_config(PromptRollout("{text}", json_schema=schema), config)
    return config


def test_vllm_gets_and_takes_what_keeps_json_free_of_blanks_where_xgrammar_knows_the_schema(vllm):
    own = {"structured-outputs-config": {"backend": "guidance"}}
    dotted = {"structured-outputs-config.backend": "guidance"}
    asked = {"response_format": {"type": "json_object"}}
    plain = InferenceConfig("vllm", "org/model", default_generation_params=asked)
    made = [with_schema("vllm", ANSWER), plain]
    made += [with_schema("vllm", ANSWER, model_kwargs=kwargs) for kwargs in (own, dotted)]
    made += [with_schema("vllm", schema) for schema in NOT_FOR_XGRAMMAR]
    made.append(InferenceConfig("vllm", "org/model"))
    argvs = [command_of(config).argv[3:] for config in made]
    found = []
    for values in parsed(vllm, _VLLM, argvs):
        found.append(values["structured_outputs_config"])
    for free in found[:2]:
        assert "backend='xgrammar'" in free
        assert "disable_any_whitespace=True" in free
    for users in found[2:4]:
        assert "backend='guidance'" in users
        assert "disable_any_whitespace=False" in users
    for other in found[4:]:
        assert "backend='auto'" in other
        assert "disable_any_whitespace=False" in other
    schemas = [ANSWER, *NOT_FOR_XGRAMMAR]
    refused = vllm(_XGRAMMAR_REFUSES, schemas)
    assert refused == [False] + [True] * len(NOT_FOR_XGRAMMAR)


def test_sglang_gets_and_takes_what_keeps_json_free_of_blanks(sglang):
    own = {"constrained-json-whitespace-pattern": " ?"}
    made = [
        with_schema("sglang", ANSWER),
        with_schema("sglang", ANSWER, model_kwargs=own),
        InferenceConfig("sglang", "org/model"),
    ]
    argvs = [command_of(config).argv[2:] for config in made]
    found = []
    for values in parsed(sglang, _SGLANG, argvs):
        found.append(values["constrained_json_disable_any_whitespace"])
    assert found == [True, False, False]


_SGLANG_REQUESTS = """
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
def answer(payload):
    request = ChatCompletionRequest(model="m", **payload)
    values = request.to_sampling_params(stop=[], model_generation_config={})
    values["continued"] = request.continue_final_message
    return {name: values.get(name) for name in ("json_schema", "regex", "continued")}
"""


def test_sglang_understands_the_fields_of_rollouts(sglang):
    config = InferenceConfig("sglang", "org/model")
    forms = [
        {"json_schema": ANSWER},
        {"regex": "a|b"},
        {"choice": ["a", "b (c)"]},
    ]
    rollouts = [for_config(PromptRollout(**form, answer_attempts=1), config) for form in forms]
    rollouts.append(ChunkedRollout(max_chars_per_part=4, carry="continue"))
    payloads = []

    async def generate(payload):
        payloads.append(payload)
        return InferenceResult("a", "stop", {})

    for rollout in rollouts:
        with contextlib.suppress(InvalidAnswer):
            asyncio.run(rollout(Document(text="some text", id="1"), generate))
    values = sglang(_SGLANG_REQUESTS, payloads)
    assert list(json.loads(values[0]["json_schema"])["properties"]) == ["why", "answer"]
    assert [one["regex"] for one in values] == [None, "a|b", r"(a|b \(c\))", None, None]
    assert [one["continued"] for one in values] == [False, False, False, False, True]


def test_what_no_parser_knows_is_refused(vllm, sglang):
    for ask, parser, name in ((vllm, _VLLM, "--model"), (sglang, _SGLANG, "--model-path")):
        with pytest.raises(AssertionError, match="unrecognized arguments"):
            parsed(ask, parser, [(name, "m", "--no-such-flag")])


# Runs our launcher, with what needs a GPU in SGLang left out, and tells what reached its place.
_LAUNCH = """
import json, multiprocessing, os, runpy, sys, types
from sglang.srt.server_args import ServerArgs

KEY = os.environ["DATATROVE_CKPT_API_KEY"]

def launch_server(server_args):
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from sglang.srt.utils.auth import add_api_key_middleware
    app = FastAPI()
    app.get("/v1/models")(lambda: {})
    add_api_key_middleware(app, api_key=server_args.api_key, admin_api_key=None)
    client = TestClient(app)
    codes = [client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code for key in ("no", KEY)]
    print("REACHED", json.dumps({"model": server_args.model_path, "codes": codes}), flush=True)
    print("SETTINGS", server_args, server_args.resolved_dict(), flush=True)
    with multiprocessing.get_context("spawn").Pool(1) as child:
        child.apply(print, ("CHILD", server_args), {"flush": True})
        assert child.apply(os.system, ("echo ENVIRONMENT; env; ps -A -o args",)) == 0

ServerArgs.resolve_once = lambda self: None  # looks for GPUs
engine = sys.modules["sglang.srt.entrypoints.http_server"] = types.ModuleType("engine")
engine.launch_server = launch_server
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_sglangs_launch_has_the_key_and_shows_it_nowhere(tmp_path):
    command = command_of(InferenceConfig("sglang", "org/model"))
    (tmp_path / "launch.py").write_text(_LAUNCH)
    argv = [environment.sglang_python(), str(tmp_path / "launch.py"), *command.argv[1:]]
    environ = command.environment(os.environ)
    done = subprocess.run(argv, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reached = next(line for line in done.stdout.splitlines() if line.startswith("REACHED "))
    assert json.loads(reached.removeprefix("REACHED ")) == {
        "model": "org/model",
        "codes": [401, 200],
    }
    for what in ("SETTINGS ", "CHILD ", "ENVIRONMENT\n"):
        assert f"\n{what}" in done.stdout
    assert "api_key='***'" in done.stdout
    assert "hush-hush-hush" not in done.stdout + done.stderr
