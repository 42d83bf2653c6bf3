"""``Mix`` has samples of several sources, in given shares.

The source of the n-th sample is a hash of seed, epoch, rank, worker and n.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from typing import Any, Literal

from loguru import logger
from xxhash import xxh3_64_intdigest

import datatrove_ckpt.torch.stateful as stateful
from datatrove_ckpt.common.setting_types import check
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.readers.inputs import ReaderState
from datatrove_ckpt.torch.states import Slot

AtEnd = Literal["stop", "drop", "repeat"]

_END = object()
# In epoch e, a source that has begun again n times reads its epoch e + (n << _PASS): another order,
# which no epoch of the training has.
_PASS = 32


class Mix(stateful.StatefulWrapper):
    """Samples of several stateful iterables, drawn by weight.

    Another number of ranks or workers continues with the states of all (``restore``), if the
    sources' rows are counted. The rest of each source is dealt out anew, and other draws follow,
    which depend on the states alone. No sample comes twice, and with "drop" or "repeat" none is
    left out. With "repeat" a source continues in the first pass that is not over for all, so
    samples of later passes, which some workers had begun, may come once more.

    Args:
        weights: how often each source is drawn, relative to the others.
        seed: seed of the draws.
        at_end: what follows when a source ends. "stop": the epoch ends, and the rest of the others
            is not read. "drop": the others continue, with their weights, until all have ended; each
            sample is seen once. "repeat": the source begins again, in another order if it shuffles,
            until each has ended at least once.

    Raises:
        ConfigError: a setting cannot work.
    """

    _names_of_options = ("weights", "seed", "at_end")

    def __init__(
        self,
        sources: Sequence[stateful.Source],
        weights: Sequence[float],
        seed: int = 0,
        at_end: AtEnd = "stop",
    ) -> None:
        super().__init__(sources)
        weights = [float(weight) for weight in weights]
        check(Mix, locals())
        if not sources or len(sources) != len(weights):
            raise ConfigError(
                f"weights must have one number for each source: {len(sources)}, not {len(weights)}."
            )
        if not all(isfinite(weight) and weight > 0 for weight in weights):
            raise ConfigError(
                f"weights must be finite numbers above 0, not {weights}. Leave out unused sources."
            )
        self.weights = weights
        self.seed = seed
        self.at_end = at_end

    def __len__(self) -> int:
        """Returns the number of samples of an epoch, if all are read once.

        Raises:
            TypeError: ``at_end`` is not "drop", or a source does not know its length.
        """
        if self.at_end != "drop":
            raise TypeError(
                f"A Mix with at_end={self.at_end!r} does not know how many samples it has. Set "
                "max_steps."
            )
        return sum(map(len, self._sources))

    def _new_pass(self, epoch: int, slot: Slot, state: ReaderState | None) -> "Mixing":
        if state is None:
            state = {"drawn": 0, "sources": [{}] * len(self._sources)}
        started = []
        for number, saved in enumerate(state["sources"]):
            kept = {key: saved[key] for key in _KEPT if key in saved}
            source = _MixedSource(number, **kept, last=saved.get("state"))
            if source.is_live:
                self.begin_pass(source, epoch, source.last)
            started.append(source)
        # The rank counts, so that ranks do not all draw the same sources at the same time.
        draw_key = f"{self.seed}/{epoch}/{slot.rank}/{slot.worker}/{slot.workers}"
        return Mixing(self, epoch, draw_key, started, int(state["drawn"]))

    def begin_pass(self, source: "_MixedSource", epoch: int, state: ReaderState | None) -> None:
        source.iterable = self._sources[source.number]
        if self.at_end == "repeat":
            source.iterable = stateful.at_epoch(source.iterable, epoch + (source.passes << _PASS))
        if state is not None:
            source.iterable.load_state_dict(state)
        source.iterator = iter(source.iterable)
        source.is_at_end = False
        source.last = None


_KEPT = ("passes", "has_given", "has_ended", "is_live")


@dataclass(slots=True)
class _MixedSource:
    """The progress of a source.

    Attributes:
        passes: how often the source has begun again.
    """

    number: int
    passes: int = 0
    has_given: bool = False
    has_ended: bool = False
    is_live: bool = True
    last: ReaderState | None = None
    is_at_end: bool = True
    iterable: Any = None
    iterator: Any = None

    def state(self) -> ReaderState:
        progress = {key: getattr(self, key) for key in _KEPT}
        if self.is_at_end:
            return progress | {"state": self.last}
        return progress | {"state": self.iterable.state_dict()}


@dataclass(eq=False)
class Mixing(Iterator[object]):
    _mix: Mix
    _epoch: int
    _draw_key: str
    _sources: list[_MixedSource]
    _drawn: int
    finished: bool = False

    def __post_init__(self) -> None:
        self._weigh()

    def __next__(self) -> object:
        while not self.finished:
            number = xxh3_64_intdigest(f"{self._draw_key}/{self._drawn}".encode()) / 2**64
            point = number * self._sums[-1]
            source = self._live[bisect_left(self._sums, point)]
            sample = next(source.iterator, _END)
            if sample is not _END:
                source.has_given = True
                self._drawn += 1
                return sample
            self._end(source)
        raise StopIteration

    def state(self) -> ReaderState:
        sources = [source.state() for source in self._sources]
        return {"finished": self.finished, "drawn": self._drawn, "sources": sources}

    def _weigh(self) -> None:
        self._live = [source for source in self._sources if source.is_live]
        self._sums = list(accumulate(self._mix.weights[source.number] for source in self._live))

    def _end(self, source: _MixedSource) -> None:
        source.has_ended = source.is_at_end = True
        source.last = stateful.end_state(source.iterable)
        if not source.has_given:
            logger.warning(
                f"Source {source.number} of Mix ({type(source.iterable).__name__}) gave no sample."
            )
        at_end = self._mix.at_end
        self.finished = at_end == "stop" or all(one.has_ended for one in self._sources)
        if at_end == "drop" or (at_end == "repeat" and not source.has_given):
            source.is_live = False
            source.iterable = source.iterator = None
            self._weigh()
        elif not self.finished:
            source.passes += 1
            source.has_given = False
            self._mix.begin_pass(source, self._epoch, None)
