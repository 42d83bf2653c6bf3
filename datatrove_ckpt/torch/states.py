"""States of ``ReaderDataset``, and how the states of all ranks become one for any topology.

A worker's state has its position in the epoch (``slot`` and ``samples``), the order, the input, and
what other topologies have read before (``done``). In a merged state without a slot, ``done`` holds
everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, TypeVar

from loguru import logger

from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.torch.seals import REMEDY
from datatrove_ckpt.torch.topology import Even, Remaining, Round, Topology

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
        order: seed, window and shares.
        input: see ``Index.state``.
        slot: the worker that made it; None: a merged state.
        samples: how many rows of its share the slot had.
        skipped: how many of these rows were no samples.
        ended: in a merged state: no worker had a sample left.
    """

    epoch: int
    order: State
    input: State
    done: tuple[Round, ...] = ()
    slot: Slot | None = None
    samples: int = 0
    skipped: int = 0
    batch: int = 1
    even: Even = None
    ended: bool = False

    @property
    def topology(self) -> Topology | None:
        return self.slot and Topology(self.slot.world_size, self.slot.workers, self.batch)

    def to_json(self) -> State:
        done = [each.to_json() for each in self.done]
        slot = self.slot and list(self.slot)
        return {"kind": _KIND, "version": VERSION, **vars(self), "done": done, "slot": slot}

    @classmethod
    def from_json(cls, content: State) -> DatasetState:
        """Raises CheckpointMismatch for a state of another version, CheckpointCorrupt for a damaged
        one.
        """
        if content.get("version") != VERSION or content.get("kind") != _KIND:
            raise CheckpointMismatch(
                f"The state is of version {content.get('version')!r} of "
                f"{content.get('kind') or 'an unknown dataset'}, "
                f"and this release reads version {VERSION} of {_KIND}. Resume with the release "
                "that made it."
            )
        found = {
            key: value
            for key, value in content.items()
            if key not in ("kind", "version", "checksum")
        }
        if found.keys() != {field.name for field in fields(cls)}:
            raise CheckpointCorrupt(
                f"The state is damaged: its keys are not those of version {VERSION}. {REMEDY}"
            )
        found["done"] = tuple(Round.from_json(each) for each in content["done"])
        found["slot"] = content["slot"] and Slot(*content["slot"])
        return cls(**found)

    def has_ended(self) -> bool:
        if self.slot is None:
            return self.ended
        return self.samples >= self.rows_of(self.slot)

    def rows_of(self, slot: Slot) -> int:
        """Returns how many rows of the share of a slot earlier rounds have left."""
        topology = Topology(slot.world_size, slot.workers, self.batch)
        left = Remaining(self.input["rows"], self.done).rows
        return topology.of_worker(left, slot.rank, slot.worker, self.even)

    def check_order(self, now: State) -> None:
        for key, name in (
            ("shuffle_seed", "shuffle_seed"),
            ("window", "shuffle_window (rows, bytes)"),
        ):
            old = self.order[key]
            new = now[key]
            if old != new:
                raise CheckpointMismatch(
                    f"The state was made with {name}={old}, and this is {new}. Use the same, or "
                    "start without the state."
                )


def is_state(content: object) -> bool:
    return isinstance(content, Mapping) and content.get("kind") == _KIND


def check_same(
    states: Sequence[_T], keys: Iterable[str], get: Callable[[_T, str], object] = getattr
) -> None:
    """Raises CheckpointMismatch if a value differs between the states of ranks and workers."""
    for key in keys:
        found = list({str(get(state, key)): None for state in states})
        if len(found) > 1:
            old, new = (one[:200] for one in found[:2])
            raise CheckpointMismatch(
                f"The states are not of one run: {key} is {old} in one and {new} in another. Give "
                "the states that the ranks saved at the same step."
            )


def in_order(slots: Sequence[Slot], states: Sequence[_T]) -> list[_T]:
    """Sorts the states of all slots: all ranks' first workers, then all ranks' second ones. Ranks
    that read the same rows, as those of tensor parallelism, have equal states.

    Raises:
        CheckpointMismatch: a state is missing, or two of one slot differ.
    """
    found: dict[Slot, _T] = {}
    for slot, state in zip(slots, states, strict=True):
        if found.setdefault(slot, state) != state:
            raise CheckpointMismatch(
                f"There are two states of {slot}. Give one state of each rank."
            )
    _, ranks, _, workers = slots[0]
    wanted = [
        Slot(number % ranks, ranks, number // ranks, workers) for number in range(ranks * workers)
    ]
    for slot in wanted:
        if slot not in found:
            raise CheckpointMismatch(
                f"The state of {slot} is missing. Give the states of all ranks."
            )
    return [found[slot] for slot in wanted]


def merge_states(states: Sequence[DatasetState], alone: bool) -> DatasetState:
    """Merges the slots' states. ``alone``: the loaders read these datasets, so all ranks of a step
    had equally many samples.
    """
    first = states[0]
    check_same(states, ("epoch", "order", "input", "done", "topology", "even"))
    if first.slot is None or first.topology is None:
        return first  # merged before, and the same for all
    states = in_order([state.slot for state in states if state.slot], states)
    ended = [state.has_ended() for state in states]
    if alone:
        given = [state.samples - state.skipped for state in states]
        check_steps([state.slot.rank for state in states if state.slot], given, ended, first.batch)
    done = (*first.done, Round(first.topology, tuple(state.samples for state in states)))
    return replace(
        first, done=done, slot=None, samples=0, skipped=0, batch=1, even=None, ended=all(ended)
    )


def check_steps(
    ranks: Sequence[int], given: Sequence[int], ended: Sequence[bool], batch: int = 1
) -> None:
    """Raises CheckpointMismatch if ranks that have not ended are more than a batch apart.

    Without ``batch_size`` the batches of the loader are not known, and a difference is a warning.

    Args:
        given: how many samples each worker gave.
        ended: whether each worker has ended.
    """
    sums = dict.fromkeys(ranks, 0)
    over = {rank for rank, one in zip(ranks, ended, strict=True) if one}
    for rank, count in zip(ranks, given, strict=True):
        sums[rank] += count
    found = sorted((count, rank) for rank, count in sums.items() if rank not in over)
    allowed = batch if batch > 1 else 0
    if not found or found[-1][0] - found[0][0] <= allowed:
        return
    low, low_rank = found[0]
    high, high_rank = found[-1]
    what = (
        f"The states of the ranks were not saved at the same step: rank {low_rank} had {low} "
        f"samples, rank {high_rank} had {high}."
    )
    if batch > 1:
        raise CheckpointMismatch(f"{what} Give the states that all ranks saved at the same step.")
    logger.warning(
        f"{what} If the model is that of one of these steps, samples are trained twice, or never."
    )
