"""One run, one identity: what a checkpoint was made with, in ``run.json``.

The identity is a flat dict of plain JSON values, made by the caller; this module only keeps and compares it.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import orjson

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch

FORMAT = 1
"""Version of everything in a rank's folder."""


def check_identity(folder: Path, identity: dict[str, Any], accept_changes: bool = False) -> None:
    """Writes ``run.json`` on the first start, compares it on every other.

    ``accept_changes``: a difference is recorded in ``run.json``, with the time, instead of refused.

    Raises:
        CheckpointMismatch: the checkpoint belongs to another run; the message names each field with both values.
        CheckpointCorrupt: ``run.json`` cannot be read.
    """
    path = folder / "run.json"
    # Through JSON and back, so that what is compared is what is kept: a tuple becomes a list, 1.0 stays 1.0.
    new = orjson.loads(orjson.dumps({"format": FORMAT, **identity}))
    if path.exists():
        _check(path, new, accept_changes)
        return
    foreign = [name for name in ("commits.jsonl", "replay.sqlite3", "chunk_00000.jsonl") if (folder / name).exists()]
    if foreign:
        raise CheckpointMismatch(
            f"{folder} holds {', '.join(foreign)} but no run.json: another program made it (datatrove's own "
            "InferenceRunner?). Choose another checkpoints_local_dir."
        )
    _write(path, new)


def _write(path: Path, identity: dict[str, Any]) -> None:
    files.disk.replace(path, orjson.dumps(identity, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _check(path: Path, new: dict[str, Any], accept_changes: bool) -> None:
    try:
        old = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise CheckpointCorrupt(f"{path} cannot be read ({error}). Restore it from a copy.") from error
    accepted = old.pop("accepted_changes", [])
    changed = [name for name in dict.fromkeys([*old, *new]) if old.get(name, ...) != new.get(name, ...)]
    if not changed:
        return
    if "format" in changed or not accept_changes:
        lines = [f"  {name}: {_shown(old, name)} -> {_shown(new, name)}" for name in changed]
        raise CheckpointMismatch(
            f"The checkpoint {path.parent} was made by another run:\n"
            + "\n".join(lines)
            + "\nGo on with the old settings, choose another checkpoints_local_dir (and output) for the new ones, or "
            "set accept_changes=True to mix the two."
        )
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    changes = [{"when": when, "field": name, "old": old.get(name), "new": new.get(name)} for name in changed]
    _write(path, {**new, "accepted_changes": accepted + changes})


def _shown(identity: dict[str, Any], name: str) -> str:
    if name not in identity:
        return "(not set)"
    text = orjson.dumps(identity[name]).decode()
    return text if len(text) <= 300 else f"{text[:300]}... ({len(text)} characters)"
