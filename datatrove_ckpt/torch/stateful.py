"""The base of ``ReaderDataset``, ``Pack`` and ``Mix``: one iteration at a time, its state, and the
numbers that copies in workers share.

The state of a source must belong to its latest iterator, as in torchdata, whose StatefulDataLoader
needs iterable datasets of torch.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import WeakSet

from loguru import logger

from datatrove_ckpt.errors import CheckpointMismatch, CkptError, ConfigError
from datatrove_ckpt.readers.base import Stateful
from datatrove_ckpt.readers.inputs import ReaderState
from datatrove_ckpt.torch.states import Slot, check_checksums, check_settings, sealed

if TYPE_CHECKING:

    class _Iterable: ...

else:
    try:
        from torch.utils.data import IterableDataset as _Iterable
    except ImportError:
        _Iterable = object


class Source(Stateful, Protocol):
    def __iter__(self) -> Iterator[object]: ...


_WORKERS = 512
_NUMBERS = 6
# Flags of each worker, and of the process of the training loop.
_READ = 0
_TAKEN = 1
_ENDED = 2
_PASSED = 3


class _Number:
    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, shared: "SharedCounters", kind: type) -> int:
        return int(shared._numbers[self._place])

    def __set__(self, shared: "SharedCounters", number: int) -> None:
        shared._numbers[self._place] = number


class SharedCounters:
    """Numbers that a dataset and its copies in workers share, in shared memory with torch.

    A worker's copy of the dataset would not see later calls. In the methods, ``worker`` is the
    number of a worker; None is the process of the training loop.

    Attributes:
        workers_read: 1: workers have read samples since the last load.
        again: how many passes over the epoch have ended, in a loop without ``set_epoch``.
    """

    epoch = _Number(0)
    epoch_calls = _Number(1)
    loads = _Number(2)
    workers_read = _Number(3)
    again = _Number(4)
    has_warned = _Number(5)

    def __init__(self) -> None:
        self._numbers: Any = [0] * (_NUMBERS + 4 * (_WORKERS + 1))
        with suppress(ImportError):
            import torch

            self._numbers = torch.tensor(self._numbers, dtype=torch.int64).share_memory_()

    def __setstate__(self, state: ReaderState) -> None:
        self.__dict__ = state
        if not isinstance(self._numbers, list):
            self._numbers.share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.epoch_calls += 1
        self.again = 0

    def note_pass(self, worker: int | None) -> None:
        if not (worker or self.epoch_calls) and self.is_marked(_PASSED, worker):
            self._numbers[_cell(_PASSED, worker)] = 0
            self.again += 1

    def take_load(self, number: int, worker: int | None) -> bool:
        cell = _cell(_TAKEN, worker)
        if int(self._numbers[cell]) >= number:
            return False
        self._numbers[cell] = number
        return True

    def mark(self, flag: int, worker: int | None) -> None:
        self._numbers[_cell(flag, worker)] = self.epoch_calls + 1

    def is_marked(self, flag: int, worker: int | None) -> bool:
        return bool(self._numbers[_cell(flag, worker)] == self.epoch_calls + 1)


def _cell(flag: int, worker: int | None) -> int:
    position = _WORKERS if worker is None else worker % _WORKERS
    return _NUMBERS + flag * (_WORKERS + 1) + position


class Iteration(Iterator[object], Protocol):
    def state(self) -> ReaderState: ...


@dataclass(eq=False)
class _Samples(Iterator[object]):
    """The result of ``iter()``: the dataset sees when the caller drops it.

    No generator: an error of a transform would end it, and the rest of the epoch would be missing.
    """

    running: Iteration
    _shared: SharedCounters
    _worker: int | None
    _next: Callable[[], object] | None = None
    has_ended: bool = False

    def __next__(self) -> object:
        try:
            if self._next is not None:
                return self._next()
            sample = next(self.running)
        except StopIteration:
            self.has_ended = True
            self._shared.mark(_PASSED, self._worker)
            raise
        self._shared.mark(_READ, self._worker)
        if self._worker is not None:
            self._shared.workers_read = 1
        self._next = getattr(self.running, "iterator", self.running).__next__
        return sample


class StatefulIterable(_Iterable):
    shuffle_seed: int | None = None
    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._shared = SharedCounters()
        self._loaded: ReaderState | None = None
        """The next iteration resumes from it, once in each worker, as workers have copies."""
        self._load = 0
        self._seen_loads = 0
        self._running: Iteration | None = None
        self._begun = WeakSet[_Samples]()

    def _iteration(self, epoch: int, slot: Slot, state: ReaderState | None) -> Iteration:
        """The state may be of the end of the epoch before."""
        raise NotImplementedError

    def _state(self, running: Iteration) -> ReaderState:
        return running.state()

    def _start_state(self) -> ReaderState:
        raise ConfigError(
            f"This {type(self).__name__} was not iterated in this process, so it has no "
            "position. If a loader's workers read it, use the state_dict() of torchdata's "
            "StatefulDataLoader."
        )

    def _has_ended(self, state: ReaderState) -> bool:
        return bool(state["finished"])

    def made(self, state: ReaderState, workers: int) -> bool:
        """Returns whether a worker of this rank made the state in the current topology."""
        slot = state["slot"]
        return slot is None or slot == [self.rank, self.world_size, slot[2], workers]

    def check_state(self, state: ReaderState) -> None:
        """Raises the errors of ``load_state_dict``, and loads nothing."""
        check_checksums(state)

    def set_epoch(self, epoch: int) -> None:
        """Call this before each epoch."""
        self._shared.set_epoch(epoch)

    def at_epoch(self, epoch: int) -> Self:
        other = self._with()
        other._shared.set_epoch(epoch)
        return other

    def _with(self, **changes: object) -> Self:
        other = copy.copy(self)
        other._forget()
        vars(other).update(changes)
        return other

    def __getstate__(self) -> ReaderState:
        # Workers that are not forked iterate themselves.
        return self.__dict__ | {"_running": None, "_begun": None}

    def __setstate__(self, state: ReaderState) -> None:
        self.__dict__ = state | {"_begun": WeakSet()}

    def __iter__(self) -> Iterator[Any]:
        # No generator: torchdata calls state_dict() before the first sample, for the new iteration.
        number, workers = this_worker()
        if number is None:
            self._shared.workers_read = 0
        slot = Slot(self.rank, self.world_size, number or 0, workers)
        try:
            state = self._take_loaded(number)
            epoch = self._epoch_of(state, number, workers)
        except (CheckpointMismatch, ConfigError) as error:
            if number is None:
                raise
            # Raised here, it would end workers after seconds.
            self._running = NoSamples({}, error)
        else:
            self._running = self._iteration(epoch, slot, state)
        samples = _Samples(self._running, self._shared, number)
        self._begun.add(samples)
        return samples

    def _take_loaded(self, worker: int | None) -> ReaderState | None:
        if worker is not None and self._shared.loads > self._seen_loads:
            raise ConfigError(
                "A state was loaded after the loader had started its workers. Load it before the "
                "first epoch, or make a new loader."
            )
        state = self._loaded
        if worker is None or self._load < 0:
            self._loaded = None
        elif not self._shared.take_load(self._load, worker):
            return None
        return state

    def _epoch_of(self, state: ReaderState | None, number: int | None, workers: int) -> int:
        """Raises CheckpointMismatch if the state is of another epoch, or all workers have resumed
        at the end of an epoch, which would come once more. torchdata's loader drops an iterator
        that resumes there, and begins another.
        """
        shared = self._shared
        epoch = shared.epoch
        if state is None:
            numbers = [None] if number is None else range(workers)
            if shared.epoch_calls and all(shared.is_marked(_ENDED, each) for each in numbers):
                raise CheckpointMismatch(
                    f"The state is of the end of epoch {epoch}, and set_epoch({epoch}) was "
                    f"called, which would repeat it. Start the loop of epochs at {epoch + 1}, "
                    "and call set_epoch before each."
                )
            shared.note_pass(number)
            is_known = number or shared.has_warned or self.shuffle_seed is None
            if not is_known and shared.is_marked(_READ, number):
                shared.has_warned = 1
                logger.warning(
                    f"Epoch {epoch} begins again, in the same order as before. Call "
                    "set_epoch(epoch) before each epoch."
                )
            return epoch
        saved_epoch = int(state["epoch"])
        has_ended = self._has_ended(state)
        if shared.epoch_calls and epoch != saved_epoch:
            if has_ended and epoch == saved_epoch + 1:
                return epoch
            raise CheckpointMismatch(
                f"The state is of epoch {saved_epoch}, and set_epoch({epoch}) was called. Start "
                f"the loop of epochs at {saved_epoch}, or start epoch {epoch} without the state."
            )
        shared.epoch = saved_epoch
        if has_ended:
            shared.mark(_ENDED, number)
        return saved_epoch

    def state_dict(self) -> ReaderState:
        """Returns the position of the latest iteration. Plain JSON.

        Raises:
            ConfigError: workers of a loader read the samples, and only they know their positions;
                or there are two iterations at once; or a ``Pack`` or ``Mix`` was not read at all.
        """
        if this_worker()[0] is None and self._shared.workers_read:
            raise ConfigError(
                "The DataLoader's workers read the samples, so this dataset has no position. Use "
                "torchdata's StatefulDataLoader, and save loader.state_dict() instead of "
                "dataset.state_dict()."
            )
        if self._running is not None:
            begun = (samples.running for samples in self._begun if not samples.has_ended)
            if any(running is not self._running for running in begun):
                raise ConfigError(
                    f"There are two iterations at once over one {type(self).__name__}, and only "
                    "the second has a position. Give each loader its own dataset, and drop "
                    "iterators that are not needed."
                )
            return sealed(self._state(self._running))
        if self._loaded is not None:
            return self._loaded
        return sealed(self._start_state())

    def load_state_dict(self, state_dict: ReaderState) -> None:
        """Lets the next iteration resume at a state of this rank.

        Raises:
            CheckpointCorrupt: the state is damaged.
            CheckpointMismatch: the state is of another class, release, order, setting or input.
                Another epoch or worker is found when the iteration begins.
        """
        self.check_state(state_dict)
        self._loaded = state_dict
        self._load = -1
        if this_worker()[0] is None:
            self._shared.loads += 1
            self._shared.workers_read = 0
            self._load = self._shared.loads
        self._seen_loads = self._shared.loads
        self._running = None
        self._begun.clear()


_VERSION = 2


class StatefulWrapper(StatefulIterable):
    """An iterable of other iterables, whose state belongs to one worker of a loader.

    Raises:
        ConfigError: a source is not stateful.
    """

    _names_of_options: Sequence[str]
    """The settings that a state belongs to."""

    def __init__(self, sources: Sequence[Source]) -> None:
        super().__init__()
        for number, source in enumerate(sources):
            refuse_shuffled(source)
            if not isinstance(source, Stateful):
                raise ConfigError(
                    f"Source {number} of {type(self).__name__} ({type(source).__name__}) has no "
                    "state_dict and load_state_dict. Use a ReaderDataset, or another iterable "
                    "with a state."
                )
            shared: Any = getattr(source, "dataset", source)
            if (getattr(shared, "world_size", None) or 1) > self.world_size:
                self.rank = shared.rank
                self.world_size = shared.world_size
        self._sources: list[Any] = list(sources)

    def _options(self) -> ReaderState:
        return {name: getattr(self, name) for name in self._names_of_options}

    def _source_states(self, state: ReaderState) -> list[ReaderState | None]:
        """None: the source had ended."""
        return [source["state"] for source in state.get("sources", [])]

    def _new_pass(self, epoch: int, slot: Slot, state: ReaderState | None) -> Iteration:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        for source in self._sources:
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)

    def at_epoch(self, epoch: int) -> Self:
        other = super().at_epoch(epoch)
        other._sources = [at_epoch(source, epoch) for source in self._sources]
        return other

    def _iteration(self, epoch: int, slot: Slot, state: ReaderState | None) -> Iteration:
        self._epoch = epoch
        self._slot = slot
        if state is None or state["epoch"] != epoch:
            return self._new_pass(epoch, slot, None)
        if state["slot"] is not None and Slot(*state["slot"]) != slot:
            raise CheckpointMismatch(
                f"The state of {type(self).__name__} was made by {Slot(*state['slot'])}, and "
                f"this is {slot}. Resume each rank with its own state, world_size and "
                "num_workers, or give the states of all ranks to "
                "datatrove_ckpt.torch.restore(loader, states)."
            )
        if state["finished"]:
            return NoSamples(state)
        return self._new_pass(epoch, slot, state)

    def _state(self, running: Iteration) -> ReaderState:
        head = {"kind": type(self).__name__, "version": _VERSION, "options": self._options()}
        head |= {"epoch": self._epoch, "slot": list(self._slot)}
        return {"finished": False} | running.state() | head

    def check_state(self, state: ReaderState) -> None:
        super().check_state(state)
        name = type(self).__name__
        if state.get("kind") != name or state.get("version") != _VERSION:
            raise CheckpointMismatch(
                f"This is no state of {name} (version {_VERSION}): it says {state.get('kind')!r} "
                f"(version {state.get('version')}). Load it into what made it, or restart the "
                "epoch without it."
            )
        check_settings(state["options"], self._options())
        for source, its in self._sources_with(state):
            if hasattr(source, "check_state"):
                source.check_state(its)

    def made(self, state: ReaderState, workers: int) -> bool:
        return super().made(state, workers) and all(
            isinstance(source, StatefulIterable) and source.made(its, workers)
            for source, its in self._sources_with(state)
        )

    def _sources_with(self, state: ReaderState) -> list[tuple[Source, ReaderState]]:
        pairs = zip(self._sources, self._source_states(state), strict=False)
        return [(source, its) for source, its in pairs if its is not None]


@dataclass(eq=False)
class NoSamples(Iterator[object]):
    """An iteration at its end, or with an error at its first sample."""

    _state: ReaderState
    _error: CkptError | None = None

    def __next__(self) -> object:
        raise self._error or StopIteration

    def state(self) -> ReaderState:
        return self._state


def end_state(source: Source) -> ReaderState | None:
    """Returns None for foreign sources: their state may be of their next epoch."""
    if not hasattr(source, "check_state"):
        return None
    return source.state_dict()


def is_counted(source: object) -> bool:
    """Whether all rows are counted, so that the states of all ranks can be merged."""
    if isinstance(source, StatefulWrapper):
        return all(map(is_counted, source._sources))
    return isinstance(source, StatefulIterable)


def refuse_shuffled(source: object) -> None:
    """Raises ConfigError for a shuffled stream of ``datasets``, also in a loader: its state lacks
    the rows in its buffer.
    """
    parts = [source]
    for part in parts:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            raise ConfigError(
                "A shuffled stream of datasets loses the rows in its buffer at each resume. Use "
                "ReaderDataset.from_folder(...).shuffle(seed=0), or shuffle before streaming."
            )
        names = ("dataset", "_ex_iterable", "ex_iterable")
        inner = [getattr(part, name, None) for name in names] + getattr(part, "ex_iterables", [])
        parts += [wrapped for wrapped in inner if wrapped is not None]


def refuse_begun(loader: object) -> None:
    """Raises ConfigError for a loader of torchdata, or a loader with persistent workers, that has
    begun: its iterator would not see a state.
    """
    if vars(loader).get("_iterator") is not None:
        raise ConfigError(
            "The loader has begun, so nothing would be restored. Restore before the first "
            "iter(loader) and loader.state_dict(), or make a new loader."
        )


def at_epoch(source: Source, epoch: int) -> Source:
    """Makes a copy if possible, because others may read the original's number."""
    if isinstance(source, StatefulIterable):
        return source.at_epoch(epoch)
    if hasattr(source, "set_epoch"):
        source.set_epoch(epoch)
    return source


def this_worker() -> tuple[int | None, int]:
    """Returns number and count of a loader's workers; (None, 1) outside of them."""
    with suppress(ImportError):
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        if worker is not None:
            return worker.id, worker.num_workers
    return None, 1
