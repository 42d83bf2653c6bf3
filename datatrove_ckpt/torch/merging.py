"""Merges the states of all workers of all ranks, for any number of ranks and workers.

``states.py`` merges states of a ``ReaderDataset``. A ``Pack`` or ``Mix`` has the merged states of
its sources, and the rests of its packers, or the sum of its draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.torch.seals import find_states, load_file, sealed
from datatrove_ckpt.torch.states import (
    DatasetState,
    Slot,
    check_same,
    check_steps,
    in_order,
    is_state,
    merge_states,
)

_SINCE_SNAPSHOT = "_steps_since_snapshot"  # in the states of torchdata's loader


def merge(states: Iterable[State | str | PathLike[str]]) -> State:
    """Merges the states of all ranks into one, for any number of ranks and workers.

    Each sample of the epoch of a ``ReaderDataset`` is seen exactly once. See also ``Pack`` and
    ``Mix``.

    Args:
        states: of each rank, in any order: ``state_dict()`` of its loader or dataset, or an object
            that holds it, or a file that ``torch.save`` has made of it.

    Raises:
        CheckpointMismatch: a rank's or worker's state is missing or repeated, or they are of
            different epochs, settings, inputs or steps; or a loader has made it between two of its
            snapshots; or a source has rows that are not counted.
        CheckpointCorrupt: a state or file is damaged.
        ConfigError: there is no state of a ``ReaderDataset``, ``Pack`` or ``Mix`` in them.
    """
    loaded = [load_file(state) for state in states]
    check_snapshots(loaded)
    return sealed(merge_all(list(find_states(loaded, is_ours))))


def check_snapshots(content: object) -> None:
    """Raises CheckpointMismatch if a loader's state is newer than the states of its workers in it.

    Only torchdata's loader can resume there: it drops the batches that it has given since.
    """
    for state in find_states(content, lambda one: one.get(_SINCE_SNAPSHOT, 0) > 0):
        raise CheckpointMismatch(
            f"A loader has saved its state {state[_SINCE_SNAPSHOT]} steps after its snapshot, so "
            "where its workers were is not known. Use StatefulDataLoader with "
            "snapshot_every_n_steps=1 and in_order=True, its defaults, or resume with the number "
            "of ranks and workers that saved the state."
        )


def is_ours(content: object) -> bool:
    return is_state(content) or (
        isinstance(content, Mapping) and {"kind", "options", "slot"} <= content.keys()
    )


def merge_all(states: Sequence[State | None], alone: bool = True) -> State:
    """Merges the states of all workers. ``alone``: see ``merge_states``."""
    if not states:
        raise ConfigError(
            "There is no state of a ReaderDataset, Pack or Mix in what was given. Give the "
            "loaders' state_dict()."
        )
    found = [state for state in states if state is not None and is_ours(state)]
    if len(found) < len(states):
        raise CheckpointMismatch(
            "A source of Pack or Mix is no ReaderDataset whose rows are counted, so that a state "
            "belongs to its worker: use loader.load_state_dict() with the state of this rank, and "
            "as many ranks and workers as before."
        )
    check_same(found, ("kind", "options", "epoch"), State.get)
    if is_state(found[0]):
        return merge_states([DatasetState.from_json(state) for state in found], alone).to_json()
    return _merge_wrappers(found, alone)


def _merge_wrappers(states: Sequence[State], alone: bool) -> State:
    first = states[0]
    if first["slot"] is None:
        check_same(states, first, State.get)
        return first  # merged before
    states = in_order([Slot(*(state["slot"] or (0, 1, 0, 0))) for state in states], states)
    ended = [bool(state["finished"]) for state in states]
    if alone:
        given = [int(state.get("given") or state.get("drawn") or 0) for state in states]
        check_steps([state["slot"][0] for state in states], given, ended)
    merged = {key: first[key] for key in ("kind", "version", "options", "epoch")}
    merged |= {"slot": None, "finished": all(ended)}
    if all(ended):
        return merged
    if "rest" in first:
        return merged | _packs(states)
    return merged | _mixes(states)


def _packs(states: Sequence[State]) -> State:
    rests = []
    for state in states:
        rest = state["rest"]
        if any(tokens for _, tokens in rest.values()):
            rests.append(rest)
    return {"source": merge_all([state["source"] for state in states], alone=False), "rests": rests}


def _mixes(states: Sequence[State]) -> State:
    of_workers = [state["sources"] for state in states if state["sources"]]
    sources = [_of_source(workers) for workers in zip(*of_workers, strict=True)]
    return {"drawn": sum(state["drawn"] for state in states), "sources": sources}


def _of_source(workers: Sequence[State]) -> State:
    """Merges one source of all workers, in the first pass that is not over: later workers had all
    of it.
    """
    live = [one for one in workers if one["is_live"]]
    here = min(live or workers, key=lambda one: int(one["passes"]))
    states = []
    for one in workers:
        if one["passes"] == here["passes"]:
            states.append(one["state"])
        else:
            states.append(_end(one["state"], here["state"]))
    return {
        "passes": here["passes"],
        "has_given": any(one["has_given"] or one["passes"] for one in workers),
        "has_ended": all(one["has_ended"] for one in workers),
        "is_live": bool(live),
        "state": merge_all(states, alone=False),
    }


def _end(state: State | None, other: State | None) -> State | None:
    if state is None or other is None:
        return None
    if is_state(state):
        slot = DatasetState.from_json(state).slot
        then = DatasetState.from_json(other)
        if slot is None or then.slot is None:
            return state
        return replace(then, slot=slot, samples=then.rows_of(slot), skipped=0).to_json()
    if "rest" in state:
        source = _end(state.get("source"), other.get("source"))
        own = {"slot": state["slot"], "finished": True, "rest": {}}
        return {**other, **own, "source": source}
    raise CheckpointMismatch(
        "The workers are in different passes of a source that is a Mix itself: their states "
        "belong to them. Use loader.load_state_dict() with the state of this rank, and the same "
        "number of ranks and workers."
    )
