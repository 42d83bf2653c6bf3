"""What a whole run takes, estimated from a sample: requests, tokens, time and money."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from datatrove_ckpt.checkpoint.numbers import DocumentCounts
from datatrove_ckpt.common import BATCH
from datatrove_ckpt.common.formatting import duration, figure, short
from datatrove_ckpt.generation.noted_requests import NotedRequest
from datatrove_ckpt.generation.quality import Quality
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.run_folder.sample import SentSample

# In simulated samples of 50, of lognormal and Pareto distributions, the truth was within three
# standard errors nine times in ten; within two, it was not.
_STANDARD_ERRORS = 3.0
_ROUND_NUMBER = 1000  # documents, where the size of the input is not known


@dataclass(frozen=True)
class Estimate:
    """A sum over the whole input, with its likely range."""

    value: float
    low: float
    high: float

    def text(self, of: Callable[[float], str], factor: float = 1.0) -> str:
        """Returns "12,400 (11,000 to 14,100)"."""
        value, low, high = (of(each * factor) for each in (self.value, self.low, self.high))
        if low == high:
            return value
        if math.isinf(self.high):
            return f"{value} (one document says little)"
        return f"{value} ({low} to {high})"


def estimate(amounts: Sequence[float], sizes: Sequence[float], total: float) -> Estimate:
    """Estimates the sum of an amount over an input, as ratio to the size.

    The range is a factor up and down, because amounts are skewed. See Cochran, Sampling Techniques,
    chapter 6. What fewer than one document in the sample has cannot be seen.

    Args:
        amounts: of each document of the sample.
        sizes: of the same documents, in the unit of ``total``. Their sum is above 0.
        total: size of the whole input.
    """
    count = len(amounts)
    size = sum(sizes)
    ratio = sum(amounts) / size
    if size >= total or not ratio:
        value = ratio * total
        return Estimate(value, value, value)
    if count == 1:
        return Estimate(ratio * total, 0.0, math.inf)
    squares = sum((amount - ratio * own) ** 2 for amount, own in zip(amounts, sizes, strict=True))
    error = math.sqrt(squares / (count - 1) / count) / (size / count)
    factor = 1 + _STANDARD_ERRORS * error / ratio
    return Estimate(ratio * total, ratio * total / factor, ratio * total * factor)


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def estimate_lines(sample: SentSample, step: Step) -> Iterator[str]:
    """Describes what the documents of a sample took, and what the whole input takes."""
    sizes = sample.sizes
    total = _ROUND_NUMBER if sample.total is None else sample.total
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
        "prompt tokens": lambda one: one.tokens[0],
        "completion tokens": lambda one: one.tokens[2],
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
    if any(config.prices for config in step.models.values()):
        tiers = (step.model.prices or {}).get("tiers", {})
        for tier in dict.fromkeys(("", BATCH, *tiers)):
            _, money = whole(partial(_cost, step=step, tier=tier))
            name = f"cost, {tier}" if tier else "cost"
            yield f"  {name:<17} {money.text(figure)}"
    quality = Quality(step.refusals)
    faults = Counter[str]()
    for one in answers:
        if not one.is_empty:
            faults.update(quality.faults(one.answer_text, one.question))
    odd = DocumentCounts(
        answers=len(answers),
        cut_off=sum(one.is_cut_off for one in answers),
        empty=sum(one.is_empty for one in answers),
        reasons=faults,
    ).odd_answers
    if odd:
        yield odd.strip()


def _cost(request: NotedRequest, step: Step, tier: str) -> float:
    config = step.models.get(request.model, step.model)
    prompt, cached, completion = request.tokens
    return config.cost(prompt, cached, completion, tier) / 1e9
