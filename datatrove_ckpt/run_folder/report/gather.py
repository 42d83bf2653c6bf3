"""From the state of a run and the histories of its ranks to the page.

Start reading at ``gather``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.history_read import AttemptSummary, History, read_history
from datatrove_ckpt.checkpoint.history_records import Buckets
from datatrove_ckpt.checkpoint.identity import of_model
from datatrove_ckpt.checkpoint.layout import HISTORY
from datatrove_ckpt.common.formatting import figure
from datatrove_ckpt.errors import StorageFailed
from datatrove_ckpt.run_folder.report.histories import time_axis
from datatrove_ckpt.run_folder.report.page import Chart, Page, Table, Tone, clock
from datatrove_ckpt.run_folder.run_state import RankState, RunState
from datatrove_ckpt.run_folder.topics import age, progress_of, ranks_of, topics

_PROGRESS_LINES = 30_000
"""Lines about progress to read in sum.

More of them would cost seconds, and no screen could show them.
"""
_LEAST_LINES = 30  # of one rank
_MOST_LINES = 400
_MAX_ATTEMPTS = 30
_TONES: dict[str, Tone] = {
    "finished": "good",
    "running": "good",
    "damaged": "critical",
    "failed": "critical",
}


@dataclass
class _Rank:
    state: RankState
    history: History

    @property
    def runs(self) -> bool:
        return self.state.state == "running"

    @property
    def ended_early(self) -> list[AttemptSummary]:
        last = self.history.attempts[-1:] if self.runs else []
        return [
            attempt
            for attempt in self.history.attempts
            if attempt.why != "done" and attempt not in last
        ]


def gather(run: RunState) -> Page:
    states = [*run.ranks, *run.retries]
    lines = min(_MOST_LINES, max(_LEAST_LINES, _PROGRESS_LINES // max(1, len(states))))
    ranks = [_Rank(state, _history(state.folder / HISTORY, lines)) for state in states]
    ended = [
        (f"{one.state.root}/{one.state.rank}".lstrip("/"), attempt)
        for one in ranks
        for attempt in one.ended_early
    ]
    state = _overall(run)
    requests = sum(sums.done.requests for sums in (run.totals, run.retried))
    tables = (_attempts(ended), _spreads([one.history for one in ranks], requests))
    return Page(
        where=run.what,
        model=", ".join(
            dict.fromkeys(
                str(run.identity[name]) for name in run.identity if of_model(name) == "model"
            )
        ),
        state=state,
        tone=_TONES.get(state, "warning"),
        made_at=run.read_at,
        version=__version__,
        age=f"{age(run).capitalize()}.",
        sums=[("tasks", ranks_of(run)), ("input", progress_of(run)), *topics(run)],
        charts=list(_charts(ranks, run.read_at)),
        tables=[table for table in tables if table.rows],
    )


def _history(path: Path, most: int) -> History:
    """Returns the history, without attempts if it is damaged: ``status`` names the damage."""
    with suppress(StorageFailed):
        if path.is_file():
            return read_history(str(path), most)
    return History()


def _overall(run: RunState) -> str:
    if run.is_finished:
        return "finished"
    order = ("damaged", "running", "failed", "lost", "interrupted", "unfinished")
    return next((state for state in order if run.totals.states[state]), "unfinished")


# charts and tables -------------------------------------------------------------------------------


def _charts(ranks: Sequence[_Rank], now: float) -> Iterator[Chart]:
    until = [now for one in ranks if one.runs]
    time = time_axis([one.history for one in ranks], *until[:1])
    if time is None:
        return
    for one in ranks:
        if not one.state.root:  # retries read documents that were read before: they are not summed
            time.add(one.history, now if one.runs else None)
    edges = time.edges.tolist()
    yield Chart("Documents per second", edges, {"documents per second": time.rate("read")})
    tokens = {
        "prompt": time.rate("prompt_tokens"),
        "completion": time.rate("completion_tokens"),
    }
    yield Chart("Tokens per second", edges, tokens)


def _attempts(ended: Sequence[tuple[str, AttemptSummary]]) -> Table:
    newest = sorted(ended, key=lambda pair: pair[1].last_seen)[-_MAX_ATTEMPTS:]
    note = (
        "Killed: kill -9, out of memory, or a node that is gone. In flight: requests that were "
        "sent again."
    )
    if len(newest) < len(ended):
        note += f" These are the last {len(newest)} of {len(ended)}."
    columns = (
        "task",
        "started",
        "last sign of life",
        "how it ended",
        "where",
        "in flight#",
    )
    rows = []
    for rank, one in newest:
        times = (clock(one.started), clock(one.last_seen))
        in_flight = "not known"
        if one.in_flight is not None:
            in_flight = figure(one.in_flight)
        rows.append([rank, *times, one.how_it_ended, one.place, in_flight])
    return Table("Attempts that ended early", columns, rows, note)


def _spreads(histories: Sequence[History], requests: int) -> Table:
    """Latency and tokens of all requests that servers answered, from the histograms of each
    attempt.

    ``requests``: of all documents. Those of the last minutes before a kill are in no histogram.
    """
    found = [spread for history in histories for spread in history.spreads]
    kinds = {
        "latency, ms": "milliseconds",
        "prompt tokens": "prompt_tokens",
        "completion tokens": "completion_tokens",
    }
    rows = []
    counted = 0
    for kind, name in kinds.items():
        buckets = Buckets(sum((Counter(getattr(one, name)) for one in found), Counter()))
        number = sum(buckets.values())
        if number:
            counted = max(counted, number)
            limits = [_limit(buckets, share * number) for share in (0.5, 0.9, 0.99, 1.0)]
            rows.append([kind, *map(figure, limits)])
    note = (
        f"{figure(counted)} of {figure(requests)} requests; numbers are rounded up, by a fifth "
        "at most."
    )
    return Table(
        "Requests",
        ("", "50 % at most#", "90 % at most#", "99 % at most#", "all at most#"),
        rows,
        note,
    )


def _limit(buckets: Buckets, number: float) -> float:
    seen = 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= number:
            break
    return Buckets.lower(bucket + 1)
