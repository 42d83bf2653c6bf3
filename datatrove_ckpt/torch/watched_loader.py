"""Watches a loader: counts its batches, and gives a restored state back that a peek has taken.

After a restore, ``next(iter(loader))`` may only want the shape of a batch. Without the state, the
loop that follows would begin the epoch again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loguru import logger

from datatrove_ckpt.common import JsonObject

if TYPE_CHECKING:
    from datatrove_ckpt.torch.stateful import SharedCounters


class Given:
    """Counts the batches of all watched loaders of this process."""

    batches = 0


@dataclass
class RestoredInput:
    """A state that a loader or its dataset has loaded, and the first iteration of it.

    Attributes:
        dataset: what has loaded the state; None: its loader has, which would keep itself by this.
        rows: how many rows of the epoch come before the state. None: unknown.
        shared: of this package's dataset; None: another dataset, whose epoch is unknown.
        random_state: what the random generators are set to before the first batch.
        batches: how many batches the iteration has given; None: it has not begun.
        is_used: the batches are trained: a step was saved, or may be.
    """

    dataset: Any
    state: object
    epoch: int = 0
    rows: int | None = None
    shared: SharedCounters | None = None
    random_state: JsonObject | None = None
    batches: int | None = None
    has_ended: bool = False
    is_used: bool = False

    def begin(self, loader: Any) -> bool:
        """Returns whether the iteration that begins has the state.

        An earlier iteration has taken the state. If it was dropped after its first batch, in the
        same epoch, the state is loaded again.
        """
        before = self.batches
        self.batches = 0
        if before is None:
            return True
        shared = self.shared
        if self.has_ended or (shared and shared.epoch_calls and shared.epoch != self.epoch):
            return False
        if before > 1 or self.is_used:
            rows = "the rows" if self.rows is None else f"{self.rows} rows"
            logger.warning(
                f"The first iteration over the restored loader was left after {before} batches. "
                f"Another repeats these, and {rows} before the restored step. Continue the first."
            )
            return False
        inner = getattr(loader, "base_dataloader", loader)
        inner._iterator = None  # its workers may persist, and have copies of the dataset
        target = loader if self.dataset is None else self.dataset
        target.load_state_dict(self.state)
        return True


@dataclass(eq=False)
class _Batches(Iterator[Any]):
    """No generator, which an error of a transform would end."""

    _batches: Any
    _restored: RestoredInput | None

    def __next__(self) -> object:
        restored = self._restored
        if restored is not None and restored.random_state and not restored.batches:
            from datatrove_ckpt.torch.random_state import set_random_state  # needs torch

            set_random_state(restored.random_state)
        try:
            batch = next(self._batches)
        except StopIteration:
            if restored is not None:
                restored.has_ended = True
            raise
        Given.batches += 1
        if restored is not None:
            restored.batches = (restored.batches or 0) + 1
        return batch

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> object:
        return getattr(self._batches, name)


def watch(loader: Any, restored: RestoredInput | None = None) -> None:
    if not hasattr(type(loader), "_restored"):  # a wrapper has its loader's attributes
        loader.__class__ = _watched(type(loader))
    loader._restored = restored


def note_use(restored: RestoredInput | None) -> None:
    """Notes that the batches which the loader has given are trained."""
    if restored is not None:
        restored.is_used = bool(restored.batches)


def _watched(kind: Any) -> Any:
    """Returns a subclass of a loader's class, in which ``_restored`` is what the loader has loaded,
    until an iteration begins without it.
    """

    class Watched(kind):  # type: ignore[misc]
        _restored: RestoredInput | None = None  # trainers make loaders of a loader's class

        def __iter__(self) -> Iterator[object]:
            if self._restored is not None and not self._restored.begin(self):
                self._restored = None
            return _Batches(super().__iter__(), self._restored)

        if hasattr(kind, "state_dict"):

            def state_dict(self) -> object:
                note_use(self._restored)
                return super().state_dict()

    Watched.__name__ = Watched.__qualname__ = kind.__name__
    return Watched
