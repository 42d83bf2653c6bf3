"""From a config to the command line of a server: pure functions, and one impure door, ``engine_command``.

Engines differ in argv and environment only; ``server.py`` runs them all alike. Flags are those that the real parsers
of vLLM 0.33 and SGLang 0.5.23 accept. Three rules hold for every engine:

- it listens on 127.0.0.1, on a port that we choose;
- its API key travels in the environment, never in argv, which every user of the machine can read;
- ``model_kwargs`` come last and win over flags of ours, except for the address and the key, which they may not name.

SGLang has no variable for its key, and prints its arguments into its log: see ``sglang_launch.py`` for how it is handed
over. Only with several tokenizer processes (``tokenizer-worker-num``) SGLang accepts no key at all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from datatrove_ckpt.inference.servers.nodes import ALONE, Nodes
from datatrove_ckpt.redaction import HiddenDict, Key

HOST = "127.0.0.1"
API_KEY_VARIABLE = "DATATROVE_CKPT_API_KEY"
# More slots than this make a laptop's llama.cpp slower, not faster, and each one costs a whole context of memory.
_MAX_LLAMACPP_SLOTS = 8
_RESERVED = ("host", "port", "api-key")


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


def engine_command(config: InferenceConfig, port: int, api_key: Key, nodes: Nodes = ALONE) -> EngineCommand:
    """The command for ``config.server_type``, after a check that what it needs is installed and there.

    Raises:
        ConfigError: the model file or server script does not exist, or ``model_kwargs`` names host, port or API key.
        ServerStartFailed: the engine is not installed; says what to install.
    """
    if config.server_python is not None:
        require_interpreter(config.server_python)
    if config.server_type == "vllm":
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
    config: InferenceConfig, port: int, api_key: Key, vllm_executable: str | None, nodes: Nodes = ALONE
) -> EngineCommand:
    """vLLM's OpenAI server. Without an executable its module is run, which is the same server, but for one node only.

    ``--served-model-name`` makes answers and requests name the model as the config does.
    """
    name = "vllm.entrypoints.openai.api_server"
    start = (vllm_executable, "serve") if vllm_executable else (_python(config), "-m", name, "--model")
    if nodes.count > 1 and not vllm_executable:  # only the command line's own code knows --headless
        start = (_python(config), "-m", "vllm.entrypoints.cli.main", "serve")
    flags: dict[str, Any] = {
        "host": HOST,
        "port": port,
        "max-model-len": config.model_max_context,
        "served-model-name": config.model_name_or_path,
        "disable-uvicorn-access-log": True,
        # Its default is to abort what runs when a SIGTERM comes, which some clients then see as a 200 with half a
        # text, and others as silence. vLLM has the flag since 0.18; the extra asks for that.
        "shutdown-timeout": max(1, int(config.server_drain_sec)),
        "trust-remote-code": config.trust_remote_code or None,
        "tensor-parallel-size": _if_parallel(config.tp),
        "data-parallel-size": _if_parallel(config.dp),
        "pipeline-parallel-size": _if_parallel(config.pp),
        "nnodes": _if_parallel(nodes.count),
        "node-rank": nodes.rank if nodes.count > 1 else None,
        "master-addr": nodes.first_host if nodes.count > 1 else None,
        "master-port": config.master_port if nodes.count > 1 else None,
        "headless": True if nodes.rank > 0 else None,
    }
    env = HiddenDict(
        # transformers imports TensorFlow when it finds it: tens of seconds per start, for nothing.
        USE_TF="0",
        TRANSFORMERS_NO_TF="1",
        VLLM_NO_USAGE_STATS="1",  # private by default: vLLM otherwise reports model and hardware to its makers
        VLLM_API_KEY=api_key.reveal(),
    )
    return EngineCommand((*start, config.model_name_or_path, *_arguments(flags, config)), env)


def sglang_command(config: InferenceConfig, port: int, api_key: Key, nodes: Nodes = ALONE) -> EngineCommand:
    """SGLang's server, started by ``sglang_launch.py``."""
    start = (_python(config), sglang_launch.__file__, "--model-path", config.model_name_or_path)
    flags: dict[str, Any] = {
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
        "dist-init-addr": f"{nodes.first_host}:{config.master_port}" if nodes.count > 1 else None,
    }
    given = _dashed_kwargs(config)
    takes_key = int(given.get("tokenizer-worker-num") or 1) == 1
    env = HiddenDict(USE_TF="0", TRANSFORMERS_NO_TF="1", **(_key_in_environment(api_key) if takes_key else {}))
    return EngineCommand((*start, *_arguments(flags, config)), env, takes_key)


def llamacpp_command(config: InferenceConfig, port: int, api_key: Key, model_path: Path, cores: int) -> EngineCommand:
    """The embedded llama.cpp: ``datatrove_ckpt.inference.servers.llamacpp``, which binds to 127.0.0.1 only.

    Args:
        cores: what this process may use; replicas divide them. With more threads than cores all of them are slower.
    """
    start = (sys.executable, "-m", "datatrove_ckpt.inference.servers.llamacpp")
    flags = {
        "model": str(model_path),
        "alias": config.model_name_or_path,
        "port": port,
        "context": config.model_max_context,
        "parallel": min(config.max_concurrent_generations, _MAX_LLAMACPP_SLOTS),
        "threads": max(1, cores // config.replicas),
    }
    return EngineCommand((*start, *_arguments(flags, config)), _key_in_environment(api_key))


def dummy_command(config: InferenceConfig, port: int, api_key: Key) -> EngineCommand:
    """The server of canned answers, ``datatrove_ckpt.inference.servers.dummy``, which binds to 127.0.0.1 only."""
    start = (sys.executable, "-m", "datatrove_ckpt.inference.servers.dummy")
    return EngineCommand((*start, *_arguments({"port": port}, config)), _key_in_environment(api_key))


def custom_command(config: InferenceConfig, port: int, api_key: Key) -> EngineCommand:
    """A script of the user's, started as datatrove starts it: ``python SCRIPT --port N`` and the other model_kwargs.

    Names of flags stay as they are, underscores too: the script's parser is not ours. The key is in the environment
    variable DATATROVE_CKPT_API_KEY and sent as a bearer token; a script may check it or not.
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


def _kwargs(config: InferenceConfig) -> Mapping[str, Any]:
    """``model_kwargs``, checked.

    Raises:
        ConfigError: a key that names the address or the API key.
    """
    kwargs = config.model_kwargs or {}
    for name in kwargs:
        if _dashed(name) in _RESERVED:
            raise ConfigError(
                f"model_kwargs: {name!r} is not yours to set: servers listen on {HOST}, on a free port, with a fresh "
                f'key. For a server of your own, start it yourself and use server_type "endpoint".'
            )
    return kwargs


def _dashed_kwargs(config: InferenceConfig) -> dict[str, Any]:
    return {_dashed(name): value for name, value in _kwargs(config).items()}


def _arguments(flags: Mapping[str, Any], config: InferenceConfig) -> tuple[str, ...]:
    """Our flags, less those the user gives, then the user's."""
    given = _dashed_kwargs(config)
    ours = [part for name, value in flags.items() if name not in given for part in _flag(name, value)]
    theirs = [part for name, value in given.items() for part in _flag(name, value, joined=True)]
    return (*ours, *theirs)


def _flag(name: str, value: Any, *, joined: bool = False) -> tuple[str, ...]:
    """One flag as argv, in datatrove's mapping; ``joined`` gives ``--name=value``, which a value like "-1" needs."""
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
