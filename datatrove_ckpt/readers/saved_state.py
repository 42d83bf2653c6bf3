"""Whether a saved state fits the reader that shall resume from it."""

from __future__ import annotations

from typing import Any

from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.readers.inputs import remedy
from datatrove_ckpt.readers.positions import State
from datatrove_ckpt.readers.rows import ShardKey

READER_VERSION = 1

USUAL_KEYS = {"text_key": "text", "id_key": "id"}
"""The options that decide what a row becomes, and their defaults. A state keeps those that differ."""


def checked_state(reader: Any, state: State | None, shard: ShardKey, own: State) -> State | None:
    """Returns the state, or None if it is the state before the first document.

    Args:
        reader: a ``SeekingReader``.
        own: the reader's state before the first document.

    Raises:
        CheckpointMismatch: the state was made by another reader, with other options or for another shard.
    """
    if state is None:
        return None
    where = f"The saved position in {reader.data_folder.path}"
    made_by, reads = (state.get("reader"), state.get("version")), (own["reader"], own["version"])
    if made_by != reads:
        raise CheckpointMismatch(
            f"{where} was made by reader {made_by[0]!r} (version {made_by[1]}), and this is {reads[0]!r} "
            f"(version {reads[1]}). {remedy()}"
        )
    then = state["options"] | ({"shard": _comparable(state["shard"], shard)} if "shard" in state else {})
    now = own["options"] | ({"shard": _comparable(shard, shard)} if "shard" in state else {})
    for key in then | now:
        old, new = then.get(key, USUAL_KEYS.get(key)), now.get(key, USUAL_KEYS.get(key))
        if key == "default_metadata":
            if old not in (None, new):  # None: an earlier release made it
                raise CheckpointMismatch(
                    f"{where} was made with another {key}, now {reader.default_metadata}. {remedy()}"
                )
        elif old != new and not (key in USUAL_KEYS and "skipped" not in state):  # 0.1.0 did not keep these keys
            raise CheckpointMismatch(f"{where} was made with {key}={old!r}, now {new!r}. {remedy()}")
    if 0 <= reader.limit < state.get("documents", 0):
        raise CheckpointMismatch(
            f"{where} comes after {state['documents']} documents, and limit is now {reader.limit}. "
            + remedy(f"Set limit to at least {state['documents']}")
        )
    return state if "file" in state else None


def _comparable(shard: ShardKey, now: ShardKey) -> ShardKey:
    """A rank's share begins with what it read before the run was dealt out anew, see ``shares.py``."""
    is_share = len(now) == 3 and isinstance(now[2], int)
    return shard[:1] if is_share else shard
