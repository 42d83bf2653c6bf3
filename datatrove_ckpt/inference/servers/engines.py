"""From a config to the command line of a server. All functions are pure, except ``engine_command``.

Engines differ in argv and environment only; ``server.py`` runs them all alike. The flags are ones that the real parsers
of vLLM 0.33 and SGLang 0.5.23 accept. Three rules hold for every engine:

- it listens on 127.0.0.1, on a port that we choose;
- its API key is passed in the environment, never in argv, which every user of the machine can read;
- ``model_kwargs`` come last and override our flags, except for the address and the key, which they may not name. On
  several nodes, vLLM's ``distributed-executor-backend: ray`` is left out.

SGLang has no environment variable for its key, and prints its arguments into its log: ``sglang_launch.py`` passes the
key instead. With several tokenizer processes (``tokenizer-worker-num``) SGLang accepts no key at all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.inference.servers import sglang_launch
from datatrove_ckpt.inference.servers.gpu_slots import usable_cores
from datatrove_ckpt.inference.servers.installed import (
    find_vllm,
    require,
    require_interpreter,
    require_script,
    resolve_model_path,
)
from datatrove_ckpt.inference.servers.nodes import SINGLE_NODE, Nodes
from datatrove_ckpt.redaction import HiddenDict, Key

HOST = "127.0.0.1"
API_KEY_VARIABLE = "DATATROVE_CKPT_API_KEY"
# More parallel requests than this make llama.cpp slower on a laptop, and each costs the memory of a whole context.
_MAX_LLAMACPP_SLOTS = 8
_RESERVED = ("host", "port", "api-key")
_DUMMY_FLAGS = ("latency-ms",)
# datatrove connects several nodes by Ray, so its scripts ask vLLM for Ray. Ours are connected by vLLM's own flags,
# beside which vLLM refuses Ray.
_RAY = ("distributed-executor-backend", "ray")

# ``model_kwargs``. ``Any``, because its values are what users wrote in Python or YAML.
Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class EngineCommand:
    """How to launch a server.

    Attributes:
        argv: the command line; holds no secret.
        env: additions to the environment; may hold the API key, so it is never shown.
        takes_key: whether the server checks the API key it was given.
    """

    argv: tuple[str, ...]
    env: HiddenDict
    takes_key: bool = True


def engine_command(config: InferenceConfig, port: int, api_key: Key, nodes: Nodes = SINGLE_NODE) -> EngineCommand:
    """The command for ``config.server_type``. Checks first that the engine and its files are there.

    Raises:
        ConfigError: the model file or server script does not exist, or ``model_kwargs`` names host, port or API key.
        ServerStartFailed: the engine is not installed; the message says what to install.
    """
    if config.server_python is not None:
        require_interpreter(config.server_python)
    if config.server_type == "vllm":
        if nodes.count > 1 and _asks_for_ray(config):
            logger.info(f"{_RAY[0]}: ray is left out: vLLM's own {nodes.count} nodes need no Ray cluster.")
        return vllm_command(config, port, api_key, find_vllm(config.server_python), nodes)
    if config.server_type == "sglang":
        if config.server_python is None:
            require("sglang", "sglang")
        return sglang_command(config, port, api_key, nodes)
    if config.server_type == "llamacpp":
        require("xllamacpp", "llamacpp")
        path = resolve_model_path(config.model_name_or_path)
        return llamacpp_command(config, port, api_key, path, usable_cores())
    if config.server_type == "custom":
        require_script(_kwargs(config)["server_script"])
        return custom_command(config, port, api_key)
    if config.server_type == "dummy":
        return dummy_command(config, port, api_key)
    raise ConfigError(f"server_type: {config.server_type!r} has no server to launch.")


def vllm_command(
    config: InferenceConfig, port: int, api_key: Key, vllm_executable: str | None, nodes: Nodes = SINGLE_NODE
) -> EngineCommand:
    """vLLM's OpenAI server.

    ``--served-model-name`` makes requests and answers name the model as the config does.
    """
    flags: dict[str, object] = {
        "host": HOST,
        "port": port,
        "max-model-len": config.model_max_context,
        "served-model-name": config.model_name_or_path,
        "disable-uvicorn-access-log": True,
        # By default vLLM aborts its requests at a SIGTERM: some clients then get a 200 with half a text, others get no
        # answer. vLLM has this flag since 0.18, which the extra requires.
        "shutdown-timeout": max(1, int(config.server_drain_sec)),
        "trust-remote-code": config.trust_remote_code or None,
        "tensor-parallel-size": _if_parallel(config.tp),
        "data-parallel-size": _if_parallel(config.dp),
        "pipeline-parallel-size": _if_parallel(config.pp),
        "nnodes": _if_parallel(nodes.count),
        "node-rank": nodes.rank if nodes.count > 1 else None,
        "master-addr": nodes.head_host if nodes.count > 1 else None,
        "master-port": config.master_port if nodes.count > 1 else None,
        "headless": True if nodes.rank > 0 else None,
    }
    env = HiddenDict(
        # Without these two, transformers imports TensorFlow if it finds it: tens of seconds per start, for nothing.
        USE_TF="0",
        TRANSFORMERS_NO_TF="1",
        VLLM_NO_USAGE_STATS="1",  # private by default: otherwise vLLM reports model and hardware to its developers
        VLLM_API_KEY=api_key.reveal(),
    )
    start = _vllm_start(config, vllm_executable, nodes)
    given = dict(_dashed_kwargs(config))
    if nodes.count > 1 and _asks_for_ray(config):
        del given[_RAY[0]]
    return EngineCommand((*start, config.model_name_or_path, *_arguments(flags, given)), env)


def _asks_for_ray(config: InferenceConfig) -> bool:
    return str(_dashed_kwargs(config).get(_RAY[0])).lower() == _RAY[1]


def _vllm_start(config: InferenceConfig, vllm_executable: str | None, nodes: Nodes) -> tuple[str, ...]:
    """Everything before the model's name. Without an executable, vLLM is started as a module."""
    if vllm_executable:
        return vllm_executable, "serve"
    if nodes.count > 1:  # the module of the server alone does not know --headless
        return _python(config), "-m", "vllm.entrypoints.cli.main", "serve"
    return _python(config), "-m", "vllm.entrypoints.openai.api_server", "--model"


def sglang_command(config: InferenceConfig, port: int, api_key: Key, nodes: Nodes = SINGLE_NODE) -> EngineCommand:
    """SGLang's server, started by ``sglang_launch.py``."""
    start = (_python(config), sglang_launch.__file__, "--model-path", config.model_name_or_path)
    flags: dict[str, object] = {
        "host": HOST,
        "port": port,
        "context-length": config.model_max_context,
        "served-model-name": config.model_name_or_path,
        "log-level-http": "warning",
        "enable-metrics": True,
        "trust-remote-code": config.trust_remote_code or None,
        "tp-size": _if_parallel(config.tp),
        "dp-size": _if_parallel(config.dp),
        "pp-size": _if_parallel(config.pp),
        "nnodes": _if_parallel(nodes.count),
        "node-rank": nodes.rank if nodes.count > 1 else None,
        "dist-init-addr": f"{nodes.head_host}:{config.master_port}" if nodes.count > 1 else None,
    }
    given = _dashed_kwargs(config)
    takes_key = int(given.get("tokenizer-worker-num") or 1) == 1
    env = HiddenDict(USE_TF="0", TRANSFORMERS_NO_TF="1", **(_key_in_environment(api_key) if takes_key else {}))
    return EngineCommand((*start, *_arguments(flags, given)), env, takes_key)


def llamacpp_command(config: InferenceConfig, port: int, api_key: Key, model_path: Path, cores: int) -> EngineCommand:
    """The embedded llama.cpp: ``datatrove_ckpt.inference.servers.llamacpp``, which binds to 127.0.0.1 only.

    Args:
        cores: how many this process may use. Replicas divide them, because more threads than cores slow all of them.
    """
    start = (sys.executable, "-m", "datatrove_ckpt.inference.servers.llamacpp")
    flags = {
        "model": str(model_path),
        "alias": config.model_name_or_path,
        "port": port,
        "context": config.model_max_context,
        "parallel": _llamacpp_slots(config),
        "threads": max(1, cores // config.replicas),
    }
    return EngineCommand((*start, *_arguments(flags, _dashed_kwargs(config))), _key_in_environment(api_key))


def _llamacpp_slots(config: InferenceConfig) -> int:
    requests = config.max_concurrent_generations
    return _MAX_LLAMACPP_SLOTS if requests == "auto" else min(requests, _MAX_LLAMACPP_SLOTS)


def dummy_command(config: InferenceConfig, port: int, api_key: Key) -> EngineCommand:
    """The server of canned answers, ``datatrove_ckpt.inference.servers.dummy``, which binds to 127.0.0.1 only.

    A script is tried out with it as it is, so the flags of its true engine are ignored.
    """
    start = (sys.executable, "-m", "datatrove_ckpt.inference.servers.dummy")
    given = {_dashed(name): value for name, value in (config.model_kwargs or {}).items()}
    flags = {name: given[name] for name in _DUMMY_FLAGS if name in given}
    return EngineCommand((*start, *_arguments({"port": port}, flags)), _key_in_environment(api_key))


def custom_command(config: InferenceConfig, port: int, api_key: Key) -> EngineCommand:
    """The user's own script, started as datatrove starts it: ``python SCRIPT --port N`` and the other model_kwargs.

    Names of flags keep their underscores, because the user wrote the script's parser. The key is in the environment
    variable DATATROVE_CKPT_API_KEY, and is sent as a bearer token. The script need not check it.
    """
    kwargs = dict(_kwargs(config))
    script = str(kwargs.pop("server_script"))
    flags = [part for name, value in kwargs.items() for part in _flag(name, value, joined=True)]
    return EngineCommand((_python(config), script, "--port", str(port), *flags), _key_in_environment(api_key))


def _key_in_environment(api_key: Key) -> HiddenDict:
    return HiddenDict({API_KEY_VARIABLE: api_key.reveal()})


def _python(config: InferenceConfig) -> str:
    return config.server_python or sys.executable


def _if_parallel(size: int) -> int | None:
    return size if size > 1 else None


def _kwargs(config: InferenceConfig) -> Kwargs:
    """``model_kwargs``, checked.

    Raises:
        ConfigError: one of them sets the address or the API key.
    """
    kwargs = config.model_kwargs or {}
    for name in kwargs:
        if _dashed(name) in _RESERVED:
            raise ConfigError(
                f"model_kwargs: {name!r} cannot be set: servers listen on {HOST}, on a free port, with a fresh key. "
                'To use another address, start the server yourself and set server_type "endpoint".'
            )
    return kwargs


def _dashed_kwargs(config: InferenceConfig) -> Kwargs:
    return {_dashed(name): value for name, value in _kwargs(config).items()}


def _arguments(flags: Mapping[str, object], given: Kwargs) -> tuple[str, ...]:
    """Our flags, except those that the user sets, and then the user's."""
    ours = [part for name, value in flags.items() if name not in given for part in _flag(name, value)]
    users = [part for name, value in given.items() for part in _flag(name, value, joined=True)]
    return (*ours, *users)


def _flag(name: str, value: object, *, joined: bool = False) -> tuple[str, ...]:
    """One flag as argv, in datatrove's mapping. ``joined`` gives ``--name=value``, which a value like "-1" needs."""
    if value is None:
        return ()
    if value is True:
        return (f"--{name}",)
    if value is False:
        return (f"--no-{name}",)
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return (f"--{name}={text}",) if joined else (f"--{name}", text)


def _dashed(name: str) -> str:
    return name.replace("_", "-")
