"""What a whole run takes, estimated from a sample: requests, tokens, time and money."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from datatrove_ckpt.common import BATCH
from datatrove_ckpt.common.formatting import duration, figure, short
from datatrove_ckpt.generation.noted_requests import NotedRequest
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.run_folder.estimate import Estimate, estimate, quantile
from datatrove_ckpt.run_folder.sample import SentSample

ROUND_NUMBER = 1000
"""Of documents that an estimate is for, where the size of the input is not known."""


def estimate_lines(sample: SentSample, step: Step) -> Iterator[str]:
    """Describes what the documents of a sample took, and what the whole input takes."""
    sizes = sample.sizes
    total = ROUND_NUMBER if sample.total is None else sample.total
    sent = [requests for _, requests in sample.documents]
    answers = [one for one in chain.from_iterable(sent) if one.ended]
    if not answers:
        return

    def whole(amount: Callable[[NotedRequest], float]) -> tuple[list[float], Estimate]:
        amounts = [sum(map(amount, requests)) for requests in sent]
        return amounts, estimate(amounts, sizes, total)

    documents = estimate([1] * len(sent), sizes, total).text(short)
    if sample.total is None:
        yield "The size of the input is not known."
    yield f"Median and 95th percentile of a document, and estimate for {documents} documents:"
    kinds: dict[str, Callable[[NotedRequest], float]] = {
        "requests": lambda one: one.ended > 0,
        "prompt tokens": lambda one: one.tokens.prompt,
        "completion tokens": lambda one: one.tokens.completion,
    }
    for kind, amount in kinds.items():
        amounts, all_of_it = whole(amount)
        middle, most = (short(quantile(amounts, share)) for share in (0.5, 0.95))
        yield f"  {kind:<17} {middle:>8} {most:>8}   {all_of_it.text(short)}"
    _, waited = whole(lambda one: one.ended - one.started)
    span = max(one.ended for one in answers) - min(one.started for one in answers)
    at_once = sum(one.ended - one.started for one in answers) / max(span, 1e-6)
    yield (
        f"  time              {waited.text(duration, 1 / at_once)} with {figure(at_once)} requests "
        "in flight, as here"
    )
    for name, money in costs(step, sent, sizes, total):
        yield f"  {name:<17} {money}"


def costs(
    step: Step, sent: Sequence[Sequence[NotedRequest]], sizes: Sequence[float], total: float
) -> Iterator[tuple[str, str]]:
    """Yields "cost" and what a whole input costs, then the same of each tier; nothing without
    prices. See ``estimate``.

    Args:
        sent: the requests of each document.
    """
    models = step.models
    if not any(config.prices_at("") for config in models.values()):
        return

    def cost(one: NotedRequest, tier: str) -> float:
        return models.get(one.model, step.model).cost(one.tokens, tier, one.endpoint) / 1e9

    for tier in dict.fromkeys(("", BATCH, *step.model.prices_at("").get("tiers", {}))):
        amounts = [sum(cost(one, tier) for one in requests) for requests in sent]
        name = f"cost, {tier}" if tier else "cost"
        yield name, estimate(amounts, sizes, total).text(figure)
