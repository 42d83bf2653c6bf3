"""Limits of a run (``until``, ``max_cost`` and ``max_total_tokens``), and the totals they bound.

The tasks of a run do not communicate. Each task adds the totals in the folders of the other tasks
to its own exact totals:

    written documents    commits.jsonl: so they are in the output files
    tokens and cost      the file ``paid``; for a task that is complete, or read from its mirror,
                         the last progress line of history.jsonl

Both only grow, so a limit stays reached.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum, explained, verified_body
from datatrove_ckpt.checkpoint.commits import scan_commits
from datatrove_ckpt.checkpoint.history import read_latest
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.counts import Counts, WorkCounts
from datatrove_ckpt.common.formatting import plural, plural_is
from datatrove_ckpt.errors import CkptError, GoalReached, LimitReached

_FILE = "limits.json"


@dataclass(slots=True, frozen=True)
class RunTotals(Counts):
    """Totals: documents in the output files, tokens of all answers, and ``cost`` in billionths."""

    written: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: int = 0

    @classmethod
    def of(cls, work: WorkCounts, written: int = 0) -> RunTotals:
        return cls(written, work.prompt_tokens, work.completion_tokens, work.cost)

    def at_least_in(self, work: WorkCounts) -> WorkCounts:
        totals = (self | RunTotals.of(work)).fields()
        del totals["written"]
        return replace(work, **totals)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def end(self) -> str:
        return (
            f"{plural_is(self.written, 'document')} in the output files. The same command with a "
            "higher limit continues."
        )


NO_TOTALS = RunTotals()


@dataclass(frozen=True)
class Limits:
    """The limits of an ``InferenceRunner``. ``max_cost`` is in the currency of ``prices``.

    Attributes:
        cost_before, tokens_before: what other steps have taken of them.
    """

    until: int | None = None
    max_cost: float | None = None
    max_total_tokens: int | None = None
    cost_before: float = 0.0
    tokens_before: int = 0

    def __bool__(self) -> bool:
        return self != Limits()

    @property
    def of_usage(self) -> str:
        if self.max_cost is not None:
            return "max_cost"
        return "" if self.max_total_tokens is None else "max_total_tokens"

    def spent(self, totals: RunTotals) -> list[float]:
        shares = []
        if self.max_cost is not None:
            shares.append(totals.cost / 1e9 / (self.max_cost - self.cost_before))
        if self.max_total_tokens is not None:
            shares.append(totals.tokens / (self.max_total_tokens - self.tokens_before))
        return shares

    def reached(self, totals: RunTotals, seconds: float = 0.0) -> LimitReached | None:
        """Returns the first limit that is reached, ``until`` before the others.

        Args:
            seconds: interval at which tasks read the costs of other processes; 0.0 without others.
        """
        if self.until is not None and totals.written >= self.until:
            return GoalReached(
                f"{self.until} is reached: {totals.end}",
                setting="until",
                changes=[{"until": 2 * max(self.until, totals.written)}],
            )
        end = totals.end
        if seconds:
            end += (
                f" Processes read each other's costs every {seconds:.2g} s, and may exceed the "
                "limit by what they spend meanwhile."
            )
        cost = totals.cost / 1e9 + self.cost_before
        tokens = totals.tokens + self.tokens_before
        if self.max_cost is not None and cost >= self.max_cost:
            return LimitReached(
                f"{self.max_cost:g} is reached: the answers cost {cost:.6g}, and {end}",
                setting="max_cost",
                changes=[{"max_cost": f"{2 * cost:g}"}],
            )
        if self.max_total_tokens is not None and tokens >= self.max_total_tokens:
            return LimitReached(
                f"{self.max_total_tokens} is reached: the answers took "
                f"{plural(tokens, 'token')}, and {end}",
                setting="max_total_tokens",
                changes=[{"max_total_tokens": 2 * tokens}],
            )
        return None

    def described(self, totals: RunTotals) -> Iterator[str]:
        if self.until is not None:
            yield f"until: {totals.written:,} of {self.until:,} documents"
        if self.max_cost is not None:
            yield f"max_cost: {totals.cost / 1e9:.6g} of {self.max_cost:g}"
        if self.max_total_tokens is not None:
            yield f"max_total_tokens: {totals.tokens:,} of {self.max_total_tokens:,}"

    def note(self, root: Path) -> None:
        if self == recorded_limits(root):
            return
        path = root / _FILE
        files.disk.make_dirs(root)
        with explained("write", path):
            if self:  # written in place: tasks that start together write the same content
                path.write_bytes(orjson.dumps(asdict(self)))
            else:
                path.unlink(missing_ok=True)


def recorded_limits(root: Path) -> Limits:
    """Returns the limits of the last start. They are hints: a damaged file has none."""
    with suppress(OSError, ValueError, TypeError):
        fields: JsonObject = orjson.loads((root / _FILE).read_bytes())
        return Limits(**fields)
    return Limits()


class PaidFile:
    """The file ``paid`` of a rank, which other tasks read. Each group of answers overwrites it.

    A kill loses nothing; after a power loss the history's totals remain. Methods raise
    StorageFailed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with explained("open", path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.PRIVATE_FILE)

    def write(self, paid: RunTotals) -> None:
        with explained("write", self._path):
            os.pwrite(self._fd, add_checksum(orjson.dumps(paid.fields())).ljust(200), 0)

    def close(self) -> None:
        os.close(self._fd)


def read_paid(path: Path) -> RunTotals:
    with suppress(OSError, ValueError, TypeError):
        body = verified_body(path.read_bytes().rstrip(b" "))
        if body is not None:
            return RunTotals(**orjson.loads(body))
    return NO_TOTALS


def _totals_of(folder: Path) -> RunTotals:
    commits, _ = scan_commits(folder / layout.COMMITS)
    written = sum(commit.counts.written for commit in commits.values())
    paid = read_paid(folder / layout.PAID)  # first: it is removed after the history is written
    return paid | RunTotals.of(read_latest(folder / layout.HISTORY).total, written)


def _stamp(path: Path) -> tuple[int, ...]:
    with suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return ()


@dataclass
class TotalsReader:
    root: Path
    _cached: dict[str, tuple[object, RunTotals]] = field(default_factory=dict)
    """The stamps of a rank's files, and the totals in them."""

    def read(self) -> dict[str, RunTotals]:
        with suppress(OSError):  # the first rank makes the folder
            for folder in layout.rank_folders(self.root):
                name = str(layout.RankAddress.of(folder))
                stamps = [
                    _stamp(folder / file) for file in (layout.COMMITS, layout.HISTORY, layout.PAID)
                ]
                if name not in self._cached or stamps != self._cached[name][0]:
                    with suppress(CkptError, OSError):  # the earlier totals still hold
                        self._cached[name] = stamps, _totals_of(folder)
        return {name: totals for name, (_, totals) in self._cached.items()}
