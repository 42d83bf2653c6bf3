"""Folders that another program made, datatrove's own runner above all: refused, with the command that goes on there."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from datatrove_ckpt.checkpoint.layout import (
    CACHE,
    COMMITS,
    DEAD_LETTERS,
    FROM_DATATROVE,
    RUN,
    is_datatroves,
    journal_indices,
    journal_path,
    last_chunk_of,
)
from datatrove_ckpt.errors import CheckpointMismatch


def migrate_command(checkpoints: Path | str) -> str:
    """The command that takes over a run of datatrove's own runner."""
    return _on_job("migrate", "--from", str(checkpoints))


def reshard_command(tasks: object) -> str:
    """The command that deals out what is left to this number of tasks."""
    return _on_job("reshard", "--tasks", str(tasks))


def _on_job(command: str, *arguments: str) -> str:
    """A command on the script that is running, else on CONFIG. Who knows CONFIG puts it in."""
    main, script = sys.modules["__main__"], next(iter(sys.argv), "")
    if not script.endswith(".py") or not hasattr(main, "__file__") or getattr(main, "__spec__", None) is not None:
        return shlex.join(["datatrove-ckpt", command, "CONFIG", *arguments])
    own = f"--main={'ARGUMENTS' if sys.argv[1:] else ''}"  # which may hold a secret
    return shlex.join(["datatrove-ckpt", command, script, *arguments, own])


def refuse_missing_run_json(folder: Path) -> None:
    """Checks that a folder without ``run.json`` holds no other part of a checkpoint, nor one of datatrove's runner.

    Raises:
        CheckpointMismatch: it does; the message names the command that continues datatrove's run.
    """
    if (folder / RUN).exists():
        return
    if is_datatroves(last_chunk_of(folder)):
        raise CheckpointMismatch(
            f"{folder.parent} is the checkpoint of a run of datatrove's own InferenceRunner: it wrote "
            f"{last_chunk_of(folder)}. {continue_datatroves(folder.parent)}"
        )
    aside = folder.parent / FROM_DATATROVE
    if (aside / folder.name).exists() or last_chunk_of(aside / folder.name).exists():
        raise CheckpointMismatch(
            f"{aside} holds this rank as datatrove's own InferenceRunner left it, but {folder} holds no {RUN}: migrate "
            f"was interrupted. Run it again: {migrate_command(folder.parent)}. (To start this rank "
            "anew, remove it there, too.)"
        )
    journals = [journal_path(folder, index).name for index in journal_indices(folder)] if folder.is_dir() else []
    foreign = [name for name in (COMMITS, CACHE, DEAD_LETTERS) if (folder / name).exists()] + journals[:3]
    if foreign:
        raise CheckpointMismatch(
            f"{folder} holds {', '.join(foreign)} but no {RUN}. If datatrove's own InferenceRunner made it: "
            f"{continue_datatroves(folder.parent)} If {RUN} is lost, restore it from a copy or from the mirror."
        )


def continue_datatroves(checkpoints: Path | str) -> str:
    """What to do where a run of datatrove's own runner has left its checkpoint, or output."""
    return (
        f"To continue that run, stop it, and let {migrate_command(checkpoints)} take it over (with --dry-run it only "
        "says what it would do). To start anew, choose another checkpoints_local_dir, output_folder and logging_dir."
    )
