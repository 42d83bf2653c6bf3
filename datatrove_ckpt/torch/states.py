"""States of ``ReaderDataset``: what they hold, and how those of all ranks become one that any topology can load.

A worker's state says which position of the epoch it is at (``slot`` and ``samples``), in which order, of which input,
and what was read before by other topologies (``done``). A merged state has no slot: ``done`` holds everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, NamedTuple

from loguru import logger

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.torch.order import Even, Remaining, Round, Topology
from datatrove_ckpt.torch.seals import find_states, load_file, sealed

VERSION = 2
_KIND = "datatrove_ckpt.ReaderDataset"
_SINCE_SNAPSHOT = "_steps_since_snapshot"  # in the states of torchdata's loader


class Slot(NamedTuple):
    """One worker of one rank. ``worker`` is 0 of 1 if the rank reads itself."""

    rank: int
    world_size: int
    worker: int
    workers: int

    def __str__(self) -> str:
        return f"rank {self.rank} of world_size={self.world_size}, worker {self.worker} of num_workers={self.workers}"


@dataclass(frozen=True)
class DatasetState:
    """The content of a state. Plain JSON as ``to_json()``.

    Attributes:
        order: the settings that define the order: seed, window and shares.
        input: files and rows, see ``Index.state``.
        slot: who made it; None if it is of all.
        samples: how many rows of its share the slot had.
        skipped: how many of these rows were no samples.
        batch, even: of the slot's topology.
        ended: of a state of all: none of them had any sample left.
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
        shared = {"kind": _KIND, "version": VERSION, "epoch": self.epoch, "order": self.order, "input": self.input}
        shared["done"] = [one.to_json() for one in self.done]
        if self.slot is None:
            return shared | {"ended": self.ended}
        own = {"slot": list(self.slot), "samples": self.samples, "batch": self.batch, "even": self.even}
        return shared | own | ({"skipped": self.skipped} if self.skipped else {})

    @classmethod
    def from_json(cls, content: State) -> DatasetState:
        """Raises CheckpointMismatch if another version of this package made it."""
        if content.get("version") != VERSION or content.get("kind") != _KIND:
            raise CheckpointMismatch(
                f"The state is of version {content.get('version')!r} of {content.get('kind') or 'an unknown dataset'}, "
                f"and this release reads version {VERSION} of {_KIND}. Resume with the release that made it."
            )
        slot = Slot(*content["slot"]) if "slot" in content else None
        done = tuple(Round.from_json(one) for one in content["done"])
        own = {key: content[key] for key in ("samples", "skipped", "batch", "even", "ended") if key in content}
        return cls(content["epoch"], content["order"], content["input"], done, slot, **own)

    def has_ended(self) -> bool:
        """Whether no sample of the epoch is left."""
        if self.slot is None or self.topology is None:
            return self.ended
        left = Remaining(self.input["rows"], self.done).rows
        return self.samples >= self.topology.of_worker(left, self.slot.rank, self.slot.worker, self.even)

    def check_order(self, now: State) -> None:
        """Raises CheckpointMismatch if the state was made with another seed or window."""
        for key, name in (("shuffle_seed", "shuffle_seed"), ("window", "shuffle_window (rows, bytes)")):
            old, new = self.order[key], now[key]
            if old != new:
                raise CheckpointMismatch(
                    f"The state was made with {name}={old}, and this is {new}. Use the same, or start without the "
                    "state."
                )


def is_state(content: object) -> bool:
    return isinstance(content, Mapping) and content.get("kind") == _KIND


def merge(states: Iterable[State | str | PathLike[str]]) -> State:
    """Makes one state of those of all ranks. ``ReaderDataset.load_state_dict`` takes it with any number of ranks and
    workers: no sample of the epoch is seen twice, and none is left out.

    Args:
        states: of each rank, in any order: ``state_dict()`` of its loader or dataset, or something that holds it, or
            a file that ``torch.save`` has made of it.

    Raises:
        CheckpointMismatch: the state of a rank or worker is missing or there twice, or they are of different epochs,
            settings, inputs or steps; or a loader has made it between two of its snapshots.
        CheckpointCorrupt: a state or file is damaged.
        ConfigError: there is no state of a ``ReaderDataset`` in them.
    """
    loaded = [load_file(state) for state in states]
    check_snapshots(loaded)
    return sealed(merge_states([DatasetState.from_json(one) for one in find_states(loaded, is_state)]).to_json())


def gather(state: State, group: Any = None) -> State:
    """``merge`` for torch.distributed: each rank calls it with its own state, and gets the state of all.

    Args:
        state: ``state_dict()`` of this rank's loader or dataset.
        group: the process group; None: the default one. Without torch.distributed there is one rank.

    Raises: as ``merge``.
    """
    import torch.distributed as dist

    check_snapshots(state)
    if not dist.is_available() or not dist.is_initialized():
        return merge([state])
    states: list[State] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(states, list(find_states(state, is_state)), group=group)
    return merge(states)


def check_snapshots(content: object) -> None:
    """Raises CheckpointMismatch if the state of a loader is newer than those of its workers that it holds.

    torchdata's loader resumes from those, and drops the batches that it had given since. Nothing else can do that.
    """
    for state in find_states(content, lambda one: one.get(_SINCE_SNAPSHOT, 0) > 0):
        raise CheckpointMismatch(
            f"A loader has saved its state {state[_SINCE_SNAPSHOT]} steps after its snapshot, so where its workers "
            "were is not known. Use StatefulDataLoader with snapshot_every_n_steps=1 and in_order=True, its defaults, "
            "or resume with the number of ranks and workers that saved the state."
        )


def merge_states(states: Sequence[DatasetState]) -> DatasetState:
    if not states:
        raise ConfigError("There is no state of a ReaderDataset in what was given. Give the loaders' state_dict().")
    first = states[0]
    for key in ("epoch", "order", "input", "done", "topology", "even"):
        others = {str(getattr(state, key)): state for state in states}
        if len(others) > 1:
            old, new = list(others)[:2]
            which = "" if first.slot is None else f" ({first.slot} and others)"
            raise CheckpointMismatch(
                f"The states are not of one run: {key} is {old} in one and {new} in another{which}. Give the states "
                "that the ranks saved at the same step."
            )
    if first.slot is None or first.topology is None:
        return first  # merged before, and the same for all
    topology, ranks = first.topology, first.topology.ranks
    samples: dict[Slot | None, int] = {}
    for state in states:
        if state.slot in samples:
            raise CheckpointMismatch(f"There are two states of {state.slot}. Give one state of each rank.")
        samples[state.slot] = state.samples
    slots = [Slot(n % ranks, ranks, n // ranks, topology.workers) for n in range(topology.slots)]
    for slot in slots:
        if slot not in samples:
            raise CheckpointMismatch(f"The state of {slot} is missing. Give the states of all ranks.")
    _check_steps(states, topology)
    last = Round(topology, tuple(samples[slot] for slot in slots))
    ended = all(state.has_ended() for state in states)
    return replace(first, done=(*first.done, last), slot=None, samples=0, skipped=0, batch=1, even=None, ended=ended)


def _check_steps(states: Sequence[DatasetState], topology: Topology) -> None:
    """Raises CheckpointMismatch if ranks that have not ended are more than a batch apart.

    Without ``batch_size`` the batches of the loader are not known. A difference is then a warning.
    """
    given, ended = [0] * topology.ranks, set[int]()
    for state in states:
        assert state.slot is not None
        given[state.slot.rank] += state.samples - state.skipped
        if state.has_ended():
            ended.add(state.slot.rank)
    ranks = sorted((count, rank) for rank, count in enumerate(given) if rank not in ended)
    if not ranks or ranks[-1][0] - ranks[0][0] <= (topology.batch if topology.batch > 1 else 0):
        return
    (low, low_rank), (high, high_rank) = ranks[0], ranks[-1]
    what = (
        f"The states of the ranks were not saved at the same step: rank {low_rank} had {low} samples, rank {high_rank} "
        f"had {high}."
    )
    if topology.batch > 1:
        raise CheckpointMismatch(f"{what} Give the states that all ranks saved at the same step.")
    logger.warning(f"{what} If the model is that of one of these steps, samples are trained twice, or never.")
