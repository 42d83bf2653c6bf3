"""Folders that another program made, datatrove's own runner above all: refused, with the command that goes on there."""

from __future__ import annotations

import shlex
import sys
from functools import partial
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


def _on_job(command: str, flag: str, value: object) -> str:
    """A command on the script that is running, else on CONFIG. Who knows CONFIG, a script perhaps, puts it in."""
    main, script = sys.modules["__main__"], next(iter(sys.argv), "")
    is_main = hasattr(main, "__file__") and getattr(main, "__spec__", None) is None
    is_script = is_main and script.endswith(".py") and "datatrove_ckpt.cli.scripts" not in sys.modules
    own = [f"--main={'ARGUMENTS' if sys.argv[1:] else ''}"] if is_script else []  # which may hold a secret
    return shlex.join(["datatrove-ckpt", command, script if is_script else "CONFIG", flag, str(value), *own])


# The command that takes over a run of datatrove's own runner, of its checkpoint folder.
migrate_command = partial(_on_job, "migrate", "--from")
# The command that deals out what is left, of the number of tasks.
reshard_command = partial(_on_job, "reshard", "--tasks")


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
