"""Statistics of a rank's requests, tokens and rollouts, over all attempts.

Each commit holds its chunk's integer sums, from which mean and variance are computed at the end.
Commits of earlier releases hold only totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul

import orjson

from datatrove_ckpt.checkpoint.journal import Took


@dataclass(slots=True)
class Sums:
    """Sums of whole numbers.

    ``low`` and ``high`` are None before the first number, and if they are not known.
    """

    n: int = 0
    total: int = 0
    squares: int = 0
    low: int | None = None
    high: int | None = None

    def count(self, values: Sequence[int]) -> None:
        if values:
            self.add(
                Sums(
                    len(values),
                    sum(values),
                    sum(map(mul, values, values)),
                    min(values),
                    max(values),
                )
            )

    def count_total(self, n: int, total: int) -> None:
        """Adds ``n`` numbers with a known total, as if they were equal."""
        self.add(Sums(n, total, total * total // max(n, 1)))

    def add(self, other: Sums) -> None:
        self.n += other.n
        self.total += other.total
        self.squares += other.squares
        self.low = min((low for low in (self.low, other.low) if low is not None), default=None)
        self.high = max(
            (high for high in (self.high, other.high) if high is not None), default=None
        )

    def to_json(self) -> list[int | None]:
        return [self.n, self.total, self.squares, self.low, self.high]


_SUMS = ("prompt_tokens", "completion_tokens", "requests", "successful_rollouts", "failed_rollouts")


@dataclass(slots=True)
class WorkStats:
    """What documents took. Their answers in the request cache count with the document that used
    them.

    Attributes:
        prompt_tokens, completion_tokens: of each answer.
        requests: of each rollout.
        successful_rollouts, failed_rollouts: of each document.
        failed_requests: requests that were rejected or given up.
    """

    prompt_tokens: Sums = field(default_factory=Sums)
    completion_tokens: Sums = field(default_factory=Sums)
    requests: Sums = field(default_factory=Sums)
    successful_rollouts: Sums = field(default_factory=Sums)
    failed_rollouts: Sums = field(default_factory=Sums)
    failed_requests: int = 0

    def count(self, documents: Sequence[Took]) -> None:
        """Adds documents; many at once cost a third per document."""
        requests: list[int] = []
        kept: list[int] = []
        dropped: list[int] = []
        prompts: list[int] = []
        completions: list[int] = []
        for outcome, numbers, work, _ in documents:
            if work is not None:
                requests += work.rollouts
                kept.append(work.kept)
                dropped.append(len(work.rollouts) - work.kept)
                prompts += work.tokens[::2]
                completions += work.tokens[1::2]
                self.failed_requests += work.failed
            elif numbers[0] <= 1:
                requests.append(numbers[0])
                kept.append(int(outcome == "written"))
                dropped.append(int(outcome != "written"))
                if numbers[0]:
                    prompts.append(numbers[1])
                    completions.append(numbers[2])
            else:
                self.count_unsplit(1, *numbers[:3])
        self.requests.count(requests)
        self.successful_rollouts.count(kept)
        self.failed_rollouts.count(dropped)
        self.prompt_tokens.count(prompts)
        self.completion_tokens.count(completions)

    def count_unsplit(
        self, documents: int, requests: int, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """Adds documents of an earlier release, whose totals alone are known, as if they were
        equal.
        """
        self.requests.count_total(documents, requests)
        self.prompt_tokens.count_total(requests, prompt_tokens)
        self.completion_tokens.count_total(requests, completion_tokens)

    def add(self, other: WorkStats) -> None:
        for name in _SUMS:
            getattr(self, name).add(getattr(other, name))
        self.failed_requests += other.failed_requests

    @classmethod
    def from_json(cls, text: str) -> WorkStats:
        """Reads what ``to_json`` wrote."""
        content = orjson.loads(text)
        sums = {name: Sums(*content[name]) for name in _SUMS}
        return cls(**sums, failed_requests=content["failed_requests"])

    def to_json(self) -> str:
        content = {name: getattr(self, name).to_json() for name in _SUMS} | {
            "failed_requests": self.failed_requests
        }
        return orjson.dumps(content).decode()
