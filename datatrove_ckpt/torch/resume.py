"""``restore``: states of all ranks into a loader, whatever number of ranks and workers they are of."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.torch.states import DatasetState, check_snapshots, find_states, load_file, merge_states
from datatrove_ckpt.torch.streams import is_stream_state


def restore(loader: Any, states: Iterable[State | str | PathLike[str]]) -> int:
    """Lets a loader resume in the epoch in which states of all ranks were saved. Call it in each rank.

    Args:
        loader: a StatefulDataLoader, or any DataLoader, of a ``ReaderDataset``. It has not begun yet.
        states: ``loader.state_dict()`` of each rank, in any order, or files that ``torch.save`` has made of them; or
            one state that ``gather`` or ``merge`` has made.

    Returns:
        The number of the epoch with which the loop of epochs goes on: that of the states, or the next one if no rank
        had a sample left. Then nothing is loaded, because torchdata begins a loader that had finished once more.

    Raises:
        ConfigError: the loader has no ``ReaderDataset``, or there is no state of one.
        CheckpointMismatch: see ``merge`` and ``ReaderDataset.load_state_dict``.
    """
    from datatrove_ckpt.torch.dataset import ReaderDataset

    dataset = loader.dataset
    if not isinstance(dataset, ReaderDataset):
        raise ConfigError(
            f"restore() needs a loader of a ReaderDataset, and this one has a {type(dataset).__name__}. Use "
            "loader.load_state_dict(), with the state of this rank, and the same number of ranks and workers."
        )
    loaded: list[Any] = [load_file(state) for state in states]
    if not dataset.is_counted or not any(list(find_states(state)) for state in loaded):
        return _restore_own(loader, loaded)
    found = [[DatasetState.from_json(one) for one in find_states(state)] for state in loaded]
    merged = merge_states([one for those in found for one in those])
    finished = [bool(state.get("_iterator_finished")) for state in loaded]
    if merged.ended or all(finished):
        return merged.epoch + 1
    if hasattr(loader, "load_state_dict") and not any(finished):
        for state, those in zip(loaded, found, strict=True):
            if _is_own(state, those, dataset, loader.num_workers):
                loader.load_state_dict(state)  # the same samples follow, in the same batches
                return merged.epoch
    check_snapshots(loaded)
    dataset.load_state_dict(merged.to_json())
    return merged.epoch


def _restore_own(loader: Any, states: list[Any]) -> int:
    """For input that is not counted, and for states of release 0.1: each rank has a state of its own."""
    counted = next(find_states(states), None)
    if counted is not None:
        loader.dataset.load_state_dict(counted)  # which refuses it
    for state in states:
        those = list(find_states(state, is_stream_state))
        if those and (len(states) == 1 or those[0].get("slot", [None])[0] == loader.dataset.rank):
            if all(one.get("ended") for one in those):
                return int(those[0]["epoch"]) + 1
            loader.load_state_dict(state)
            return int(those[0]["epoch"])
    raise ConfigError(
        f"There is no state of rank {loader.dataset.rank} in the {len(states)} that were given. Give the loaders' "
        "state_dict() of all ranks."
    )


def _is_own(state: Any, those: list[DatasetState], dataset: Any, workers: int) -> bool:
    """Whether this rank's loader made the state, with the same topology."""
    settings = dataset.settings
    return ("_snapshot" if workers else "_num_yielded") in state and all(
        one.slot is not None
        and one.slot.rank == dataset.rank
        and one.slot.world_size == dataset.world_size
        and one.slot.workers == max(1, workers)
        and (one.batch, one.even) == (settings.batch, settings.even)
        for one in those
    )
