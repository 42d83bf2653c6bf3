"""Checks states of ``ReaderDataset``, and merges the states of all ranks into one for any topology.

A worker's state has its position in the epoch (``slot`` and ``samples``), the order, the input, and
what other topologies have read before (``done``).

A ``Pack`` or ``Mix`` has the merged states of its sources, and the rests of its packers, or the sum
of its draws.

Each state of a ``ReaderDataset``, ``Pack`` or ``Mix`` has a checksum of its other values, so that a
damaged state is an error and never gives other samples. States without one are accepted: states of
earlier releases, and of foreign sources with values that orjson does not write.
"""

import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import NamedTuple, TypeVar

import orjson
from loguru import logger
from xxhash import xxh3_64_hexdigest

from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch, ConfigError
from datatrove_ckpt.readers.inputs import ReaderState
from datatrove_ckpt.torch.order import ConsumedRound, Even, RemainingPositions, Topology

_KEY = "checksum"
_CHECKSUM = "xxo:"
REMEDY = "Give the state of the step before, of all ranks."


def sealed(state: ReaderState) -> ReaderState:
    """Adds the checksum, which survives JSON and ``torch.save``."""
    values = {key: value for key, value in state.items() if key != _KEY}
    with suppress(TypeError):  # an integer of more than 64 bits
        options = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
        content = orjson.dumps(values, _plain, options)
        values[_KEY] = _CHECKSUM + xxh3_64_hexdigest(content)
    return values


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float):
        return float(value)
    return type(value).__name__


def check_checksums(value: object, name: str = "") -> None:
    """Raises CheckpointCorrupt if a state in ``value``, of the file ``name``, has changed."""
    for state in find_states(value, lambda each: str(each.get(_KEY)).startswith(_CHECKSUM)):
        if sealed(state).get(_KEY) != state[_KEY]:
            source = f" in {name!r}" if name else ""
            raise CheckpointCorrupt(
                f"The state{source} is damaged: its checksum is wrong. {REMEDY}"
            )


def load_file(state: ReaderState | str | PathLike[str]) -> object:
    """Returns a state, or loads a file of ``torch.save``.

    Raises:
        CheckpointCorrupt: the state or the file is damaged.
        OSError: the file cannot be opened.
    """
    if not isinstance(state, str | PathLike):
        check_checksums(state)
        return state
    import torch

    with Path(state).open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:  # torch compares no checksums
                damaged = archive.testzip()
            if damaged:
                raise ValueError(f"{damaged} has another checksum")
            file.seek(0)
            value: object = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointCorrupt(
                f"The file {str(state)!r} is damaged, not written by torch.save, or holds more "
                f"than torch.load(weights_only=True) takes ({failure_line(error)[:200]}). "
                f"{REMEDY}"
            ) from error
    check_checksums(value, str(state))
    return value


def find_states(value: object, matches: Callable[[ReaderState], bool]) -> Iterator[ReaderState]:
    if isinstance(value, dict) and matches(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_states(item, matches)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from find_states(item, matches)


_T = TypeVar("_T")

VERSION = 3
_KIND = "datatrove_ckpt.ReaderDataset"


class Slot(NamedTuple):
    """One worker of one rank. ``worker`` is 0 of 1 if the rank reads itself."""

    rank: int
    world_size: int
    worker: int
    workers: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of world_size={self.world_size}, worker {self.worker} of "
            f"num_workers={self.workers}"
        )


@dataclass(frozen=True)
class DatasetState:
    """The content of a state.

    Attributes:
        slot: the worker that made it; None: a merged state.
        skipped: how many of these rows were no samples.
    """

    epoch: int
    order: ReaderState
    input: ReaderState
    done: tuple[ConsumedRound, ...] = ()
    slot: Slot | None = None
    samples: int = 0
    skipped: int = 0
    batch: int = 1
    even: Even = None
    ended: bool = False

    @property
    def topology(self) -> Topology | None:
        return self.slot and Topology(self.slot.world_size, self.slot.workers, self.batch)

    @property
    def made_by(self) -> str:
        return f"{self.slot}, batch_size={self.batch}, even={self.even!r}"

    def to_json(self) -> ReaderState:
        done = [each.to_json() for each in self.done]
        slot = self.slot and list(self.slot)
        return {"kind": _KIND, "version": VERSION, **vars(self), "done": done, "slot": slot}

    @classmethod
    def from_json(cls, state: ReaderState) -> "DatasetState":
        """Raises CheckpointMismatch if the state is of another version, CheckpointCorrupt if it is
        damaged.
        """
        if state.get("version") != VERSION or state.get("kind") != _KIND:
            raise CheckpointMismatch(
                f"The state is of version {state.get('version')!r} of "
                f"{state.get('kind') or 'an unknown dataset'}, "
                f"and this release reads version {VERSION} of {_KIND}. Resume with the release "
                "that made it."
            )
        values = {
            key: value for key, value in state.items() if key not in ("kind", "version", "checksum")
        }
        if values.keys() != {field.name for field in fields(cls)}:
            raise CheckpointCorrupt(
                f"The state is damaged: its keys are not those of version {VERSION}. {REMEDY}"
            )
        values["done"] = tuple(ConsumedRound.from_json(each) for each in state["done"])
        values["slot"] = state["slot"] and Slot(*state["slot"])
        return cls(**values)

    def has_ended(self) -> bool:
        if self.slot is None:
            return self.ended
        return self.samples >= self.rows_of(self.slot)

    def rows_of(self, slot: Slot) -> int:
        topology = Topology(slot.world_size, slot.workers, self.batch)
        remaining = RemainingPositions(self.input["rows"], self.done).rows
        return topology.of_worker(remaining, slot.rank, slot.worker, self.even)


def check_settings(saved: ReaderState, current: ReaderState) -> None:
    for key in current:
        if saved.get(key) != current[key]:
            raise CheckpointMismatch(
                f"The state was made with {key}={saved.get(key)!r}, now {current[key]!r}. "
                "Restore the setting, or restart the epoch without the state."
            )


def is_state(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("kind") == _KIND


def check_same(
    states: Sequence[_T], keys: Iterable[str], get: Callable[[_T, str], object] = getattr
) -> None:
    for key in keys:
        values = list({str(get(state, key)): None for state in states})
        if len(values) > 1:
            old, new = (value[:200] for value in values[:2])
            raise CheckpointMismatch(
                f"The states are of different runs: {key} is {old} and {new}. Give states that "
                "the ranks saved at the same step."
            )


def in_order(slots: Sequence[Slot], states: Sequence[_T]) -> dict[Slot, _T]:
    """Sorts the states of all slots: all ranks' first workers, then all ranks' second workers.
    Ranks that read the same rows, as with tensor parallelism, have equal states.

    Raises:
        CheckpointMismatch: a state is missing, or two of one slot differ.
    """
    by_slot: dict[Slot, _T] = {}
    for slot, state in zip(slots, states, strict=True):
        if by_slot.setdefault(slot, state) != state:
            raise CheckpointMismatch(
                f"There are two states of {slot}. Give one state of each rank."
            )
    _, ranks, _, workers = slots[0]
    ordered = {}
    for number in range(ranks * workers):
        slot = Slot(number % ranks, ranks, number // ranks, workers)
        if slot not in by_slot:
            raise CheckpointMismatch(
                f"The state of {slot} is missing. Give the states of all ranks."
            )
        ordered[slot] = by_slot[slot]
    return ordered


def merge_states(states: Sequence[DatasetState], alone: bool) -> DatasetState:
    """Merges the slots' states.

    Args:
        alone: the loaders read these datasets, so all ranks of a step had equally many samples.
    """
    first = states[0]
    check_same(states, ("epoch", "order", "input", "done", "topology", "even"))
    if first.slot is None or first.topology is None:
        return first
    by_slot = in_order([state.slot for state in states if state.slot], states)
    states = [*by_slot.values()]
    ended = [state.has_ended() for state in states]
    if alone:
        samples = [state.samples - state.skipped for state in states]
        check_steps(by_slot, samples, ended, first.batch)
    done = (*first.done, ConsumedRound(first.topology, tuple(state.samples for state in states)))
    return replace(
        first, done=done, slot=None, samples=0, skipped=0, batch=1, even=None, ended=all(ended)
    )


def check_steps(
    slots: Iterable[Slot], samples: Sequence[int], ended: Sequence[bool], batch: int = 1
) -> None:
    """Raises CheckpointMismatch if ranks that have not ended are a batch or more apart.

    Without ``batch_size`` the batches of the loader are not known, and a difference is a warning.
    """
    sums = Counter[int]()
    over = set[int]()
    for slot, count, has_ended in zip(slots, samples, ended, strict=True):
        sums[slot.rank] += count
        if has_ended:
            over.add(slot.rank)
    counts = [(sums[rank], rank) for rank in sums.keys() - over]
    if not counts:
        return
    low, low_rank = min(counts)
    high, high_rank = max(counts)
    if high - low < batch:
        return
    problem = (
        f"The ranks' states are of different steps: rank {low_rank} had {low} samples, rank "
        f"{high_rank} had {high}."
    )
    if batch > 1:
        raise CheckpointMismatch(
            f"{problem} Give the states that all ranks saved at the same step."
        )
    logger.warning(f"{problem} Samples may be trained twice, or never.")


_SINCE_SNAPSHOT = "_steps_since_snapshot"


def check_snapshots(value: object) -> None:
    """Raises CheckpointMismatch if a loader's state is newer than the states of its workers in it.

    Only torchdata's loader can resume there: it drops the batches that it has given since.
    """
    for state in find_states(value, lambda candidate: candidate.get(_SINCE_SNAPSHOT, 0) > 0):
        raise CheckpointMismatch(
            f"A loader has saved its state {state[_SINCE_SNAPSHOT]} steps after its snapshot, so "
            "its workers' positions are unknown. Use StatefulDataLoader's defaults "
            "snapshot_every_n_steps=1 and in_order=True, or resume with as many ranks and "
            "workers."
        )


def is_ours(value: object) -> bool:
    return is_state(value) or (
        isinstance(value, Mapping) and {"kind", "options", "slot"} <= value.keys()
    )


def merge_all(states: Sequence[ReaderState | None], alone: bool = True) -> ReaderState:
    if not states:
        raise ConfigError(
            "None of these is a state of a ReaderDataset, Pack or Mix. Give the loaders' "
            "state_dict()."
        )
    known_states = [state for state in states if state is not None and is_ours(state)]
    if len(known_states) < len(states):
        raise CheckpointMismatch(
            "A source of Pack or Mix is no ReaderDataset with counted rows. Use "
            "loader.load_state_dict() with this rank's state, and as many ranks and workers."
        )
    check_same(known_states, ("kind", "options", "epoch"), ReaderState.get)
    if is_state(known_states[0]):
        return merge_states(
            [DatasetState.from_json(state) for state in known_states], alone
        ).to_json()
    return _merge_wrappers(known_states, alone)


def _merge_wrappers(states: Sequence[ReaderState], alone: bool) -> ReaderState:
    first = states[0]
    if first["slot"] is None:
        check_same(states, first, ReaderState.get)
        return first
    by_slot = in_order([Slot(*(state["slot"] or (0, 1, 0, 0))) for state in states], states)
    states = [*by_slot.values()]
    ended = [bool(state["finished"]) for state in states]
    if alone:
        samples = [int(state.get("given") or state.get("drawn") or 0) for state in states]
        check_steps(by_slot, samples, ended)
    merged = {key: first[key] for key in ("kind", "version", "options", "epoch")}
    merged |= {"slot": None, "finished": all(ended)}
    if all(ended):
        return merged
    if "rest" in first:
        leftovers = []
        for state in states:
            leftover = state["rest"]
            if any(tokens for _, tokens in leftover.values()):
                leftovers.append(leftover)
        source = merge_all([state["source"] for state in states], alone=False)
        return merged | {"source": source, "rests": leftovers}
    of_workers = [state["sources"] for state in states if state["sources"]]
    sources = [_of_source(workers) for workers in zip(*of_workers, strict=True)]
    return merged | {"drawn": sum(state["drawn"] for state in states), "sources": sources}


def _of_source(workers: Sequence[ReaderState]) -> ReaderState:
    """Merges one source of all workers, in the first pass that is not over: later workers had all
    of it.
    """
    live = [worker for worker in workers if worker["is_live"]]
    here = min(live or workers, key=lambda worker: int(worker["passes"]))
    states = []
    for worker in workers:
        if worker["passes"] == here["passes"]:
            states.append(worker["state"])
        else:
            states.append(_end(worker["state"], here["state"]))
    return {
        "passes": here["passes"],
        "has_given": any(worker["has_given"] or worker["passes"] for worker in workers),
        "has_ended": all(worker["has_ended"] for worker in workers),
        "is_live": bool(live),
        "state": merge_all(states, alone=False),
    }


def _end(state: ReaderState | None, other: ReaderState | None) -> ReaderState | None:
    if state is None or other is None:
        return None
    if is_state(state):
        slot = DatasetState.from_json(state).slot
        other_state = DatasetState.from_json(other)
        if slot is None or other_state.slot is None:
            return state
        return replace(
            other_state, slot=slot, samples=other_state.rows_of(slot), skipped=0
        ).to_json()
    if "rest" in state:
        source = _end(state.get("source"), other.get("source"))
        end = {"slot": state["slot"], "finished": True, "rest": {}}
        return {**other, **end, "source": source}
    raise CheckpointMismatch(
        "The workers are in different passes of a Mix within a Mix. Use loader.load_state_dict() "
        "with this rank's state, and as many ranks and workers."
    )
