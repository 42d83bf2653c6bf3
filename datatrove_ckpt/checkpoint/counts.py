"""Counts of documents, requests, ranks and runs. They are immutable, and ``+`` adds their fields.

The counts of documents come from journals and commits, those of requests from the history.
``RunNumbers`` has all of a rank or a run: every display reads it.

Commits and journals hold cumulative seconds of all attempts: the highest surviving number counts,
and a kill loses only the time after the last line.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import Any, Literal, NamedTuple, Self

from datatrove_ckpt.checkpoint.skipped_lines import SkippedLines
from datatrove_ckpt.common.finish_reasons import USUAL
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.work_counts import Addable, WorkCounts


class Seconds(NamedTuple):
    """Seconds of all attempts so far. ``inference`` counts while servers are ready."""

    inference: float = 0.0
    total: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:  # type: ignore[override]  # of tuples
        return Seconds(self.inference + other.inference, self.total + other.total)

    def or_later(self, other: Seconds) -> Seconds:
        return Seconds(max(self.inference, other.inference), max(self.total, other.total))


NO_SECONDS = Seconds()
# The ``testing`` package replaces these two, so that no time passes.
_monotonic = time.monotonic
_wall = time.time


def unix_seconds() -> float:
    """Returns the time of the wall clock, which may jump."""
    return round(_wall(), 3)


class RankClock:
    """Measures the seconds of a rank, added to those of earlier attempts."""

    def __init__(self, earlier: Seconds = NO_SECONDS) -> None:
        self._earlier = earlier
        self._started = _monotonic()
        self._serving = math.inf

    def serving(self) -> None:
        """Starts the inference time: the servers are ready."""
        self._serving = min(self._serving, _monotonic())

    def now(self) -> Seconds:
        now = _monotonic()
        inference, total = self._earlier
        return Seconds(
            round(inference + max(0.0, now - self._serving), 3),
            round(total + now - self._started, 3),
        )


FAULTS = {
    "looping": "looping",
    "refusing": "refusing",
    "copying": "copying their prompt",
    "repeating": "repeating another answer",
    "invalid": "not in the form asked for",
}
"""Faults of answers: the key of each in the counts of reasons, and its words in messages.

``generation/quality.py`` finds all but the last, which a rollout with a form finds.
"""
WHY_DROPPED = "Is a threshold, keep or invalid_answer too strict, or a return missing?"


class LogHistogram(Counter[int]):
    """A histogram. Bucket 0 counts values below 1.

    Bucket b > 0 holds the values from ``lower(b)`` up to ``lower(b + 1)``, four buckets for each
    power of two. Histograms add up, and a quantile is at most a fifth too high: see Masson et al.,
    DDSketch, VLDB 2019.
    """

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        return cls(map(_bucket, values))

    def add(self, value: float) -> None:
        self[_bucket(value)] += 1

    def __add__(self, other: Counter[int]) -> Self:  # type: ignore[override]  # its sum is a Counter
        found = type(self)(self)
        found.update(other)
        return found

    @staticmethod
    def lower(bucket: int) -> float:
        if bucket <= 0:
            return 0.0
        return float(2.0 ** ((bucket - 1) / 4))

    def at_most(self, share: float) -> float:
        """Returns a bound of at least this share of the values; 0.0 without values."""
        left = share * self.total()
        for bucket in sorted(self):
            left -= self[bucket]
            if left <= 0:
                return self.lower(bucket + 1)
        return 0.0

    @property
    def percentiles(self) -> dict[str, int]:
        """Median and 95th percentile of whole numbers."""
        return {f"p{percent}": int(self.at_most(percent / 100)) for percent in (50, 95)}


def _bucket(value: float) -> int:
    if value < 1:
        return 0
    return int(math.log2(value) * 4) + 1


Outcome = Literal["written", "dropped", "dead"]


class DocumentWork(NamedTuple):
    """The rollouts, requests and tokens of a document.

    Attributes:
        kept: the number of rollouts with a result.
        failed: the number of requests without an answer.
        rollouts: the number of requests of each rollout.
        tokens: prompt and completion tokens of each answer in turn.
    """

    kept: int
    failed: int
    rollouts: list[int]
    tokens: list[int]


DocumentTally = tuple[Outcome, tuple[int, ...], DocumentWork | None, dict[str, int]]
"""Counted fields of ``FinishedDocument``: ``outcome``, ``numbers``, ``work`` and ``reasons``."""


def _tokens_of(documents: Iterable[DocumentTally]) -> list[int]:
    """Returns prompt and completion tokens of each answer in turn."""
    tokens: list[int] = []
    for _, numbers, work, _ in documents:
        if work is not None:
            tokens += work.tokens
        elif numbers[0]:
            tokens += numbers[1:3]
    return tokens


@dataclass(slots=True, frozen=True)
class Rates(Addable):
    """Work per second. ``input`` is in the unit of the input."""

    documents: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    input: float = 0.0

    def __mul__(self, factor: float) -> Self:
        return type(self)(*(value * factor for value in self.fields().values()))


@dataclass(slots=True, frozen=True)
class DocumentCounts(Addable):
    """Numbers of documents by outcome, and of their requests, tokens and answers.

    ``reasons``: numbers of answers by finish_reason, and by one of ``FAULTS``. ``lengths``:
    completion tokens of each answer. Earlier releases counted neither.
    ``cut_off``, ``empty``: of ``answers``, those that ended at max_tokens, and those without a
    text, or with a vector of zeros. One of several choices is enough.
    """

    read: int = 0
    written: int = 0
    dropped: int = 0
    dead: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    answers: int = 0
    cut_off: int = 0
    empty: int = 0
    reasons: Counter[str] = field(default_factory=Counter, kw_only=True)
    lengths: LogHistogram = field(default_factory=LogHistogram, kw_only=True)

    @classmethod
    def of(cls, documents: Sequence[DocumentTally]) -> Self:
        outcomes = [outcome for outcome, _, _, _ in documents]
        sums = map(sum, zip(*(numbers for _, numbers, _, _ in documents), strict=True))
        written = outcomes.count("written")
        dead = outcomes.count("dead")
        counted = Counter[str]()
        for _, _, _, reasons in documents:
            for reason, number in reasons.items():
                counted[reason] += number
        lengths = LogHistogram.of(_tokens_of(documents)[1::2])
        dropped = len(outcomes) - written - dead
        return cls(len(outcomes), written, dropped, dead, *sums, reasons=counted, lengths=lengths)

    def of_retry(self) -> Self:
        """Returns the counts of a retry, to be added to those of the first attempt.

        The first attempt has counted the documents as read and dead.
        """
        return replace(self, read=0, dead=self.dead - self.read)

    def rates(self, input: int) -> Rates:
        """Returns the counts, and ``input``, as the work of one second."""
        return Rates(self.read, self.requests, self.prompt_tokens, self.completion_tokens, input)

    @property
    def bad(self) -> dict[str, int]:
        """The number of answers with each fault."""
        found = {"cut_off": self.cut_off, "empty": self.empty}
        return found | {name: self.reasons[name] for name in FAULTS}

    @property
    def endings(self) -> dict[str, int]:
        """The number of answers with each finish_reason, the most frequent first."""
        return {name: number for name, number in self.reasons.most_common() if name not in FAULTS}

    @property
    def odd_answers(self) -> str:
        """Sentences, each after a space, about answers that are bad, or end oddly."""
        ended = [
            f"{json.dumps(reason)} {plural(number, 'time')}"
            for reason, number in self.endings.items()
            if reason.lower() not in USUAL
        ]
        text = self.bad_answers
        if ended:
            text += f" Answers ended with finish_reason {', '.join(ended[:9])}."
        return text

    @property
    def bad_answers(self) -> str:
        """Sentences, each after a space, about missing, cut-off, empty and bad answers."""
        answers = plural(self.answers, "answer")
        said = []
        if self.cut_off:
            were = "was" if self.cut_off == 1 else "were"
            said.append(
                f"{self.cut_off} of {answers} {were} cut off at max_tokens (raise "
                "max_tokens, and model_max_context if prompt and answer do not fit)"
            )
        if self.empty:
            said.append(f"{self.empty} of {answers} {'is' if self.empty == 1 else 'are'} empty")
        text = ""
        if self.dropped == self.read > 0:
            text = f" The rollout dropped each document. {WHY_DROPPED}"
        if said:
            text += f" {' and '.join(said)}."
        faults = [
            f"{self.reasons[name]} {words}"
            for name, words in FAULTS.items()
            if 100 * self.reasons[name] > self.answers
        ]
        if faults:
            text += f" Of {answers} at least {', '.join(faults)}."
        return text


class RunningStats(NamedTuple):
    """Number, sum, sum of squares, minimum and maximum of whole numbers.

    ``low`` and ``high`` are None without numbers.
    """

    n: int = 0
    total: int = 0
    squares: int = 0
    low: int | None = None
    high: int | None = None

    @classmethod
    def of(cls, values: Sequence[int]) -> Self:
        if not values:
            return cls()
        squares = sum(map(mul, values, values))
        return cls(len(values), sum(values), squares, min(values), max(values))

    def __add__(self, other: RunningStats) -> RunningStats:  # type: ignore[override]  # of tuples
        ends = [end for end in self[3:] + other[3:] if end is not None]
        return RunningStats(
            self.n + other.n,
            self.total + other.total,
            self.squares + other.squares,
            min(ends, default=None),
            max(ends, default=None),
        )


_NONE = RunningStats()


@dataclass(slots=True, frozen=True)
class WorkStats(Addable):
    """Sums of the work of documents. An answer from the request cache counts for its document.

    Commits hold these sums, so that mean and variance can be computed over all attempts.

    Attributes:
        prompt_tokens, completion_tokens: summed over answers.
        requests: summed over rollouts.
        successful_rollouts, failed_rollouts: summed over documents.
        failed_requests: the number of requests that were rejected or given up.
    """

    prompt_tokens: RunningStats = _NONE
    completion_tokens: RunningStats = _NONE
    requests: RunningStats = _NONE
    successful_rollouts: RunningStats = _NONE
    failed_rollouts: RunningStats = _NONE
    failed_requests: int = 0

    @classmethod
    def of(cls, documents: Sequence[DocumentTally]) -> Self:
        """Counts documents. In one call, many documents cost a third of what each costs alone."""
        requests: list[int] = []
        kept: list[int] = []
        dropped: list[int] = []
        failed = 0
        for outcome, numbers, work, _ in documents:
            if work is not None:
                requests += work.rollouts
                kept.append(work.kept)
                dropped.append(len(work.rollouts) - work.kept)
                failed += work.failed
            else:
                requests.append(numbers[0])
                kept.append(int(outcome == "written"))
                dropped.append(int(outcome != "written"))
        tokens = _tokens_of(documents)
        return cls(
            RunningStats.of(tokens[::2]),
            RunningStats.of(tokens[1::2]),
            RunningStats.of(requests),
            RunningStats.of(kept),
            RunningStats.of(dropped),
            failed,
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Reads the JSON of ``fields()``."""
        failed = content["failed_requests"]
        return cls(**{name: RunningStats(*content[name]) for name in _SUMS}, failed_requests=failed)


_SUMS = WorkStats.__slots__[:-1]


@dataclass(slots=True, frozen=True)
class CompletedWork(Addable):
    """Finished documents, their work, and the seconds of all attempts so far."""

    counts: DocumentCounts = field(default_factory=DocumentCounts)
    work: WorkStats = field(default_factory=WorkStats)
    seconds: Seconds = NO_SECONDS

    @classmethod
    def of(cls, documents: Sequence[DocumentTally]) -> Self:
        return cls(DocumentCounts.of(documents), WorkStats.of(documents))

    def of_retry(self) -> Self:
        return replace(self, counts=self.counts.of_retry())


@dataclass(slots=True, kw_only=True)
class RunNumbers(Addable):
    """The numbers of a rank, or the sums over several ranks.

    Attributes:
        counts, chunks, files: the committed documents, chunks and files.
        rows: the committed rows of a run that explodes.
        unfinished: the documents in journals of uncommitted chunks.
        unfinished_chunks: the number of these chunks.
        exact: ``unfinished`` was counted; otherwise it is as old as the history's last line.
        work: the work of all attempts, up to the history's last line.
        lost_in_flight: requests in flight at the last line of killed attempts; they are sent again,
            and perhaps paid twice.
        number_of_attempts: the number of all attempts.
        killed: the number of attempts without an end line.
        uncertain: the number of ended attempts whose last answers are not in the history.
        seconds: the sum over the attempts of all ranks.
        in_flight, waiting: requests at the history's last line, while the rank runs.
        skipped: lines of the input that are no documents.
        dead_letters: dead letters that were read, by cause.
    """

    counts: DocumentCounts = field(default_factory=DocumentCounts)
    unfinished: DocumentCounts = field(default_factory=DocumentCounts)
    chunks: int = 0
    files: int = 0
    rows: int = 0
    unfinished_chunks: int = 0
    exact: bool = True
    work: WorkCounts = field(default_factory=WorkCounts)
    lost_in_flight: int = 0
    number_of_attempts: int = 0
    killed: int = 0
    uncertain: int = 0
    seconds: float = 0.0
    in_flight: int = 0
    waiting: int = 0
    skipped: SkippedLines = field(default_factory=SkippedLines)
    dead_letters: Counter[str] = field(default_factory=Counter)

    def of_retry(self) -> Self:
        """Returns the numbers of a retry, to be added to those of the first attempt.

        A document that the retry has written is no longer dead.
        """
        return replace(
            self,
            counts=self.counts.of_retry(),
            unfinished=DocumentCounts(),
            unfinished_chunks=0,
            dead_letters=Counter(),
            exact=True,
        )

    @property
    def at_least(self) -> str:
        """The prefix of numbers from the history, whose last minute a kill or a full disk loses."""
        if self.uncertain:
            return "at least "
        return ""

    @property
    def documents(self) -> int:
        return self.counts.read + self.unfinished.read

    @property
    def done(self) -> DocumentCounts:
        """The finished documents by outcome, with their requests, tokens and answers."""
        return self.counts + self.unfinished

    @property
    def paid(self) -> str:
        """Describes the price of the answers by the servers' reports; "" without a report."""
        work = self.work
        said = []
        if work.cached_tokens:
            said.append(
                f"{work.cached_tokens:,} of {work.prompt_tokens:,} prompt tokens cached by servers"
            )
        if work.reasoning_tokens:
            said.append(
                f"{work.reasoning_tokens:,} of {work.completion_tokens:,} completion tokens for "
                "reasoning"
            )
        said += [f"{plural(count, 'answer')} in tier {name}" for name, count in work.tiers.items()]
        for name, count in sorted(work.endpoints.items()):
            cost = ""
            if name in work.endpoint_costs:
                cost = f" for {work.endpoint_costs[name] / 1e9:.6g}"
            said.append(f"{plural(count, 'answer')} of {name}{cost}")
        if work.cost:
            said.append(f"cost {work.cost / 1e9:.6g}")
        if not said:
            return ""
        return self.at_least + ", ".join(said)
