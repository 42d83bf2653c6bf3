"""The run that is forked: what it is now, and of which ranks the new run may use the answers.

A rank's answers are usable if they were all received with the settings that the new run has. ``run.json`` of the rank
shows that: the settings of now, and the fields whose change the user accepted in the middle. No answer says with which
of two values it was received, so a rank with such a change keeps none. ``reshard`` moves answers to other ranks, so
after one a change of any rank counts for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from datatrove_ckpt.checkpoint.fields import RunIdentity
from datatrove_ckpt.checkpoint.forks import ANSWERING, is_unstarted
from datatrove_ckpt.checkpoint.identity import compare, read_run
from datatrove_ckpt.checkpoint.layout import JOB, SHARES
from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.checkpoint.setting_values import same_value
from datatrove_ckpt.maintenance.inspect import RankFolder

_MODEL = "model"
"""A part of each final payload: an answer of another model is never used, and answers of two models never mixed up."""


@dataclass(frozen=True)
class Source:
    """The other run.

    Attributes:
        settings: ``job.json``, or ``run.json`` of a rank that has started; of one that has not, if there is no other.
        job: ``job.json``; empty if there is none, as in a copy of a mirror.
        ranks: those that have a ``run.json``, without retries.
        is_dealt_out: ``reshard`` has dealt out its input.
    """

    settings: Json
    job: Json
    ranks: list[RankFolder]
    is_dealt_out: bool

    @classmethod
    def read(cls, checkpoints: Path, ranks: list[RankFolder]) -> Source:
        """
        Raises:
            CheckpointCorrupt: ``job.json``, or ``run.json`` of a rank, cannot be read.
        """
        ranks = [rank for rank in ranks if not rank.root and rank.identity]
        job = read_run(checkpoints / JOB) if (checkpoints / JOB).exists() else {}
        started = (rank.identity for rank in ranks if not is_unstarted(rank.identity))
        first = ranks[0].identity if ranks else {}
        return cls(job or next(started, first), job, ranks, (checkpoints / SHARES).exists())

    @property
    def is_unstarted(self) -> bool:
        """Whether it is a fork itself, and no rank of it has started."""
        return is_unstarted(self.settings)

    @property
    def outputs(self) -> set[tuple[str, str]]:
        """Folders and names of its output files, as all its ranks have them. See ``real_place``."""
        runs = [self.job, *(rank.identity for rank in self.ranks)]
        found = {(str(run["output_folder"]), str(run.get("output_filename"))) for run in runs if "output_folder" in run}
        return {(real_place(folder), name) for folder, name in found}

    def why_unusable(self, new: RunIdentity | None) -> Callable[[RankFolder], str]:
        """Tells of a rank why the new run cannot use its answers: "model_kwargs changed", for example; or "".

        Args:
            new: the new run; None: not known. Then the ranks must agree with the settings of now.
        """
        everywhere = _changed_midway(self.job, *(rank.identity for rank in self.ranks)) if self.is_dealt_out else []

        def why(rank: RankFolder) -> str:
            names = self._differing(rank.identity, new)
            if names:
                return f"{', '.join(names)} changed"
            mixed = dict.fromkeys([*_changed_midway(rank.identity), *everywhere])
            return f"{', '.join(mixed)} changed in the middle of this run" if mixed else ""

        return why

    def _differing(self, kept: Json, new: RunIdentity | None) -> list[str]:
        if new is None:
            both = [name for name in ANSWERING if name in kept and name in self.settings]
            return [name for name in both if not same_value(name, kept[name], self.settings[name])]
        had_others = any(change.get("field") == _MODEL for change in kept.get("accepted_changes", []))
        deciding = ANSWERING if had_others else (_MODEL, *ANSWERING)
        return [change.field for change in compare(kept, new) if change.field in deciding]


def real_place(folder: str) -> str:
    """A name that tells whether two folders are one: the absolute path without links, or the URL."""
    return folder.rstrip("/") if "://" in folder else str(Path(folder).expanduser().resolve())


def _changed_midway(*runs: Json) -> list[str]:
    """The fields that decide about answers and that the user has changed in the middle."""
    changed = {change.get("field") for run in runs for change in run.get("accepted_changes", [])}
    return [name for name in ANSWERING if name in changed]
