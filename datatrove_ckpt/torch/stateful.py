"""What ``ReaderDataset``, ``Pack`` and ``Mix`` share: one iteration at a time, its state, what copies in workers see.

``Pack`` and ``Mix`` are wrappers: iterables around other iterables, whose state holds the states of those.

A source is any iterable with ``state_dict`` and ``load_state_dict``: a ``ReaderDataset``, a ``Pack`` or ``Mix``, a
streaming dataset of Hugging Face, a loader. Its state must be the one of its latest iterator, as torchdata has it.

Without torch all of these are plain iterables. With torch they are iterable datasets: torchdata's StatefulDataLoader
asks for that class.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import ref

from datatrove_ckpt.errors import CheckpointMismatch, CkptError, ConfigError
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.torch.seals import check_seals, sealed
from datatrove_ckpt.torch.states import Slot

if TYPE_CHECKING:

    class _Iterable: ...

else:
    try:
        from torch.utils.data import IterableDataset as _Iterable
    except ImportError:
        _Iterable = object


class Handle(Iterator[Any]):
    """What the caller of ``iter()`` gets, so that its dataset sees when nobody has it any more."""

    __slots__ = ("__weakref__", "_next", "_note_read", "_samples", "has_ended")

    def __init__(self, samples: Iterator[Any], note_read: Callable[[], None]) -> None:
        self._samples = samples
        self._note_read = note_read
        self._next: Callable[[], Any] | None = None  # before the first sample
        self.has_ended = False

    def __next__(self) -> Any:
        try:
            if self._next is None:
                return self._first()
            return self._next()
        except StopIteration:
            self.has_ended = True
            raise

    def _first(self) -> Any:
        sample = next(self._samples)
        self._note_read()
        self._next = getattr(self._samples, "rest", self._samples).__next__
        return sample


class Iterations:
    """The iterations over one dataset, in one process."""

    def __init__(self) -> None:
        self._begun: list[ref[Handle]] = []

    def begin(self, samples: Iterator[Any], note_read: Callable[[], None]) -> Handle:
        """``note_read`` is called with the first sample."""
        handle = Handle(samples, note_read)
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
        handles = [(reference, reference()) for reference in self._begun[:before]]
        return [reference for reference, handle in handles if handle is not None and not handle.has_ended]

    def __reduce__(self) -> tuple[type[Iterations], tuple[()]]:
        return Iterations, ()  # copies in workers iterate themselves


_CELLS = 512
_EPOCH = 0
_EPOCH_CALLS = 1
_LOADS = 2
_WARNED = 3
_WORKERS_READ = 4
_PER_WORKER = 5
# Of each worker, and of the process of the training loop.
_READ = 0
_TAKEN = 1
_ENDED = 2


class Shared:
    """Numbers that a dataset and its copies in workers see alike: in shared memory where torch is there.

    A worker has a copy of the dataset, made when its loader started it: it does not see what happens to the original,
    and the original does not see what the worker reads.

    ``worker`` is the number of a worker, or None for the process of the training loop.
    """

    def __init__(self) -> None:
        self._numbers: Any = [0] * (_PER_WORKER + 3 * (_CELLS + 1))
        with suppress(ImportError):
            import torch

            self._numbers = torch.tensor(self._numbers, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._numbers[_EPOCH])

    @property
    def epoch_was_set(self) -> bool:
        return bool(self._numbers[_EPOCH_CALLS])

    def set_epoch(self, epoch: int) -> None:
        self._numbers[_EPOCH] = epoch
        self._numbers[_EPOCH_CALLS] += 1

    def adopt_epoch(self, epoch: int) -> None:
        """Takes the epoch of a state, in a loop that has never called ``set_epoch``."""
        self._numbers[_EPOCH] = epoch

    def note_read(self, worker: int | None) -> None:
        """A sample was taken in the current epoch."""
        self._mark(_READ, worker)
        if worker is not None:
            self._numbers[_WORKERS_READ] = 1

    def epoch_begins_again(self, worker: int | None) -> bool:
        """Whether samples of the current epoch were taken before, and nobody was warned yet."""
        if worker or self._numbers[_WARNED] or not self._is_marked(_READ, worker):
            return False
        self._numbers[_WARNED] = 1
        return True

    def note_resumed_at_end(self, worker: int | None) -> None:
        """A state of the end of the current epoch was resumed: nothing is left of the epoch."""
        self._mark(_ENDED, worker)

    def comes_again(self, owner: object, epoch: int, worker: int | None, workers: int) -> CheckpointMismatch | None:
        """The error, if all workers have done that in the current epoch, and all of it would be given once more."""
        numbers = [None] if worker is None else range(workers)
        if not self.epoch_was_set or not all(self._is_marked(_ENDED, number) for number in numbers):
            return None
        return CheckpointMismatch(
            f"The state of {type(owner).__name__} is of the end of epoch {epoch}, and set_epoch({epoch}) was called: "
            f"all of the epoch would come again. Start the loop of epochs at {epoch + 1}, and call set_epoch before "
            "each."
        )

    @property
    def workers_read(self) -> bool:
        return bool(self._numbers[_WORKERS_READ])

    def forget_workers(self) -> None:
        """The process of the training loop reads itself from now on."""
        self._numbers[_WORKERS_READ] = 0

    @property
    def loads(self) -> int:
        """How many states the process of the training loop has loaded."""
        return int(self._numbers[_LOADS])

    def note_load(self) -> int:
        self._numbers[_LOADS] += 1
        self.forget_workers()
        return self.loads

    def take_load(self, number: int, worker: int | None) -> bool:
        """True once for each worker and load: the worker resumes there, and in the next epoch it does not."""
        cell = _cell(_TAKEN, worker)
        if int(self._numbers[cell]) >= number:
            return False
        self._numbers[cell] = number
        return True

    def _mark(self, what: int, worker: int | None) -> None:
        """In the current epoch."""
        self._numbers[_cell(what, worker)] = self._numbers[_EPOCH_CALLS] + 1

    def _is_marked(self, what: int, worker: int | None) -> bool:
        return bool(self._numbers[_cell(what, worker)] == self._numbers[_EPOCH_CALLS] + 1)


def _cell(what: int, worker: int | None) -> int:
    place = _CELLS if worker is None else worker % _CELLS
    return _PER_WORKER + what * (_CELLS + 1) + place


_LOADED_TOO_LATE = (
    "A state was loaded into the dataset after the loader had started its workers, which have copies. Load it before "
    "the first epoch, or make a new loader."
)


class Loaded:
    """The state that the next iteration resumes from, once in each worker: these have copies of it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._number = 0
        self.state: State | None = None

    def put(self, state: State) -> None:
        self.state = state
        self._number = -1
        if this_worker()[0] is None:
            self._number = self._shared.note_load()

    def take(self, worker: int | None) -> State | None:
        """Raises ConfigError if the workers were there before the state."""
        if worker is not None and self._shared.loads > self._number >= 0:
            raise ConfigError(_LOADED_TOO_LATE)
        state = self.state
        if state is None or worker is None or self._number < 0:
            self.state = None
            return state
        if self._shared.take_load(self._number, worker):
            return state
        return None


class Iteration(Iterator[Any], Protocol):
    """One pass over a dataset."""

    finished: bool
    """Whether the end was reached: the next state begins nothing."""

    def state(self) -> State:
        """The position after the latest sample."""


class StatefulIterable(_Iterable):
    """An iterable whose position can be saved and restored."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """As before the first iteration. A copy calls it, so that it shares nothing with the original."""
        self._shared = Shared()
        self._loaded = Loaded(self._shared)
        self._running: Any = None
        self._iterations = Iterations()

    @abstractmethod
    def _begin(self, number: int | None, workers: int) -> Any:
        """Starts an iteration, or resumes it. ``number``: of this worker; None: the loop itself reads."""

    @abstractmethod
    def _state(self) -> State:
        """The position of the latest iteration."""

    @abstractmethod
    def _start_state(self) -> State:
        """The position before any iteration."""

    @abstractmethod
    def check_state(self, state: State) -> None:
        """Raises what ``load_state_dict`` does, and loads nothing."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch."""

    def at_epoch(self, epoch: int) -> Self:
        """A copy that begins this epoch. Later calls of ``set_epoch`` and ``load_state_dict`` do not reach it."""
        other = copy.copy(self)
        other._forget()
        other.set_epoch(epoch)
        return other

    def __getstate__(self) -> dict[str, Any]:
        # For workers that are not forked. They iterate themselves.
        return self.__dict__ | {"_running": None}

    def __iter__(self) -> Iterator[Any]:
        # Not a generator: torchdata calls state_dict() before the first sample, and must get the new iteration's state.
        number, workers = this_worker()
        self._running = self._begin(number, workers)
        return self._iterations.begin(self._running, lambda: self._shared.note_read(number))

    def state_dict(self) -> State:
        """The position of the latest iteration. Plain JSON.

        Raises:
            ConfigError: the samples were read by workers of a loader, and only they know how far they are; or there are
                two iterations at once; or a ``Pack`` or ``Mix`` was not read at all.
        """
        if this_worker()[0] is None and self._shared.workers_read:
            raise ConfigError(
                "The workers of the DataLoader read the samples, and the dataset here does not know how far they are. "
                "Use StatefulDataLoader of torchdata.stateful_dataloader, and save loader.state_dict() instead of "
                "dataset.state_dict()."
            )
        if self._running is not None:
            self._iterations.check(self)
            return sealed(self._state())
        if self._loaded.state is not None:
            return self._loaded.state
        return sealed(self._start_state())

    def load_state_dict(self, state_dict: State) -> None:
        """Lets the next iteration resume there: with a state of this rank, or with one of all ranks (``merge``).

        Raises:
            CheckpointCorrupt: the state is damaged.
            CheckpointMismatch: the state is of another class, release, order, setting or input. That it belongs to
                another epoch or worker is found when the iteration begins.
        """
        self.check_state(state_dict)
        self._loaded.put(state_dict)
        self._running = None
        self._iterations.forget()


_VERSION = 2
_REMEDY = "Restore the setting, or start the epoch again without the state."


class StatefulWrapper(StatefulIterable):
    """An iterable of other iterables, whose state holds the states of those.

    A state belongs to one worker of a loader: each worker has a part of the data, and so a state of its own. ``merge``
    makes one of those of all workers, if the sources are datasets whose rows are counted, or wrappers of these.

    Raises:
        ConfigError: a source is not stateful.
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        super().__init__()
        for number, source in enumerate(sources):
            missing = [name for name in ("__iter__", "state_dict", "load_state_dict") if not hasattr(source, name)]
            if missing:
                raise ConfigError(
                    f"Source {number} of {type(self).__name__} ({type(source).__name__}) has no "
                    f"{' and no '.join(missing)}: its position cannot be saved. Use a ReaderDataset, or another "
                    "iterable with a state."
                )
        self._sources = list(sources)
        self._epoch = 0
        self._slot = Slot(0, 1, 0, 1)
        """Of the latest iteration, as ``_epoch``."""

    @abstractmethod
    def _options(self) -> State:
        """The settings that a state belongs to. Plain JSON."""

    @abstractmethod
    def _source_states(self, state: State) -> list[State | None]:
        """The states of the sources, in their order. None: that of one that had ended."""

    @abstractmethod
    def _iteration(self, epoch: int, slot: Slot, state: State | None) -> Iteration:
        """Starts an iteration, or resumes it."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch, for the sources, too. Call it before each epoch."""
        self._shared.set_epoch(epoch)
        for source in self._sources:
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)

    def at_epoch(self, epoch: int) -> Self:
        """A copy that begins this epoch, as do copies of the sources."""
        other = copy.copy(self)
        other._forget()
        other._shared.set_epoch(epoch)
        other._sources = [at_epoch(source, epoch) for source in self._sources]
        return other

    def _begin(self, number: int | None, workers: int) -> Iteration:
        if number is None:
            self._shared.forget_workers()
        rank, ranks = place_of(self) or (0, 1)
        slot = Slot(rank, ranks, number or 0, workers)
        epoch, iteration = self._begin_or_resume(number, slot)
        self._epoch = epoch
        self._slot = slot
        return iteration

    def _begin_or_resume(self, number: int | None, slot: Slot) -> tuple[int, Iteration]:
        epoch = self._shared.epoch
        try:
            state = self._loaded.take(number)
        except ConfigError as error:
            return epoch, NoSamples(error)  # raised here, it would end the workers only after seconds
        if state is not None and state["finished"] and epoch > state["epoch"]:
            state = None  # of the end of an epoch before
        if state is None:
            again = self._shared.comes_again(self, epoch, number, slot.workers)
            if again is not None:
                return epoch, NoSamples(again)
            return epoch, self._iteration(epoch, slot, None)
        self._check_place(state, epoch, slot)
        epoch = int(state["epoch"])
        if state["finished"]:
            self._shared.note_resumed_at_end(number)
            return epoch, NoSamples(state=state)
        return epoch, self._iteration(epoch, slot, state)

    def _start_state(self) -> State:
        raise ConfigError(
            f"This {type(self).__name__} was not iterated in this process, so it has no position. If workers of a "
            "loader read it, use torchdata's StatefulDataLoader, and its state_dict()."
        )

    def _state(self) -> State:
        # The iteration's state comes first: it may notice that it has finished.
        state: State = self._running.state()
        head = {"kind": type(self).__name__, "version": _VERSION, "options": self._options()}
        head |= {"epoch": self._epoch, "slot": list(self._slot), "finished": self._running.finished}
        return head | state

    def check_state(self, state: State) -> None:
        """Raises what ``load_state_dict`` does, and loads nothing."""
        check_seals(state)
        name = type(self).__name__
        if state.get("kind") != name or state.get("version") != _VERSION:
            raise CheckpointMismatch(
                f"This is no state of {name} (version {_VERSION}): it says {state.get('kind')!r} (version "
                f"{state.get('version')}). Load it into what made it, or start the epoch again without it."
            )
        then = state["options"]
        for key, now in self._options().items():
            if then.get(key) != now:
                raise CheckpointMismatch(
                    f"The state of {name} was made with {key}={then.get(key)!r}, now {now!r}. {_REMEDY}"
                )
        for source, its in self._sources_with(state):
            if hasattr(source, "check_state"):
                source.check_state(its)

    def made(self, state: State, workers: int) -> bool:
        """Whether a worker of this rank made the state, with as many ranks and ``workers`` as there are now."""
        if state["slot"] is None:
            return True  # of all workers
        rank, ranks = place_of(self) or (0, 1)
        is_own = state["slot"] == [rank, ranks, state["slot"][2], workers]
        return is_own and all(source.made(its, workers) for source, its in self._sources_with(state))

    def _sources_with(self, state: State) -> list[tuple[Any, State]]:
        found = zip(self._sources, self._source_states(state), strict=False)
        return [(source, its) for source, its in found if its is not None]

    def _check_place(self, state: State, epoch: int, slot: Slot) -> None:
        name = type(self).__name__
        if self._shared.epoch_was_set and epoch != state["epoch"]:
            raise CheckpointMismatch(
                f"The state of {name} was made in epoch {state['epoch']}, and set_epoch said {epoch}. Continue with "
                f"epoch {state['epoch']}, or start epoch {epoch} without the state."
            )
        if state["slot"] is not None and Slot(*state["slot"]) != slot:
            raise CheckpointMismatch(
                f"The state of {name} was made by {Slot(*state['slot'])}, and this is {slot}. Resume with the same "
                "world_size and num_workers, and each rank with its own state, or give the states of all ranks to "
                "datatrove_ckpt.torch.restore(loader, states)."
            )


class NoSamples(Iterator[Any]):
    """An iteration that was at its end when its state was saved, or that may not begin.

    The error comes at the first sample: earlier, a worker could not report it.
    """

    def __init__(self, error: CkptError | None = None, state: State | None = None) -> None:
        self.finished = error is None
        self._error = error or StopIteration()
        self._state = {key: value for key, value in (state or {}).items() if key not in _HEAD}

    def __next__(self) -> Any:
        raise self._error

    def state(self) -> State:
        return self._state


_HEAD = ("kind", "version", "options", "epoch", "slot", "finished")


def end_state(source: Any) -> State | None:
    """The state of a source at its end. None: it is none of ours, whose state may be that of its next epoch."""
    if not hasattr(source, "check_state"):
        return None
    state: State = source.state_dict()
    return state


def place_of(source: Any) -> tuple[int, int] | None:
    """Rank and world size of what a source reads. None: it does not say."""
    source = getattr(source, "dataset", source)  # of a loader
    if isinstance(source, StatefulWrapper):
        places = map(place_of, source._sources)
        return next((place for place in places if place is not None), None)
    rank = getattr(source, "rank", None)
    ranks = getattr(source, "world_size", None)
    if isinstance(rank, int) and isinstance(ranks, int):
        return rank, ranks
    return None


def at_epoch(source: Any, epoch: int) -> Any:
    """The source at this epoch: a copy where it can make one, because others may read the original's number."""
    if hasattr(source, "at_epoch"):
        return source.at_epoch(epoch)
    if hasattr(source, "set_epoch"):
        source.set_epoch(epoch)
    return source


def this_worker() -> tuple[int | None, int]:
    """The number of this worker of a torch loader, and how many there are; (None, 1) outside of workers."""
    try:
        from torch.utils.data import get_worker_info
    except ImportError:
        return None, 1
    worker = get_worker_info()
    if worker is None:
        return None, 1
    return worker.id, worker.num_workers
