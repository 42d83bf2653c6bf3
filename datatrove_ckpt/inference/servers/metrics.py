"""Reads an engine's /metrics (Prometheus text format): running, waiting and preempted requests, tokens."""

from __future__ import annotations

from dataclasses import dataclass

from datatrove_ckpt.errors import TooManyOpenFiles
from datatrove_ckpt.inference.client.transport import ExchangeFailed, get
from datatrove_ckpt.inference.client.urls import HiddenUrl
from datatrove_ckpt.redaction import HiddenDict

# Per engine: running, waiting, preempted so far, and the counters that grow while it works. Prompt tokens count, too: a
# long prompt can take longer than ``hang_timeout``. llama.cpp preempts nothing.
_NAMES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "vllm": (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_preemptions_total",
        ("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
    ),
    "sglang": (
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:num_retracted_requests_total",
        ("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
    ),
    "llamacpp": (
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        "",
        ("llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total", "llamacpp:n_decode_total"),
    ),
}


@dataclass(frozen=True)
class Metrics:
    """An engine's metrics at one moment, summed over its data-parallel parts.

    Attributes:
        running, waiting: requests.
        tokens: generated and processed since its start.
        preemptions: requests that lost their place in the KV cache since its start, and waited again.
    """

    running: float
    waiting: float
    tokens: float
    preemptions: float = 0.0


def parse_metrics(server_type: str, text: str) -> Metrics | None:
    """None if the text contains none of the engine's metrics."""
    running, waiting, preemptions, tokens = _NAMES[server_type]
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name and name in (running, waiting, preemptions, *tokens):
            value = line[line.rindex("}") + 1 :] if "}" in line else line[len(name) :]
            found[name] = found.get(name, 0.0) + float(value.split()[0])
    if not found:
        return None
    processed = sum(found.get(name, 0.0) for name in tokens)
    return Metrics(found.get(running, 0.0), found.get(waiting, 0.0), processed, found.get(preemptions, 0.0))


async def read_metrics(url: str, headers: HiddenDict, server_type: str, seconds: float) -> Metrics | None:
    """None if the engine has no metrics, or does not answer within ``seconds``."""
    if server_type not in _NAMES:
        return None
    try:
        response = await get(HiddenUrl(f"{url}/metrics"), headers, seconds)
        return parse_metrics(server_type, response.body.decode()) if response.status == 200 else None
    except (ExchangeFailed, TooManyOpenFiles, ValueError):
        return None
