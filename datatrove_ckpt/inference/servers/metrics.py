"""Reads an engine's /metrics (Prometheus text format): requests that run, requests that wait, tokens so far."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp

from datatrove_ckpt.redaction import HiddenDict, frames_cut

# Per engine: running, waiting, and the counters that grow while it works. Prompt tokens count, too: a long prompt can
# take longer than ``hang_timeout``.
_NAMES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "vllm": (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        ("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
    ),
    "sglang": (
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        ("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
    ),
    "llamacpp": (
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        ("llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total", "llamacpp:n_decode_total"),
    ),
}


@dataclass(frozen=True)
class Metrics:
    """An engine's metrics at one moment, summed over its data-parallel parts.

    Attributes:
        running, waiting: requests.
        tokens: generated and processed since its start.
    """

    running: float
    waiting: float
    tokens: float


def parse_metrics(server_type: str, text: str) -> Metrics | None:
    """None if the text contains none of the engine's metrics."""
    running, waiting, tokens = _NAMES[server_type]
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in (running, waiting, *tokens):
            value = line[line.rindex("}") + 1 :] if "}" in line else line[len(name) :]
            found[name] = found.get(name, 0.0) + float(value.split()[0])
    if not found:
        return None
    return Metrics(found.get(running, 0.0), found.get(waiting, 0.0), sum(found.get(name, 0.0) for name in tokens))


async def read_metrics(
    session: aiohttp.ClientSession, url: str, headers: HiddenDict, server_type: str, seconds: float
) -> Metrics | None:
    """None if the engine has no metrics, or does not answer within ``seconds``."""
    if server_type not in _NAMES:
        return None
    try:
        limit = aiohttp.ClientTimeout(total=seconds)
        with frames_cut():
            async with session.get(f"{url}/metrics", headers=headers, timeout=limit) as response:
                return parse_metrics(server_type, await response.text()) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
