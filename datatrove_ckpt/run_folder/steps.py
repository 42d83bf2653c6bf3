"""The steps of a run folder, as commands see them. Imports no datatrove.

The folder of a step is a run folder; that of a query has only ``output/``, see ``queries``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson
import xxhash

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.job_file import recorded_settings
from datatrove_ckpt.checkpoint.rank_summary import Include, read_ranks
from datatrove_ckpt.run_folder.queries import KeptRows, kept_rows
from datatrove_ckpt.run_folder.run_location import open_location
from datatrove_ckpt.run_folder.run_state import RunState, read_run_state

STEPS = "steps.json"
"""File in the run folder that lists the steps, in order."""


@dataclass(frozen=True)
class StepFolder:
    """What the folder of a step holds."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def rows(self) -> KeptRows | None:
        """The rows of a query, or those of a run that no row reaches; None for other runs."""
        return kept_rows(self.folder / "output")

    @property
    def given(self) -> KeptRows | None:
        """The rows that a run has begun with, if a query gives them."""
        return kept_rows(self.folder / layout.KEPT_INPUT)

    @property
    def has_begun(self) -> bool:
        return recorded_settings(self.folder / "checkpoints") != {}

    def state(self) -> RunState:
        if not self.has_begun:
            return RunState(str(self.folder), False, time.time())
        with open_location(str(self.folder)) as location:
            return read_run_state(location)

    def digest(self) -> str:
        """Returns a digest of its rows; "" if it has none yet."""
        if self.rows is not None:
            return self.rows.digest
        if not self.has_begun:
            return ""
        digest = xxhash.xxh3_128()
        for rank in read_ranks(self.folder / "checkpoints", Include.COMMITS):
            for _, commit in sorted(rank.commits.items()):
                for file in commit.files:
                    digest.update(f"{file.path} {file.xxh128}\n".encode())
        return digest.hexdigest()


def step_folders(root: Path) -> dict[str, StepFolder]:
    names: list[str] = []
    with suppress(OSError, ValueError):  # the command reports it later; a run writes it anew
        names = orjson.loads((root / STEPS).read_bytes())
    return {name: StepFolder(root / name) for name in names}


def outdated(steps: Mapping[str, StepFolder]) -> dict[str, str]:
    """Returns each step that has read other rows of a step than that has now, and that step."""
    kept = {name: step.given or step.rows for name, step in steps.items()}
    return {
        name: other
        for name, rows in kept.items()
        if rows is not None
        for other, digest in rows.made_from["steps"].items()
        if other in steps and steps[other].digest() not in ("", digest)
    }
