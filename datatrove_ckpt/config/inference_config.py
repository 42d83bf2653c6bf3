"""The settings of models and servers: datatrove 0.10's fields, defaults and checks, then ours.

``inference.client.responses`` parses all forms of answers, because an endpoint may be any engine.
"""

from __future__ import annotations

import json
import keyword
import os
import re
import shutil
import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

from datatrove_ckpt.common import BATCH, JsonObject
from datatrove_ckpt.common.counts import Tokens
from datatrove_ckpt.common.redaction import MIRROR_KEY_VARIABLE, Secret, names_secret
from datatrove_ckpt.common.setting_types import (
    Count,
    CountFromZero,
    Positive,
    argument_hint,
    check,
    check_value,
    one_of,
    takes,
)
from datatrove_ckpt.config.endpoints import EndpointConfig, check_prices, check_url, check_variable
from datatrove_ckpt.config.generation_params import (
    TOKEN_LIMITS,
    AnswerPolicy,
    BadAnswerSetting,
    answer_policy,
    check_generation_params,
)
from datatrove_ckpt.errors import ConfigError, ServerStartFailed

_MOST_COST = 1 << 43  # of an answer, in billionths: sums of a million answers fit into 64 bits
_STARTING = (
    "server_start_timeout_sec",
    "server_ready_max_attempts",
    "server_ready_delay_sec",
    "server_start_max_retries",
)
"""Settings whose bounds datatrove's scripts know in its words."""
# The first setting that fits an answer applies: loops are often cut off.
_BAD_ANSWERS = ("on_loop", "on_refusal", "on_cut_off")


@dataclass(frozen=True)
class EngineApi:
    """An API of an engine.

    Attributes:
        path: path; "/v1/..." is below the API's URL, all other paths are below the server's.
        names: names of the payload's keys, in the order of the arguments of ``generate``'s method.
        fixed: further keys of each payload. A payload's own value comes first.
    """

    path: str
    names: tuple[str, ...]
    fixed: Mapping[str, object] = field(default_factory=dict)

    def payload(self, values: tuple[object, ...], params: Mapping[str, object]) -> JsonObject:
        named = dict(zip(self.names, values, strict=True))
        return {**named, **self.fixed, **params}


@dataclass
class InferenceConfig:
    """The settings of a model: its server, the launch of the server, and the requests to it.

    The fields up to ``server_start_max_retries`` come from datatrove's ``InferenceConfig``; the
    others are ours. In brackets: the effect of another value on a run that has begun. ``identity``:
    the run is refused. ``request``: likewise, and its requests differ. ``free``: the run continues.

    Attributes:
        server_type (identity): an engine, such as "vllm"; "endpoint" (runs already), "dummy"
            (canned answers) or "custom" (your own script, ``model_kwargs["server_script"]``).
        model_name_or_path (request): name or path of the model. For llamacpp a GGUF file: a path,
            ``package://NAME/FILE`` of an installed package, ``hf://ORG/NAME`` (one is chosen) or
            ``hf://ORG/NAME/FILE``.
        model_max_context (free): prompt and answer together, in tokens.
        use_chat (identity): /v1/chat/completions (True) or /v1/completions (False).
        endpoint_url (free): base URL of an endpoint, or a list. Without a path it gets /v1.
            ``${NAME}`` is a variable of the task's environment; a secret in the query must be
            written so.
        api_key (free): key for the endpoint; prefer ``api_key_env``.
        metric_interval (free): seconds between two log lines about progress.
        tp (free): GPUs that share each layer. One server needs tp * dp * pp GPUs.
        dp (free): copies of the model in one server.
        pp (free): stages that the model's layers are divided into.
        default_generation_params (request): payload keys that a rollout's own override.
        rollouts_per_document (identity): rollouts of each document.
        max_concurrent_generations (free): requests in flight at each server, of all tasks that
            share it. "auto": as many as keep a short queue in the engine, and their documents in
            its cache (vLLM, SGLang, also as an endpoint). Without metrics it starts with 16, and
            follows the server's answers and limits, up to 500.
        max_concurrent_documents (free): documents in work, per task. None: the capacity of all
            servers // rollouts per document, times ``texts_per_request``, but at most 10,000 for
            that product.
        request_timeout (free): seconds for one attempt of a request, also at an endpoint that
            hangs. None: 3600.
        model_kwargs (identity): more flags of the server: ``{"enforce-eager": True, "seed": 1}``.
        server_log_folder (free): folder for the servers' logs. None: a temporary file, deleted when
            its server stops.
        master_port (free): port of the head node when several nodes serve one model. The next port
            is also used.
        server_start_timeout_sec (free): datatrove's; without effect here.
        server_ready_max_attempts (free): attempts to reach a starting server; times
            ``server_ready_delay_sec``, the longest start, model loading included.
        server_ready_delay_sec (free): longest pause between two such attempts.
        server_start_max_retries (free): attempts to start the server again after the first start
            failed.
        api_key_env (free): the environment variable with the endpoint's key.
        endpoints (free): in place of ``endpoint_url`` and ``api_key_env``: endpoints of several
            providers, each with ``url``, and perhaps ``api_key_env``, ``model`` (the name of the
            same model there), ``requests_per_minute``, ``tokens_per_minute``, ``prices`` and
            ``weight``. A name of the model that is new to the run is refused.
        trust_remote_code (free): let vLLM and SGLang run code that comes with the model.
        request_max_attempts (free): attempts of a request that fails while others are answered
            (408, 409, 425, 429, 5xx, resets, timeouts, incomplete answers), before its document is
            at fault.
        server_patience_seconds (free): how long the run waits while requests fail, and none is
            answered (unreachable, 5xx, 429). Then the task stops; no document is blamed. At 600, a
            new run at a terminal waits 30 s for an endpoint where nothing listens.
        server_stop_timeout_sec (free): time until a server that was asked to stop is killed.
        replicas (free): servers on this node, each on its own tp * dp * pp GPUs (llamacpp: share of
            the cores).
        server_max_restarts (free): restarts of one server within an hour. The run ends when every
            server has used them up.
        hang_timeout (free): seconds without an answer or a new token after which a server that has
            requests is restarted. Unless it is set, a server with metrics that has answered gets
            120, or six times its longest silence if that is more.
        server_python (free): Python interpreter of the engine's own virtual environment. None: that
            of this package.
        reuse_servers (free): the next task of a process takes over its servers if they fit. False:
            each task starts its own.
        seed (request): gives each request a ``seed`` of its own, derived from this number, so that
            it samples the same when it is sent again. A payload's own ``seed`` stays.
        accept_null_finish_reason (identity): for servers that never give a ``finish_reason``: their
            answers count as complete, and one that has it stops the task. False: an answer without
            one is retried.
        texts_per_request (free): texts in one request of ``generate.embed``, at most. Texts of
            several documents share it; each is cached, retried and counted for its own.
        gpus (free): GPUs of this task that its servers get together; 0: none. None: tp * dp * pp
            for each server, where tasks, replicas or several models share them.
        prices (free): of a million tokens, for the cost in ``status``: ``{"prompt": 2, "cached":
            0.2, "cache_write": 2.5, "completion": 8, "tiers": {"flex": 0.5}}``. "cached",
            "cache_write": prompt tokens that the server took from its cache, or put there; they
            cost as the others unless said. "tiers": by how much the prices of an answer in this
            ``service_tier`` are multiplied; "batch", of ``provider_batches``, is 0.5 unless said.
        provider_batches (free): requests go to the provider as batches (OpenAI's ``/v1/batches``,
            Anthropic's ``/v1/messages/batches``), for half the price, and are answered within a
            day. Needs checkpoints; each request in a row is another pass over the input.
        on_cut_off (identity): what becomes of an answer that reached max_tokens: "keep", "drop"
            (its rollout gives None), "dead_letter", or "retry": once, or so many times, with
            other parameters: ``{"retry": 2, "max_tokens": 2048, "then": "drop"}``.
        on_loop (identity): the same of an answer that repeats itself, also if it is cut off.
        on_refusal (identity): the same of a refusal.
        half_answers (free): keeps the tokens of long answers while they are written, so that after
            a stop, a kill or a server's death they go on with their next token. "auto": with vLLM
            0.32 or newer that the run launches. True: also with endpoints that have vLLM's paths
            for it. See docs/servers.md.

    Raises:
        ConfigError: a value that cannot work.
    """

    # datatrove's fields, in datatrove's order.
    server_type: str
    model_name_or_path: str
    model_max_context: Count = 8192
    use_chat: bool = True
    endpoint_url: str | list[str] | None = None
    api_key: str | Secret | None = None
    metric_interval: Positive = 120
    tp: Count = 1
    dp: Count = 1
    pp: Count = 1
    # May hold a header's key.
    default_generation_params: JsonObject = field(default_factory=dict, repr=False)
    rollouts_per_document: Count = 1
    max_concurrent_generations: Count | Literal["auto"] = "auto"
    max_concurrent_documents: Count | None = None
    request_timeout: Positive | None = None
    model_kwargs: JsonObject | None = None
    server_log_folder: str | None = None
    master_port: int = 9810
    server_start_timeout_sec: Positive = 60.0
    server_ready_max_attempts: Count = 300
    server_ready_delay_sec: Positive = 5.0
    server_start_max_retries: CountFromZero = 1
    # ours
    api_key_env: str | None = None
    endpoints: list[EndpointConfig] | list[JsonObject] | None = None
    trust_remote_code: bool = False
    request_max_attempts: Count = 8
    server_patience_seconds: Positive = 600.0
    server_stop_timeout_sec: Positive = 10.0
    replicas: Count = 1
    server_max_restarts: CountFromZero = 3
    hang_timeout: Positive = 600.0
    server_python: str | None = None
    reuse_servers: bool = True
    seed: int | None = None
    accept_null_finish_reason: bool = False
    texts_per_request: Count = 1
    gpus: CountFromZero | None = None
    prices: JsonObject | None = None
    provider_batches: bool = False
    on_cut_off: BadAnswerSetting = "keep"
    on_loop: BadAnswerSetting = "keep"
    on_refusal: BadAnswerSetting = "keep"
    half_answers: bool | Literal["auto"] = "auto"

    # No fields. Later fields of (identity) and (request): a run's identity has them only where they
    # differ from their default, so that earlier runs continue.
    compared = ("seed", "accept_null_finish_reason", *_BAD_ANSWERS)
    # Facts about the other models of a run, set by ``models_of``.
    name = ""
    models = tuple[str, ...]()
    neighbours = 0  # other models' servers on these cores
    limits_documents = False  # max_concurrent_documents was given
    # The JSON schema of a ready-made rollout, as text.
    answer_schema = ""

    def __post_init__(self) -> None:
        for name in _STARTING:
            value = getattr(self, name)
            bounds = get_args(argument_hint(InferenceConfig, name))[1]
            if takes(float, value) and value not in bounds:
                raise ConfigError(f"is {value}, and {name} must be {bounds.rule}.", setting=name)
        check(InferenceConfig, vars(self))
        check_prices(self.prices)
        self._check_endpoints()
        self._check_choices()
        self._check_gpus()
        check_generation_params("default_generation_params", self.default_generation_params)
        params_by_setting = {"default_generation_params": self.default_generation_params}
        params_by_setting |= {name: policy.params for name, policy in self.answer_policies.items()}
        for setting, params in params_by_setting.items():
            for name in TOKEN_LIMITS:
                tokens = params.get(name) or 0
                if self.server_type != "endpoint" and tokens >= self.model_max_context:
                    raise ConfigError(
                        f"{tokens} tokens leave no room for a prompt: model_max_context is "
                        f"{self.model_max_context}.",
                        setting=f"{setting}.{name}",
                    )
        if self.max_concurrent_documents is not None:
            self.limits_documents = True
        else:  # datatrove's scripts read a number
            requests = self.max_concurrent_generations
            if requests == "auto":
                requests = REQUESTS_WITHOUT_METRICS
            texts = self.texts_for(requests * self.servers)
            self.max_concurrent_documents = max(1, texts // self.rollouts_per_document)
        if isinstance(self.api_key, str):
            self.api_key = Secret.in_environment(self.api_key)

    def _check_choices(self) -> None:
        check_value("server_type", one_of(ENGINES), self.server_type)
        if not self.model_name_or_path:
            raise ConfigError(
                "is empty; set it to the model's name or path.", setting="model_name_or_path"
            )
        self.engine.check(self)
        # Every user of the node can read command lines.
        for name, value in (self.model_kwargs or {}).items():
            # Models also have tokens: "<|end|>", "[SEP]".
            is_text = isinstance(value, str) and not value.startswith(("<", "["))
            if is_text and names_secret(name):
                raise ConfigError(
                    f"model_kwargs: {name!r} is a secret, and would be in the process list. "
                    "Export it, as servers inherit the environment (HF_TOKEN for the hub)."
                )
        check_variable(self.api_key_env)
        if self.api_key is not None and self.api_key_env is not None:
            raise ConfigError("api_key_env: is set together with api_key; set only one of them.")
        is_plain = self.server_type == "endpoint" and self.servers == self.texts_per_request == 1
        if self.provider_batches and not (is_plain and self.endpoints is None):
            raise ConfigError(
                'provider_batches: needs server_type "endpoint", one endpoint_url, and '
                "texts_per_request 1."
            )
        fits = {
            "server_python": self.engine.takes_interpreter,
            "accept_null_finish_reason": not self.engine.is_known,
        }
        for name, is_taken in fits.items():
            if getattr(self, name) and not is_taken:
                raise ConfigError(f"{name}: is not for {self.server_type}; remove it.")

    def _check_gpus(self) -> None:
        if self.gpus is None:
            return
        each = self.engine.gpus_per_server(self)
        if self.gpus and (self.gpus < each * self.replicas or self.gpus % self.replicas):
            raise ConfigError(
                f"gpus: {self.gpus} GPUs cannot be divided among {self.replicas} servers with tp * "
                f"dp * pp = {each}."
            )

    def _check_endpoints(self) -> None:
        for url in self.urls:
            check_url(url, "endpoint_url")
        if self.endpoints is None:
            return
        for name in ("endpoint_url", "api_key", "api_key_env"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name}: endpoints have their own. Remove it.")
        if self.server_type != "endpoint":
            raise ConfigError('needs server_type "endpoint".', setting="endpoints")
        endpoints = []
        names = [endpoint.name for endpoint in fields(EndpointConfig)]
        for index, entry in enumerate(self.endpoints):
            try:
                if not isinstance(entry, Mapping):
                    check_value("", EndpointConfig, entry)
                    entry = vars(entry)
                for name in entry:
                    check_value("", one_of(names), name)
                endpoint = EndpointConfig(**{"url": None, **entry})
                check_prices(endpoint.prices)
                endpoints.append(endpoint)
            except ConfigError as error:
                raise ConfigError(f"endpoints[{index}]: {error}") from None
        if len({endpoint.weight is None for endpoint in endpoints}) > 1:
            raise ConfigError("either all have a weight, or none.", setting="endpoints")
        self.endpoints = endpoints

    @property
    def urls(self) -> list[str]:
        """The URLs of ``endpoint_url``, with ``${NAME}`` not replaced."""
        urls = self.endpoint_url or []
        if isinstance(urls, str):
            urls = [urls]
        return [url.strip() for url in urls]

    @property
    def endpoints_by_name(self) -> dict[str, EndpointConfig]:
        """The endpoints by their URLs in the settings, without a query. The name of a further
        endpoint with the same URL ends in its number. Endpoints of ``endpoint_url``, which may be
        set later, have equal weights.
        """
        endpoints: list[EndpointConfig] | list[JsonObject]
        if self.endpoints is None:
            endpoints = [EndpointConfig(url, self.api_key_env, weight=1.0) for url in self.urls]
        else:
            endpoints = self.endpoints
        named: dict[str, EndpointConfig] = {}
        for endpoint in endpoints:
            assert isinstance(endpoint, EndpointConfig)
            url = endpoint.url.partition("?")[0]
            name = f"{url} {len(named) + 1}" if url in named else url
            model = endpoint.model or self.model_name_or_path
            prices = self.prices if endpoint.prices is None else endpoint.prices
            named[name] = replace(endpoint, model=model, prices=prices)
        return named

    def naming_endpoints(self) -> InferenceConfig:
        """Returns the config with ``endpoint_url`` as ``endpoints``, whose answers have their
        names.
        """
        if self.server_type != "endpoint" or self.endpoints is not None:
            return self
        naming = copy(self)
        naming.endpoints = [*self.endpoints_by_name.values()]
        return naming

    @cached_property
    def other_models(self) -> list[str]:
        if self.endpoints is None:
            return []
        models = {str(endpoint.model) for endpoint in self.endpoints_by_name.values()}
        return sorted(models - {self.model_name_or_path})

    def prices_at(self, endpoint: str) -> JsonObject:
        if self.endpoints is None:
            return self.prices or {}
        first = next(filter(None, self._prices.values()), {})
        return self._prices.get(endpoint, first)

    @cached_property
    def _prices(self) -> dict[str, JsonObject]:
        return {name: end.prices or {} for name, end in self.endpoints_by_name.items()}

    @property
    def all_prices(self) -> list[JsonObject]:
        if self.endpoints is None:
            return [self.prices_at("")]
        return [*self._prices.values()]

    def cost(self, tokens: Tokens, tier: str, endpoint: str) -> int:
        """Returns the price of an answer, in billionths."""
        prices = self.prices_at(endpoint)
        price: float = prices.get("prompt", 0)
        total: float = (tokens.prompt - tokens.cached - tokens.written) * price
        total += tokens.cached * prices.get("cached", price)
        total += tokens.written * prices.get("cache_write", price)
        total += tokens.completion * prices.get("completion", 0)
        factor: float = prices.get("tiers", {}).get(tier, 0.5 if tier == BATCH else 1)
        return min(round(1000 * total * factor), _MOST_COST)

    @property
    def answer_policies(self) -> dict[str, AnswerPolicy]:
        """The policies that have an effect, by their settings, in the order in which they apply."""
        policies = {name: answer_policy(name, getattr(self, name)) for name in _BAD_ANSWERS}
        return {
            name: policy
            for name, policy in policies.items()
            if policy.retries or policy.fallback != "keep"
        }

    @property
    def engine(self) -> Engine:
        return ENGINES[self.server_type]

    @property
    def log_prefix(self) -> str:
        if self.name:
            return f"{self.name}: "
        return ""

    def server_name(self, server: int | str) -> str:
        return f"{self.name} {server}".lstrip()

    @property
    def gpus_each(self) -> int:
        if self.gpus is None:
            return self.engine.gpus_per_server(self)
        return self.gpus // self.replicas

    @property
    def gpus_of_task(self) -> int:
        """The GPUs of all servers of a task. Servers that may also run without have none, unless
        ``gpus`` says so.
        """
        if self.engine.leases_gpus:
            return self.gpus_each * self.replicas
        return self.gpus or 0

    @property
    def follows_metrics(self) -> bool:
        return self.max_concurrent_generations == "auto" and self.engine.metrics is not None

    @property
    def places(self) -> str:
        number = self.max_concurrent_generations
        if number != "auto":
            return f"up to {number * self.servers:,} at once"
        if self.follows_metrics:
            return "auto: as the engine's queue and KV cache allow"
        return f"auto: starts with {FIRST_LIMIT}, follows the server's answers, limits and metrics"

    @property
    def servers(self) -> int:
        if self.server_type == "endpoint":
            return len(self.endpoints_by_name)
        return self.replicas

    @property
    def server_drain_sec(self) -> float:
        """Seconds in which a server can finish requests after Slurm's SIGTERM to all processes of a
        task. SIGKILL comes after KillWait (30 s), and a draining runner needs the server until
        then.
        """
        return max(self.engine.drain_seconds, self.server_stop_timeout_sec)

    def texts_for(self, requests: int) -> int:
        return max(requests, min(requests * self.texts_per_request, _MOST_TEXTS))

    def endpoint_api_key(self, endpoint: EndpointConfig) -> Secret | None:
        """Returns the key for an endpoint, or None.

        Raises:
            ConfigError: the variable of ``api_key_env`` is not set, or the key cannot be sent in a
                header.
        """
        if endpoint.api_key_env is not None:
            key = Secret(os.environ.get(endpoint.api_key_env, ""))
            if not key.reveal():
                raise ConfigError(
                    f"api_key_env: the environment variable {endpoint.api_key_env} is not set. "
                    "Export it where the tasks run."
                )
        elif isinstance(self.api_key, Secret):
            key = self.api_key
        else:
            return None
        if not key.reveal().isprintable() or key.reveal() != key.reveal().strip():
            source = "api_key: the key"
            if endpoint.api_key_env:
                source = f"api_key_env: the value of {endpoint.api_key_env}"
            raise ConfigError(
                f"{source} begins or ends with a space, or holds a control character. Remove it."
            )
        return key


_MOST_TEXTS = 10_000
KV_CACHE_FLAGS = frozenset({"kv-cache-dtype", "cache-type-k", "cache-type-v"})
# Requests at each server under ``max_concurrent_generations: auto``: at first, and at most without
# metrics, which is datatrove's default.
FIRST_LIMIT = 16
REQUESTS_WITHOUT_METRICS = 500


# Rules for every command line: the server listens on 127.0.0.1, on our port; its API key is in the
# environment, because every user can read argv; ``model_kwargs`` come last and override our flags,
# except address and key.


HOST = "127.0.0.1"
API_KEY_VARIABLE = "DATATROVE_CKPT_API_KEY"

Kwargs = Mapping[str, Any]
FormValue = Any  # a JSON schema, a text, or a list of texts


Variables = dict[str, str | Secret]


class EngineCommand(NamedTuple):
    """The command that launches a server.

    Attributes:
        argv: command line; holds no secret.
        env: additions to the environment; may hold the API key, so it is never shown.
    """

    argv: tuple[str, ...]
    env: Variables
    takes_key: bool = True

    def environment(self, ours: Mapping[str, str]) -> dict[str, str]:
        """Returns our environment with the server's additions, but without the key of mirrors. The
        API key is revealed only here.
        """
        variables = dict(ours)
        variables.pop(MIRROR_KEY_VARIABLE, None)
        for name, value in self.env.items():
            variables[name] = value.reveal() if isinstance(value, Secret) else value
        return variables


@dataclass(frozen=True)
class NodeGroup:
    """The nodes that serve one model together.

    Attributes:
        rank: number of this node; 0 is the head node.
        hosts: hosts of all nodes, the head node's first.
    """

    rank: int = 0
    hosts: tuple[str, ...] = ("127.0.0.1",)

    @classmethod
    def from_environment(cls) -> Self:
        """Reads the nodes of this task from datatrove's variables.

        DATATROVE_NODE_RANK is -1 if each task has one node. DATATROVE_NODE_IPS may then name other
        tasks' nodes.
        """
        rank = int(os.environ.get("DATATROVE_NODE_RANK", "-1"))
        hosts = tuple(
            host.strip()
            for host in os.environ.get("DATATROVE_NODE_IPS", "").split(",")
            if host.strip()
        )
        if rank >= 0 and len(hosts) > 1:
            return cls(rank, hosts)
        return cls()

    @property
    def count(self) -> int:
        return len(self.hosts)


SINGLE_NODE = NodeGroup()


class EngineLaunch(NamedTuple):
    """The input of ``Engine.command``. ``program``: result of ``Engine.find``."""

    config: InferenceConfig
    program: str | None
    port: int
    api_key: Secret
    nodes: NodeGroup

    @property
    def python(self) -> str:
        return self.config.server_python or sys.executable

    def sizes(self, tp: str, dp: str, pp: str) -> dict[str, object]:
        sizes = {
            tp: self.config.tp,
            dp: self.config.dp,
            pp: self.config.pp,
            "nnodes": self.nodes.count,
        }
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def flags(self) -> Kwargs:
        return dashed_names(self.config.model_kwargs)

    @property
    def schema(self) -> str:
        schema = self.config.answer_schema
        response_format = self.config.default_generation_params.get("response_format")
        if response_format is not None:
            schema += json.dumps(response_format)
        return schema

    @property
    def key_variable(self) -> Variables:
        return {API_KEY_VARIABLE: self.api_key}

    def command(
        self,
        start: tuple[str, ...],
        flags: Mapping[str, object],
        user_flags: Kwargs,
        env: Variables | None = None,
        takes_key: bool = True,
    ) -> EngineCommand:
        """Returns the command with our flags that the user does not set, then the user's flags.

        The user's flags have the form ``--name=value``, which a value like "-1" needs.
        """
        argv = list(start)
        for name, value in flags.items():
            if name not in user_flags:
                argv += _flag(name, value)
        for name, value in user_flags.items():
            if value is not None:
                argv.append("=".join(_flag(name, value)))
        if env is None:
            env = self.key_variable
        return EngineCommand(tuple(argv), env, takes_key)


def _flag(name: str, value: object) -> list[str]:
    if value is None:
        return []
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"]
    if isinstance(value, dict | list):
        return [f"--{name}", json.dumps(value)]
    return [f"--{name}", str(value)]


class MetricNames(NamedTuple):
    """The names at /metrics.

    Attributes:
        tokens: counters that grow while the engine works, also at a long prompt.
        cache_usage: used share of the KV cache; "" if the engine does not show it.
        cache_config: labels with the size of the KV cache, or "".
        prefix_queries, prefix_hits: counters of the tokens that the engine looked up in its prefix
            cache, and of those that it found there, or "".
    """

    running: str
    waiting: str
    tokens: tuple[str, ...]
    cache_usage: str = ""
    cache_config: str = ""
    prefix_queries: str = ""
    prefix_hits: str = ""

    @property
    def shown(self) -> list[str]:
        gauges = (self.running, self.waiting, self.cache_usage, self.cache_config)
        counters = (*self.tokens, self.prefix_queries, self.prefix_hits)
        return [name for name in (*gauges, *counters) if name]

    def are_in(self, page: str) -> bool:
        """Returns whether a page has these names. A router of servers shows only a part."""
        return all(name in page for name in (self.running, self.waiting, self.tokens[0]))


class KnownFailure(NamedTuple):
    """A known reason for a failed start. ``permanent``: another attempt cannot succeed."""

    text: str
    permanent: bool = False


class Engine:
    """One value of ``server_type``. A subclass sets the differences, and has no state.

    Attributes:
        package: Python package that it needs, which our extra of the engine's name installs; "":
            none.
        takes_interpreter: whether ``server_python`` may start it.
        is_known: whether the program that answers is known. An unknown program may give no
            finish_reason, and its request fields for structured output are unknown.
        health_path: path of the URL that answers 5xx, or not at all, when the server is dead.
        leases_gpus: whether ranks on one node divide their GPUs by locks.
        task_flags: ``model_kwargs`` that a task of the short form needs, by the task's name.
        ways: APIs for other answers than texts, by the names of ``generate``'s methods; the engine
            lacks the other methods. The default is vLLM's.
        drain_seconds: minimum time to finish its requests after a SIGTERM, if it can.
        causes: causes of failed starts, each with a pattern in its log, ignoring case.
        address_flags: flags of its address and key, which ``model_kwargs`` may not name.
        answering_flags: flags that change its answers, so they belong to the run's identity.
        continuing_flag: flag with which it continues half-written answers; "": it does not.
        tuning: flags that ``datatrove-ckpt tune`` tries, one after the other.
        memory_share: share of a GPU's memory that it takes by default; 0: not known.
    """

    PORT_TAKEN = KnownFailure("The port was taken. A new start takes another.")
    CONTEXT_TOO_LONG = KnownFailure(
        "model_max_context exceeds the model or the GPU's memory. Lower it.", True
    )
    TOO_FEW_GPUS = KnownFailure(
        "tp * dp * pp exceeds the GPUs of this task (nvidia-smi).",
        True,
    )
    GPU_FULL = KnownFailure(
        "The GPU's memory is full. Lower model_max_context or gpu-memory-utilization "
        "(model_kwargs), raise tp, or stop other programs (nvidia-smi)."
    )
    # As OpenAI's own client does. A server that does not know base64 answers with numbers.
    EMBED = EngineApi("/v1/embeddings", ("input",), {"encoding_format": "base64"})

    name: str
    package = ""
    takes_interpreter = False
    is_known = True
    health_path = "health"
    is_canned = False
    leases_gpus = False
    metrics: MetricNames | None = None
    task_flags: ClassVar[Mapping[str, Kwargs]] = {}
    ways: ClassVar[Mapping[str, EngineApi]] = {
        "embed": EMBED,
        "classify": EngineApi("/classify", ("input",)),
        "score": EngineApi(
            "/score", ("text_1", "text_2")
        ),  # each request to /v1/score logs a warning
    }
    drain_seconds = 0.0
    causes: tuple[tuple[KnownFailure, str], ...] = ()
    address_flags = ("host", "port", "api-key")
    continuing_flag = ""
    memory_share = 0.0
    tuning: tuple[Kwargs, ...] = ()
    answering_flags = KV_CACHE_FLAGS | frozenset(
        {
            "chat-template",
            "convert",
            "dtype",
            "embd-normalize",
            "generation-config",
            "hf-overrides",
            "lora-modules",
            "override-generation-config",
            "pooler-config",
            "pooling-type",
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

    def check(self, config: InferenceConfig) -> None:
        """Raises ConfigError for settings with which the engine cannot start."""
        for name in config.model_kwargs or {}:
            if name.replace("_", "-") in self.address_flags:
                raise ConfigError(
                    f"model_kwargs: {name!r} cannot be set: servers listen on {HOST}, on a free "
                    "port, with a fresh key. For another address, start the server yourself "
                    '(server_type "endpoint").'
                )

    def find(self, config: InferenceConfig) -> str | None:
        """Returns a path that ``command`` needs, or None. Checks that the engine is installed.

        Raises:
            ServerStartFailed: the engine is missing; the message names the package to install.
            ConfigError: a file that ``config`` names does not exist.
        """
        if self.package and config.server_python is None:
            self.require_package()
        return None

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Returns the command that launches a server, without side effects."""
        raise NotImplementedError

    def launch(
        self, config: InferenceConfig, port: int, api_key: Secret, nodes: NodeGroup = SINGLE_NODE
    ) -> EngineCommand:
        python = config.server_python
        if python is not None and shutil.which(python) is None:
            raise ConfigError(
                f"server_python: {python!r} is no program on this node. Give the path of an "
                "interpreter."
            )
        return self.command(EngineLaunch(config, self.find(config), port, api_key, nodes))

    def gpus_per_server(self, config: InferenceConfig) -> int:
        """Returns tp * dp * pp; flags in model_kwargs override each."""
        flags = dashed_names(config.model_kwargs)

        def size(default: int, *names: str) -> int:
            return int(next((flags[name] for name in names if name in flags), default))

        tp = size(config.tp, "tensor-parallel-size", "tp-size", "tp")
        pp = size(config.pp, "pipeline-parallel-size", "pp-size")
        # SGLang: data parallel inside the tensor parallel group.
        if flags.get("enable-dp-attention"):
            return tp * pp
        return tp * pp * size(config.dp, "data-parallel-size", "dp-size", "dp")

    def form_fields(self, kind: str, value: FormValue) -> JsonObject | str:
        """Returns the payload keys that enforce a form, by default of OpenAI's API; or the reason
        if there are none.

        Args:
            kind: "json_schema", "regex" or "choice".
        """
        if kind == "json_schema":
            return {
                "response_format": {
                    "type": kind,
                    kind: {"name": "answer", "schema": value, "strict": True},
                }
            }
        instead = "json_schema"
        if kind == "choice":
            instead = "json_schema with an enum"
        return f"OpenAI's API takes no {kind}; use {instead}"

    def lacks(self, method: str) -> str:
        if method in self.ways:
            return ""
        having = ", ".join(engine.name for engine in ENGINES.values() if method in engine.ways)
        return f"server_type {self.name!r} has no generate.{method}; these have: {having}"

    def require_package(self) -> None:
        if find_spec(self.package) is None:
            raise ServerStartFailed(
                f"The {self.name} server cannot start: the Python package {self.package!r} is not "
                f"installed in {sys.prefix}. Run: pip install 'datatrove-ckpt[{self.name}]'"
            )


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))  # a Slurm task is bound to its share of the node
    return os.cpu_count() or 1


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_GPU_DEVICE = re.compile(r"nvidia\d+")
_DEV = Path("/dev")


def visible_gpus() -> list[str]:
    listed = os.environ.get(VISIBLE_GPUS)
    if listed is not None:
        return [
            name.strip()
            for name in listed.split(",")
            if name.strip() not in ("", "-1", "NoDevFiles")
        ]
    devices = [path for path in _DEV.iterdir() if _GPU_DEVICE.fullmatch(path.name)]
    return [str(index) for index in range(len(devices))]


def dashed_names(kwargs: Kwargs | None) -> Kwargs:
    return {name.replace("_", "-"): value for name, value in (kwargs or {}).items()}


ENGINES: dict[str, Engine] = {}
"""The engines by ``server_type``. ``config.engines`` fills it."""


# several models in one rollout --------------------------------------------------------------------


_NAME = re.compile("[A-Za-z][A-Za-z0-9_]*")
_GENERATE_NAMES = "classify count_finished embed once score url"
_CODE_FIELDS = "imports output_writer rollout_fn shared_context uses"
_IDENTITY_FIELDS = (
    f"identity_version metadata_key models records_per_chunk rollout_version tasks {_CODE_FIELDS}"
)
_SETTINGS = tuple(field.name for field in fields(InferenceConfig))
# No model may have the name of an attribute of ``generate``, or of a field of a run's identity.
_TAKEN = frozenset({*_GENERATE_NAMES.split(), *_IDENTITY_FIELDS.split(), *_SETTINGS})
_SETTINGS_OF_RANK = ("rollouts_per_document", "metric_interval")


def models_of(
    config: InferenceConfig | Mapping[str, InferenceConfig],
) -> dict[str, InferenceConfig]:
    """Returns the models by name, in their order. A config that is no mapping gets the name "".

    The configs of several models are copies, each with its name and the names of all models.

    Raises:
        ConfigError: a name or a setting is not allowed.
    """
    if not isinstance(config, Mapping):
        return {"": _checked("config", config)}
    if not config:
        raise ConfigError(
            'config: is empty. Name each model: {"writer": InferenceConfig(...), ...}.'
        )
    for name in config:
        if not _NAME.fullmatch(str(name)) or keyword.iskeyword(str(name)) or name in _TAKEN:
            raise ConfigError(
                f"config: {name!r} cannot be the name of a model, because of generate.{name}. "
                "Take letters, digits and _, such as judge."
            )
    models = {name: _checked(f"config: {name}", model) for name, model in config.items()}
    if len(models) == 1:
        return models
    _refuse_settings_of_rank(models)
    models = {name: copy(model) for name, model in models.items()}
    on_cores = {
        name: model.replicas for name, model in models.items() if model.server_type == "llamacpp"
    }
    for name, model in models.items():
        model.name = name
        model.models = tuple(models)
        model.neighbours = sum(on_cores.values()) - on_cores.get(name, 0)
    return models


def _refuse_settings_of_rank(models: Mapping[str, InferenceConfig]) -> None:
    first, *later = models
    for name in later:
        for setting in _SETTINGS_OF_RANK:
            default = InferenceConfig.__dataclass_fields__[setting].default
            if getattr(models[name], setting) not in (default, getattr(models[first], setting)):
                raise ConfigError(
                    f"config: {name}: {setting}: is set for the first model only, {first}."
                )
        if models[name].limits_documents:
            raise ConfigError(
                f"config: {name}: max_concurrent_documents: is set for the first model only, "
                f"{first}."
            )


def _checked(place: str, config: object) -> InferenceConfig:
    if isinstance(config, InferenceConfig):
        return config
    if not hasattr(config, "server_type"):
        raise ConfigError(
            f"{place}: takes an InferenceConfig(...), and not a {type(config).__name__}."
        )
    # A config of datatrove may have more settings.
    settings = {name: value for name, value in vars(config).items() if name in _SETTINGS}
    checked = InferenceConfig(**settings)
    checked.limits_documents = False  # datatrove always sets max_concurrent_documents
    return checked
