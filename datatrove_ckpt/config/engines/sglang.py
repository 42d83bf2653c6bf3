"""SGLang's server, started by ``inference/servers/sglang_launch.py``. The flags fit SGLang
0.5.23.

With several tokenizer processes (``tokenizer-worker-num``) SGLang accepts no key at all.
"""

import re
from pathlib import Path

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.config.inference_config import (
    HOST,
    Engine,
    EngineApi,
    EngineCommand,
    EngineLaunch,
    FormValue,
    MetricNames,
    Variables,
)

_LAUNCHER = Path(__file__).parents[2] / "inference" / "servers" / "sglang_launch.py"
# Its /v1/score gives probabilities of tokens; a reranker's scores come from /v1/rerank.
_WAYS = {
    "embed": Engine.EMBED,
    "classify": EngineApi("/v1/classify", ("input",)),
    "score": EngineApi("/v1/rerank", ("query", "documents"), {"return_documents": False}),
}
_TASK_FLAGS = {"embed": {"is-embedding": True}, "classify": {"is-embedding": True}}


class SGLang(Engine):
    name = "sglang"
    package = "sglang"
    takes_interpreter = True
    leases_gpus = True
    metrics = MetricNames(
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:num_retracted_requests_total",
        ("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
        "sglang:token_usage",
    )
    task_flags = _TASK_FLAGS
    ways = _WAYS
    causes = (
        (Engine.CONTEXT_TOO_LONG, r"longer than the model's context length"),
        (Engine.GPU_FULL, r"not enough memory\. please try to increase --mem-fraction"),
    )

    def command(self, launch: EngineLaunch) -> EngineCommand:
        config = launch.config
        nodes = launch.nodes
        start = (launch.python, str(_LAUNCHER), "--model-path", config.model_name_or_path)
        user_flags = launch.flags
        flags: dict[str, object] = {
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
