"""What a run cost, if prices are given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from datatrove_ckpt.config.inference_config import ENGINES
from datatrove_ckpt.formatting import duration, plural
from datatrove_ckpt.maintenance.report.content import Figure
from datatrove_ckpt.maintenance.report.scales import compact
from datatrove_ckpt.maintenance.run_state import RunState

_WITH_GPUS = tuple(engine.name for engine in ENGINES.values() if engine.has_gpus)


@dataclass(frozen=True)
class Prices:
    """Prices in any currency.

    Attributes:
        gpu_hour: of one GPU for an hour; None: GPUs cost nothing.
        million_tokens: of a million prompt tokens, and of a million completion tokens.
        gpus_per_rank: that one rank uses; None: as the YAML file says, else 1.
    """

    gpu_hour: float | None = None
    million_tokens: tuple[float, float] | None = None
    gpus_per_rank: int | None = None


def costs(run: RunState, prices: Prices, config: dict[str, Any], wasted_seconds: float) -> Iterator[Figure]:
    """One figure for each price, the sum, and what that means for a million documents.

    Args:
        config: the YAML file's content; empty without one.
        wasted_seconds: of ranks that worked, but only waited for servers after an interruption.
    """
    sums = []
    if prices.gpu_hour is not None:
        gpus = prices.gpus_per_rank or gpus_in(config) or 1
        hours = sum(rank.seconds for rank in (*run.ranks, *run.retries)) * gpus / 3600
        sums.append(hours * prices.gpu_hour)
        with_gpus = f"{plural(len(run.ranks), 'rank')} with {plural(gpus, 'GPU')} each"
        yield Figure("", "GPU hours", hours, compact(hours), with_gpus)
        yield Figure("", "Cost of GPUs", sums[-1], money(sums[-1]), f"at {money(prices.gpu_hour)} per GPU hour")
        lost = wasted_seconds * gpus / 3600 * prices.gpu_hour
        yield Figure("", "Lost to interruptions", lost, money(lost), f"{duration(wasted_seconds)} of starting again")
    if prices.million_tokens is not None:
        prompt, completion = prices.million_tokens
        tokens = _tokens(run, "prompt_tokens"), _tokens(run, "completion_tokens")
        sums.append((tokens[0] * prompt + tokens[1] * completion) / 1e6)
        per = money(prompt) if prompt == completion else f"{money(prompt)} and {money(completion)}"
        yield Figure("", "Cost of tokens", sums[-1], money(sums[-1]), f"at {per} per million tokens")
    if sums:
        done = run.totals.documents
        each = f"{money(sum(sums) / done * 1e6)} per million documents" if done else ""
        yield Figure("", "Cost", sum(sums), money(sum(sums)), each)


def _tokens(run: RunState, kind: str) -> int:
    """What was paid for: also for documents that are not done, as far as attempts that were killed had noted it."""
    return sum(
        max(getattr(sums.work, kind), getattr(sums.counts, kind) + getattr(sums.unfinished, kind))
        for sums in (run.totals, run.retried)
    )


def gpus_in(config: dict[str, Any]) -> int | None:
    """GPUs of one rank by a YAML file's settings; None if they do not tell."""
    for settings in _mappings(config):
        if settings.get("server_type") in _WITH_GPUS:
            numbers = [settings.get(name, 1) for name in ("tp", "dp", "pp", "replicas")]
            if all(isinstance(number, int) and number > 0 for number in numbers):
                tp, dp, pp, replicas = numbers
                return int(tp * dp * pp * replicas)
    return None


def _mappings(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _mappings(part)


def money(amount: float) -> str:
    """An amount without a currency: "308.50", "12,345", "0.0021"."""
    if amount and abs(amount) < 0.1:
        return f"{amount:.2g}"
    return f"{amount:,.2f}" if abs(amount) < 10_000 else f"{amount:,.0f}"
