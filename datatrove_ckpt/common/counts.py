"""The numbers of a run. Each is declared once, as a field of a ``Counts``, and counted in one
place.

The declaration says what the number is (its line in the docstring) and where it is shown besides
the JSON of ``status`` and MLflow, which have all numbers: at the port for Prometheus, and in a line
of ``status``, of the report and of the card. docs/status.md is made of the declarations.

The counts of documents come from journals and commits, those of requests from the history. Commits
and journals hold cumulative seconds of all attempts: the highest surviving number counts, and a
kill loses only the time after the last line.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import mul
from typing import Any, Literal, NamedTuple, Self

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import plural

ENDINGS = frozenset(
    """
    complete completed end_turn eos eos_token function_call stop stop_sequence tool_call tool_calls
    tool_use
    """.split()  # noqa: SIM905
)
"""Reasons of whole answers."""
CUT_OFF = frozenset({"length", "max_tokens", "model_length", "model_context_window_exceeded"})
"""The answer reached max_tokens, or the end of the model's context."""
USUAL = ENDINGS | CUT_OFF


Unit = Literal["bytes", "rows"]


class Display(NamedTuple):
    """The places besides JSON at which a number is displayed.

    Attributes:
        prometheus: its metric, without the prefix; with a label's value behind a dot if several
            numbers share the metric.
        line: the line of ``status`` that has the number, unless it is zero: a topic, ": " and a
            text, with a place for the number, and places for those of ``RunNumbers`` as ``run``.
        key: key in history.jsonl of a number with labels.
    """

    prometheus: str = ""
    line: str = ""
    key: str = ""


def number(prometheus: str = "", line: str = "") -> Any:
    return field(default=0, metadata={"display": Display(prometheus, line)})


def labelled(key: str, prometheus: str = "") -> Any:
    display = Display(prometheus, key=key)
    return field(default_factory=Counter, kw_only=True, metadata={"display": display})


def _plus(value: object, other: Any) -> object:
    if isinstance(value, bool):
        return value and other
    return value + other


def _minus(value: object, other: Any) -> object:
    if isinstance(value, Counter):
        return type(value)(value - other)
    return max(0, value - other)


class Counts:
    """A dataclass of numbers, which refuses unknown names.

    ``+`` adds field by field, ``-`` subtracts and stops at zero, ``|`` takes the larger numbers.
    The result has the class of the first operand.
    """

    __slots__ = ()
    __dataclass_fields__: Any

    def __add__(self, other: object) -> Self:
        return self._with(_plus, other)

    def __sub__(self, other: object) -> Self:
        return self._with(_minus, other)

    def __or__(self, other: object) -> Self:
        return self._with(max, other)

    def __mul__(self, factor: float) -> Self:
        return type(self)(*(value * factor for value in self.fields().values()))

    def _with(self, operation: Callable[[object, object], Any], other: object) -> Self:
        values = self.fields()
        for name, value in values.items():
            values[name] = operation(value, getattr(other, name))
        return type(self)(**values)

    def fields(self) -> JsonObject:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def processed(self: Any, input: float = 0.0) -> Processed:
        return Processed(
            self.documents, self.requests, self.prompt_tokens, self.completion_tokens, input
        )

    def numbers(self) -> list[int]:
        return [value for value in self.fields().values() if isinstance(value, int)]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], **others: object) -> Self:
        names = [name for name in cls.__dataclass_fields__ if name not in others]
        return cls(**dict(zip(names, numbers, strict=False)), **others)

    @classmethod
    def displays(cls) -> dict[str, Display]:
        fields = cls.__dataclass_fields__
        return {name: fields[name].metadata.get("display", Display()) for name in fields}

    def samples(self) -> JsonObject:
        samples: JsonObject = {}
        for name, display in self.displays().items():
            metric, _, label = display.prometheus.partition(".")
            if label:
                samples.setdefault(metric, {})[label] = getattr(self, name)
            elif metric:
                samples[metric] = getattr(self, name)
        return samples


@dataclass(slots=True)
class Tokens:
    """Tokens of an answer.

    Attributes:
        cached: prompt tokens that the server took from its cache.
        written: prompt tokens that the server put into its cache.
        reasoning: completion tokens for reasoning.
    """

    prompt: int
    completion: int
    cached: int = 0
    written: int = 0
    reasoning: int = 0


@dataclass(slots=True)
class WorkCounts(Counts):
    """Sums over attempts. A kill loses the last minute of these counts; counts of documents are
    exact. A new number goes behind the others of its type: history.jsonl has them in this order.

    Attributes:
        documents: documents that were finished
        requests: requests that a server answered
        failed: requests that ended without an answer
        prompt_tokens: prompt tokens of the answers
        completion_tokens: completion tokens of the answers
        cached: requests that were answered from the request cache
        sent: attempts of requests that were sent to a server
        retries: attempts that failed and whose request was sent again
        resent: attempts that were lost with their server and whose request was sent again
        restarts: restarts of servers
        cached_tokens: prompt tokens that the server took from its own cache
        reasoning_tokens: completion tokens for reasoning
        cost: cost of the answers at the ``prices`` of the config, in billionths
        continued: half-written answers that went on after a stop, or after their server's death
        continued_tokens: tokens of these answers that were not generated again
        prefix_queries: tokens that engines looked up in their prefix caches
        prefix_hits: tokens that they found there
        errors: failed attempts by kind, such as "timeout", "connection" or "HTTP 503"
        tiers: answers by the ``service_tier`` that the server names
        endpoints: answers by the endpoint that gave them, if the config has ``endpoints``
        endpoint_costs: their cost in billionths, by endpoint
        endpoint_errors: the errors by endpoint
        calls: calls of ``generate.once`` by name
        failed_calls: calls that failed, by name
        call_milliseconds: time of the calls, by name
    """

    documents: int = number("documents_total")
    requests: int = number("requests_total.answered")
    failed: int = number("requests_total.failed")
    prompt_tokens: int = number("tokens_total.prompt")
    completion_tokens: int = number("tokens_total.completion")
    cached: int = number("cache_hits_total")
    sent: int = 0
    retries: int = number(
        "request_retries_total.error", "wasted: {run.at_least}{:,} sent again after an error"
    )
    resent: int = number(
        "request_retries_total.server_lost",
        "wasted: {run.at_least}{:,} lost when their server died or the run stopped",
    )
    restarts: int = number("server_restarts_total")
    cached_tokens: int = number(
        "", "paid: {:,} of {run.work.prompt_tokens:,} prompt tokens cached by servers"
    )
    reasoning_tokens: int = number(
        "", "paid: {:,} of {run.work.completion_tokens:,} completion tokens for reasoning"
    )
    cost: int = 0
    continued: int = number(
        "continued_answers_total", "continued: {run.at_least}{:,} half-written answers"
    )
    continued_tokens: int = number(
        "continued_tokens_total",
        "continued: {run.at_least}{:,} of their tokens not generated again",
    )
    prefix_queries: int = 0
    prefix_hits: int = 0
    errors: Counter[str] = labelled("err", "request_errors_total")
    tiers: Counter[str] = labelled("tier")
    endpoints: Counter[str] = labelled("by")
    endpoint_costs: Counter[str] = labelled("paid")
    endpoint_errors: Counter[str] = labelled("err_by")
    calls: Counter[str] = labelled("call")
    failed_calls: Counter[str] = labelled("failed")
    call_milliseconds: Counter[str] = labelled("ms")

    @property
    def lost(self) -> int:
        return self.retries + self.resent


@dataclass(slots=True, frozen=True)
class Processed(Counts):
    """Documents and their work that were processed, in all or per second.

    Attributes:
        documents: finished documents
        requests: requests that were answered
        prompt_tokens: their prompt tokens
        completion_tokens: their completion tokens
        input: part of the input that was read, in the unit of the input
    """

    documents: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    input: float = 0.0


class InputPosition(NamedTuple):
    """The part of its input that a rank has read.

    ``done``, ``total``: in ``unit``. ``total`` is None if the input's size is not known; ``unit``
    is None if not even the position is, and then ``done`` is 0. ``tasks``: ranks from this number
    on have no input; None if it is not known.
    """

    done: int = 0
    total: int | None = None
    unit: Unit | None = None
    tasks: int | None = None

    @property
    def share(self) -> float | None:
        """The part that is read, from 0 to 1; None if it is not known. An empty input is done."""
        if self.unit is None or self.total is None:
            return None
        if not self.total:
            return 1.0
        return min(1.0, self.done / self.total)


@dataclass(slots=True, frozen=True)
class SkippedLines(Counts):
    """Numbers of input lines or rows that became no document, up to a position. Blank lines do not
    count.

    A reader yields ``DAMAGED`` or ``WITHOUT_TEXT`` in place of a document. ``numbers()`` is what
    positions and the history keep; an earlier build wrote file names after it.

    Attributes:
        damaged: lines that are not a JSON object
        without_text: rows without a text under ``text_key`` or from the adapter
    """

    damaged: int = 0
    without_text: int = 0

    def __bool__(self) -> bool:
        return self.damaged + self.without_text > 0

    @property
    def text(self) -> str:
        counts = []
        if self.damaged:
            counts.append(plural(self.damaged, "damaged line"))
        if self.without_text:
            counts.append(f"{plural(self.without_text, 'row')} without text")
        return " and ".join(counts)

    def __str__(self) -> str:
        if self:
            return f" Skipped: {self.text}."
        return ""


DAMAGED = SkippedLines(damaged=1)
WITHOUT_TEXT = SkippedLines(without_text=1)


class Seconds(NamedTuple):
    """Seconds of all attempts so far. ``inference`` counts while servers are ready."""

    inference: float = 0.0
    total: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:  # type: ignore[override]  # of tuples
        return Seconds(self.inference + other.inference, self.total + other.total)

    def or_later(self, other: Seconds) -> Seconds:
        return Seconds(max(self.inference, other.inference), max(self.total, other.total))


NO_SECONDS = Seconds()
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
WHY_DROPPED = "Is a threshold, keep or invalid_answer too strict, a return missing?"


class LogHistogram(Counter[int]):
    """A histogram. Bucket 0 counts values below 1.

    Bucket b > 0 holds the values from ``lower(b)`` up to ``lower(b + 1)``, four buckets for each
    power of two. Histograms add up, and a quantile is at most a fifth too high, or a sixth too low:
    see Masson et al., DDSketch, VLDB 2019.
    """

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        return cls(map(bisect_right, repeat(BOUNDS), map(float, values)))

    def add(self, value: float) -> int:
        bucket = bisect_right(BOUNDS, float(value))
        self[bucket] += 1
        return bucket

    def __add__(self, other: Counter[int]) -> Self:  # type: ignore[override]  # its sum is a Counter
        histogram = type(self)(self)
        histogram.update(other)
        return histogram

    @staticmethod
    def lower(bucket: int) -> float:
        if bucket <= 0:
            return 0.0
        return float(2.0 ** ((bucket - 1) / 4))

    def at_most(self, share: float) -> float:
        return self.lower(self._bucket_at(share) + 1)

    @property
    def percentiles(self) -> dict[str, int]:
        """Rounded down, so that none is above ``max_tokens``."""
        shares = {"p50": 0.5, "p95": 0.95}
        return {name: int(self.lower(self._bucket_at(share))) for name, share in shares.items()}

    def _bucket_at(self, share: float) -> int:
        remaining = share * self.total()
        for bucket in sorted(self):
            remaining -= self[bucket]
            if remaining <= 0:
                return bucket
        return -1


BOUNDS = [LogHistogram.lower(bucket) for bucket in range(1, 4 * 63)]
"""The lower bounds of the buckets of ``LogHistogram`` after the first."""


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
"""Outcome, ``numbers``, ``work`` and ``reasons`` of a ``FinishedDocument``."""


@dataclass(slots=True, frozen=True)
class DocumentCounts(Counts):
    """Numbers of documents by outcome, and of their requests, tokens and answers. Earlier releases
    counted neither ``reasons`` nor ``lengths``.

    Attributes:
        read: documents that were read
        written: documents in the output files, or in a journal
        dropped: documents whose rollouts returned None
        dead: dead letters
        requests: requests of these documents, cached answers included
        prompt_tokens: prompt tokens of their answers
        completion_tokens: completion tokens of their answers
        answers: their answers
        cut_off: answers that ended at max_tokens; one of several choices is enough
        empty: answers without a text, or with a vector of zeros
        reasons: answers by ``finish_reason``, and by what is wrong with them
        lengths: completion tokens of the answers: ``p50``, ``p95``
    """

    read: int = 0
    written: int = number("rank_documents.written")
    dropped: int = number("rank_documents.dropped")
    dead: int = number("rank_documents.dead")
    requests: int = 0
    prompt_tokens: int = number("rank_tokens.prompt")
    completion_tokens: int = number("rank_tokens.completion")
    answers: int = 0
    cut_off: int = 0
    empty: int = 0
    reasons: Counter[str] = field(default_factory=Counter, kw_only=True)
    lengths: LogHistogram = field(default_factory=LogHistogram, kw_only=True)

    @classmethod
    def of(cls, documents: Sequence[DocumentTally], tokens: Sequence[int]) -> Self:
        outcomes = [outcome for outcome, _, _, _ in documents]
        sums = map(sum, zip(*[numbers for _, numbers, _, _ in documents], strict=True))
        written = outcomes.count("written")
        dead = outcomes.count("dead")
        counted = Counter[str]()
        for _, _, _, reasons in documents:
            for reason, times in reasons.items():
                counted[reason] += times
        lengths = LogHistogram.of(tokens[1::2])
        dropped = len(outcomes) - written - dead
        return cls(len(outcomes), written, dropped, dead, *sums, reasons=counted, lengths=lengths)

    @property
    def documents(self) -> int:
        return self.read

    def of_retry(self) -> Self:
        """Returns the counts of a retry, to be added to those of the first attempt.

        The first attempt has counted the documents as read and dead.
        """
        return replace(self, read=0, dead=self.dead - self.read)

    @property
    def bad(self) -> dict[str, int]:
        faults = {"cut_off": self.cut_off, "empty": self.empty}
        return faults | {name: self.reasons[name] for name in FAULTS}

    @property
    def endings(self) -> dict[str, int]:
        return {name: number for name, number in self.reasons.most_common() if name not in FAULTS}

    @property
    def odd_answers(self) -> str:
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
        answers = plural(self.answers, "answer")
        phrases = []
        if self.cut_off:
            were = "was" if self.cut_off == 1 else "were"
            phrases.append(
                f"{self.cut_off} of {answers} {were} cut off at max_tokens (raise it, and "
                "model_max_context if needed)"
            )
        if self.empty:
            phrases.append(f"{self.empty} of {answers} {'is' if self.empty == 1 else 'are'} empty")
        text = ""
        if self.dropped == self.read > 0:
            text = f" The rollout dropped each document. {WHY_DROPPED}"
        if phrases:
            text += f" {' and '.join(phrases)}."
        faults = [
            f"{self.reasons[name]} {words}" for name, words in FAULTS.items() if self.reasons[name]
        ]
        if faults:
            text += f" Faults of {answers}: at least {', '.join(faults)}."
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
class WorkStats(Counts):
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
    def of(cls, documents: Sequence[DocumentTally], tokens: Sequence[int]) -> Self:
        requests = []
        successful = []
        dropped = []
        failed = 0
        for outcome, numbers, work, _ in documents:
            if work is not None:
                requests += work.rollouts
                successful.append(work.kept)
                dropped.append(len(work.rollouts) - work.kept)
                failed += work.failed
            else:
                requests.append(numbers[0])
                kept = 1 if outcome == "written" else 0
                successful.append(kept)
                dropped.append(1 - kept)
        return cls(
            RunningStats.of(tokens[::2]),
            RunningStats.of(tokens[1::2]),
            RunningStats.of(requests),
            RunningStats.of(successful),
            RunningStats.of(dropped),
            failed,
        )

    @classmethod
    def from_json(cls, fields: JsonObject) -> Self:
        failed = fields["failed_requests"]
        return cls(**{name: RunningStats(*fields[name]) for name in _SUMS}, failed_requests=failed)


_SUMS = WorkStats.__slots__[:-1]


@dataclass(slots=True, frozen=True)
class CompletedWork(Counts):
    counts: DocumentCounts = DocumentCounts()
    work: WorkStats = WorkStats()
    seconds: Seconds = NO_SECONDS

    @classmethod
    def of(cls, documents: Sequence[DocumentTally]) -> Self:
        tokens: list[int] = []
        for _, numbers, work, _ in documents:
            if work is not None:
                tokens += work.tokens
            elif numbers[0]:
                tokens += numbers[1:3]
        return cls(DocumentCounts.of(documents, tokens), WorkStats.of(documents, tokens))

    def of_retry(self) -> Self:
        return replace(self, counts=self.counts.of_retry())


@dataclass(slots=True, kw_only=True)
class RunNumbers(Counts):
    """The numbers of a rank, or the sums over several ranks.

    Attributes:
        counts: documents in commits
        unfinished: documents in journals of chunks that are not committed
        chunks: committed chunks
        files: committed files
        rows: committed rows, with ``explode``
        unfinished_chunks: chunks that have a journal and no commit
        exact: false if ``unfinished`` is as old as the history's last line
        work: work of all attempts, up to the history's last line
        lost_in_flight: requests in flight at the last line of killed attempts, which are sent
            again, and perhaps paid twice
        number_of_attempts: all attempts
        killed: attempts without an end line
        uncertain: ended attempts whose last answers are not in the history
        seconds: time of the attempts of all tasks
        in_flight: requests at a server at the history's last line, while the task runs
        waiting: requests that wait for a server then
        skipped: lines of the input that are no documents
        dead_letters: dead letters that were read, by cause
    """

    counts: DocumentCounts = DocumentCounts()
    unfinished: DocumentCounts = DocumentCounts()
    chunks: int = 0
    files: int = 0
    rows: int = 0
    unfinished_chunks: int = 0
    exact: bool = True
    work: WorkCounts = field(default_factory=WorkCounts)
    lost_in_flight: int = number("", "wasted: {:,} in flight shortly before attempts were killed")
    number_of_attempts: int = 0
    killed: int = 0
    uncertain: int = 0
    seconds: float = 0.0
    in_flight: int = 0
    waiting: int = 0
    skipped: SkippedLines = SkippedLines()
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
        return self.counts + self.unfinished

    def lines(self) -> dict[str, list[str]]:
        lines: dict[str, list[str]] = {}
        for counts in (self.counts, self.work, self):
            for name, display in counts.displays().items():
                value = getattr(counts, name)
                if display.line and value:
                    topic, _, text = display.line.partition(": ")
                    lines.setdefault(topic, []).append(text.format(value, run=self))
        return lines

    @property
    def paid(self) -> str:
        work = self.work
        texts = self.lines().get("paid", [])
        texts += [f"{plural(count, 'answer')} in tier {name}" for name, count in work.tiers.items()]
        for name, count in sorted(work.endpoints.items()):
            cost = ""
            if name in work.endpoint_costs:
                cost = f" for {work.endpoint_costs[name] / 1e9:.6g}"
            texts.append(f"{plural(count, 'answer')} of {name}{cost}")
        if work.cost:
            texts.append(f"cost {work.cost / 1e9:.6g}")
        if not texts:
            return ""
        return self.at_least + ", ".join(texts)


METRICS = {
    "rank_info version host job": "Always 1; its labels say where the task works.",
    "rank_state state": (
        "1 for the task's state: starting, running, stopping, done, stopped, failed."
    ),
    "attempt_start_timestamp_seconds": "Start of this attempt, in Unix seconds.",
    "rank_documents outcome": "Documents that all attempts have finished.",
    "rank_tokens type": "Tokens of documents that all attempts have finished.",
    "rank_answers kind": "Answers of these documents: all, and the bad ones by fault.",
    "rank_finish_reasons reason": "Answers of these documents by finish_reason.",
    "input_done_ratio": "Part of the input that is done, from 0 to 1; missing if unknown.",
    "tasks_with_input": "Tasks that have an input; missing if unknown.",
    "rank_cost": "Cost of all attempts' answers; missing without prices.",
    "documents_total": "Documents that this attempt has finished.",
    "documents_in_progress": "Documents that rollouts work on now.",
    "requests_total outcome": "Requests of this attempt that ended at a server.",
    "requests_in_flight": "Requests that servers work on now.",
    "server_places": "Requests that servers have room for now.",
    "requests_waiting": "Requests that wait for a server or their next attempt now.",
    "unanswered_seconds": "Seconds since the last answer, while requests fail.",
    "request_retries_total cause": (
        "Requests sent again in this attempt, after an error or a lost server."
    ),
    "continued_answers_total": "Half-written answers continued in this attempt.",
    "continued_tokens_total": "Their tokens that were not generated again.",
    "request_errors_total kind": "Failures of requests in this attempt, by kind.",
    "cache_hits_total": "Requests of this attempt answered by the cache.",
    "tokens_total type": "Tokens of this attempt's answers, as servers count them.",
    "server_restarts_total": "Restarts of model servers in this attempt.",
    "request_duration_seconds": "Time from sending a request to its answer.",
    "request_prompt_tokens": "Prompt tokens of each answer.",
    "request_completion_tokens": "Completion tokens of each answer.",
}
"""What Prometheus shows, by the names of metrics and their labels, in the order of the page."""
