"""Which iterations over a dataset there are. It has one position, so two at once have no state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

from datatrove_ckpt.errors import ConfigError


class Handle(Iterator[Any]):
    """What the caller of ``iter()`` gets, so that its dataset sees when nobody has it any more."""

    __slots__ = ("__weakref__", "_next", "_samples", "has_ended")

    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples = samples
        self._next: Callable[[], Any] | None = None  # before the first sample
        self.has_ended = False

    def __next__(self) -> Any:
        try:
            return self._next() if self._next is not None else self._first()
        except StopIteration:
            self.has_ended = True
            raise

    def _first(self) -> Any:
        sample = next(self._samples)
        self._next = getattr(self._samples, "rest", self._samples).__next__
        return sample


class Iterations:
    """The iterations over one dataset, in one process."""

    def __init__(self) -> None:
        self._begun: list[ref[Handle]] = []

    def begin(self, samples: Iterator[Any]) -> Handle:
        handle = Handle(samples)
        self._begun = [*self._running(), ref(handle)]
        return handle

    def forget(self) -> None:
        """The next iteration begins at a position that was loaded."""
        self._begun = []

    def check(self, owner: object) -> None:
        """Raises ConfigError if an iteration before the latest one is neither at its end nor dropped."""
        if self._running(before=-1):
            raise ConfigError(
                f"There are two iterations over one {type(owner).__name__}: another one began before this one had "
                "ended, and there is one position only, that of the latest. Give each loader a dataset of its own, and "
                "drop an iterator that is not needed any more."
            )

    def _running(self, before: int | None = None) -> list[ref[Handle]]:
        return [one for one in self._begun[:before] if (handle := one()) is not None and not handle.has_ended]

    def __reduce__(self) -> tuple[type[Iterations], tuple[()]]:
        return Iterations, ()  # copies in workers iterate themselves
