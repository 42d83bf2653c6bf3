"""From the state of a run and the histories of its ranks to the content of the page. Start reading at ``gather``."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.history_records import Buckets
from datatrove_ckpt.checkpoint.layout import COMMITS, HISTORY, journal_indices
from datatrove_ckpt.errors import CheckpointError, CkptError
from datatrove_ckpt.formatting import duration, plural
from datatrove_ckpt.maintenance.report import timeline
from datatrove_ckpt.maintenance.report.content import (
    ChunkState,
    Content,
    Histogram,
    Interruption,
    Part,
    RankRow,
    Timeline,
)
from datatrove_ckpt.maintenance.report.figures import figures
from datatrove_ckpt.maintenance.report.interruptions import interruptions, together
from datatrove_ckpt.maintenance.report.prices import Prices, costs
from datatrove_ckpt.maintenance.report.rank_log import RankLog, read_log
from datatrove_ckpt.maintenance.report.scales import grouped, percent
from datatrove_ckpt.maintenance.run_state import RankState, RunState
from datatrove_ckpt.redaction import HIDDEN, Veil

_PROGRESS_LINES = 60_000
"""Lines about progress to read in sum. More of them would cost seconds, and no screen could show them."""
_LEAST_LINES, _MOST_LINES = 30, 400  # of one rank
_SLOW = 0.5  # of the median
_LEAST_RANKS = 3  # of fewer there is no median worth the name
_MAX_CAUSES = 50


@dataclass
class _Rank:
    """One rank with its history."""

    state: RankState
    log: RankLog
    times: timeline.RankTimes | None = None
    rate: float | None = None

    @property
    def key(self) -> str:
        return f"{self.state.root}, {self.state.rank}" if self.state.root else str(self.state.rank)

    @property
    def runs(self) -> bool:
        return self.state.state == "running"


def gather(run: RunState, prices: Prices, config: dict[str, Any]) -> Content:
    """Reads the histories and commits of all ranks, and makes the content of the page. Changes nothing.

    Args:
        config: the YAML file's content; empty without one.
    """
    states = [*run.ranks, *run.retries]
    lines = min(_MOST_LINES, max(_LEAST_LINES, _PROGRESS_LINES // max(1, len(states))))
    ranks = [_Rank(state, _log(state, lines)) for state in states]
    axis = timeline.time_axis([one.log for one in ranks], run.read_at if any(one.runs for one in ranks) else None)
    for one in ranks:
        one.rate = _rate(one)
        if axis is not None:
            one.times = timeline.rank_times(one.log, axis, run.read_at if one.runs else None)
    found = [each for one in ranks for each in interruptions(one.key, one.log, one.runs)]
    requests = sum(each.counts.requests + each.unfinished.requests for each in (run.totals, run.retried))
    rates = [one.rate for one in ranks if one.rate is not None]
    median = statistics.median(rates) if len(rates) >= _LEAST_RANKS else None
    per_chunk = run.identity.get("records_per_chunk")
    return Content(
        where=run.what,
        model=str(run.identity.get("model") or ""),
        state=_overall(run),
        made_at=run.read_at,
        version=__version__,
        age=_age(run),
        figures=list(figures(run)),
        costs=list(costs(run, prices, config, sum(one.starting or 0.0 for one in found))),
        ranks=[_row(one, median, per_chunk if isinstance(per_chunk, int) else 0) for one in ranks],
        median_rate=median,
        interruptions=together(found),
        answers=[
            Part("from servers", max(0, requests - run.totals.work.cached)),
            Part("from the cache", run.totals.work.cached),
        ],
        causes=[Part(name, count) for name, count in run.totals.dead_letters.most_common(_MAX_CAUSES)],
        histograms=list(histograms((one.log for one in ranks), requests)),
        settings=list(_flat(config.get("executor", {}))),
        identity=[(key, _plain(value)) for key, value in run.identity.items()],
        missing=list(_missing(run, ranks)),
        **_over_time(axis, ranks, found),
    )


def _log(state: RankState, lines: int) -> RankLog:
    try:
        return read_log(state.folder / HISTORY, lines)
    except CkptError:
        return RankLog()  # counted in ``_missing``


def _rate(one: _Rank) -> float | None:
    """Documents per second while servers were ready."""
    last = one.log.last
    return last.documents / last.seconds if last is not None and last.seconds > 0 else None


def _over_time(axis: timeline.Axis | None, ranks: Sequence[_Rank], found: Sequence[Interruption]) -> dict[str, Any]:
    if axis is None:
        return {}
    # Retries read documents that were read before: they are not summed.
    sums = timeline.summed(axis, [one.times for one in ranks if one.times is not None and not one.state.root])
    counts = [0] * (len(axis.edges) - 1)
    for one in found:
        counts[axis.place(one.at)] += 1
    return {
        "timeline": Timeline([float(edge) for edge in axis.edges], counts),
        "documents": sums.documents,
        "document_rate": sums.document_rate,
        "tokens": sums.tokens,
        "errors": sums.errors,
    }


def _row(one: _Rank, median: float | None, per_chunk: int) -> RankRow:
    state, share = one.state, one.state.position.share
    runs = chunk_runs(state.folder)
    is_slow = state.trouble == "slow" or (median is not None and one.rate is not None and one.rate < _SLOW * median)
    reason = state.reason
    if is_slow and not reason and median and one.rate is not None:
        reason = f"slow: {percent(one.rate / median)} of the median"
    return RankRow(
        one.key,
        state.state,
        reason,
        state.documents,
        one.rate,
        1.0 if state.state == "finished" else share,
        state.number_of_attempts,
        is_slow,
        runs,
        None if state.state == "finished" else expected_chunks(state.documents, share, per_chunk),
    )


def _overall(run: RunState) -> str:
    """The state of the whole run, in one word."""
    if run.is_finished:
        return "finished"
    states = run.totals.states
    order = ("damaged", "running", "failed", "lost", "interrupted", "unfinished")
    return next((state for state in order if states[state]), "unfinished")


def _age(run: RunState) -> str:
    source = "This is its mirror. " if run.is_copy else ""
    if run.newest is None or run.read_at - run.newest < 1:
        return source.rstrip()
    return f"{source}The newest change was {duration(run.read_at - run.newest)} before that."


def _missing(run: RunState, ranks: Sequence[_Rank]) -> Iterator[str]:
    without = sum(not one.log.attempts for one in ranks)
    if without:
        have = "has" if without == 1 else "have"
        yield (
            f"{without} of {plural(len(ranks), 'rank')} {have} no history: an earlier release does not write one. "
            "Charts over time are without them; sums are not."
        )
    if damaged := sum(one.log.damaged for one in ranks):
        yield f"{plural(damaged, 'damaged line')} of histories could not be read and was left out."
    if not run.totals.exact:
        yield "Documents of chunks that are not committed are as of the last line of each history."


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _flat(node: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of nested settings, with dotted names, without secrets."""
    hidden = repr(Veil(name, node)) == HIDDEN and not name.endswith(".metadata_key")
    if hidden:
        yield name, HIDDEN
    elif isinstance(node, dict) and node:
        for key, part in node.items():
            yield from _flat(part, name if key == "init_args" else f"{name}.{key}" if name else str(key))
    elif isinstance(node, list) and any(isinstance(part, dict) for part in node):
        for index, part in enumerate(node):
            yield from _flat(part, f"{name}.{index}")
    elif name:
        yield name, repr(Veil("", node)) if not isinstance(node, str) else node


# The chunks of a rank as runs of neighbours in one state, read from its files without keeping what they hold.


# A commit's line is long, and a report needs two numbers of it; 1,000 ranks have many of them. Whether lines are whole
# is for ``status`` to say.
_COMMIT = re.compile(rb'^[^\n]{0,40}"chunk_index":(\d{1,18}),[^\n]{0,200}?"dead":(\d{1,18}),[^\n]*\n', re.MULTILINE)


def chunk_runs(folder: Path) -> list[tuple[int, int, ChunkState]]:
    """(first, end, state) in ascending order; chunks without a file are left out."""
    states: dict[int, ChunkState] = {}
    try:
        states |= dict.fromkeys(journal_indices(folder), "open")
        states |= _committed(folder / COMMITS)
    except (CheckpointError, OSError):
        pass  # ``status`` says what is damaged; the report draws the rest
    runs: list[tuple[int, int, ChunkState]] = []
    for (state, _), run in groupby(enumerate(sorted(states)), key=lambda item: (states[item[1]], item[1] - item[0])):
        indices = [index for _, index in run]
        runs.append((indices[0], indices[-1] + 1, state))
    return runs


def _committed(path: Path) -> dict[int, ChunkState]:
    found = _COMMIT.findall(path.read_bytes()) if path.is_file() else []
    return {int(index): "dead" if int(dead) else "done" for index, dead in found}


def expected_chunks(documents: int, share: float | None, records_per_chunk: int) -> int | None:
    """How many chunks a rank will have, if its documents go on as they came; None if that is not known."""
    if not share or not documents or not records_per_chunk:
        return None
    return math.ceil(documents / share / records_per_chunk)


# Histograms of all requests that servers answered, from those of each attempt.


_MAX_BINS = 24
_PER_POWER = 4  # buckets for each power of two


def histograms(logs: Iterable[RankLog], requests: int) -> Iterator[Histogram]:
    """Latency, prompt tokens, completion tokens; each if there is any.

    Args:
        requests: of all documents. Those of the last minutes before a kill are in no histogram.
    """
    sums = {name: Counter[int]() for name in ("milliseconds", "prompt_tokens", "completion_tokens")}
    for spread in (attempt.spread for log in logs for attempt in log.attempts):
        if spread is not None:
            for name, counter in sums.items():
                counter.update(getattr(spread, name))
    shown = (
        ("Latency of requests", "s", sums["milliseconds"], 0.001),
        ("Prompt tokens of requests", "tokens", sums["prompt_tokens"], 1.0),
        ("Completion tokens of requests", "tokens", sums["completion_tokens"], 1.0),
    )
    for title, unit, counter, factor in shown:
        if counted := sum(counter.values()):
            note = f" of {grouped(requests)}" if counted < requests else ""
            yield Histogram(title, unit, list(_bins(counter, factor)), note)


def _bins(counter: Counter[int], factor: float) -> Iterator[tuple[float, float, int]]:
    """Neighbouring buckets are joined until there are few enough."""
    low, high = min(counter), max(counter)
    joined = next(number for number in (1, 2, _PER_POWER, 400) if (high - low) / number < _MAX_BINS)
    groups = Counter[int]()
    for bucket, count in counter.items():
        groups[(bucket - 1) // joined] += count  # bucket 0 becomes group -1
    for group in range(min(groups), max(groups) + 1):
        start = Buckets.lower(group * joined + 1) if group >= 0 else 0.0
        yield start * factor, Buckets.lower((group + 1) * joined + 1) * factor, groups[group]
