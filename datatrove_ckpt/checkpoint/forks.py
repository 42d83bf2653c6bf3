"""What a rank keeps of the run that it was forked from: ``forked`` in its ``run.json``.

A fork processes the same input with another prompt or model, so nothing that is finished there is finished here. It
keeps what shows that the input is the same (fingerprints of some documents, and their number), and a request cache: an
answer in it is used if the final payload of a request is equal.

Until its first start such a rank has no owner that ever worked on it (fence 0), and takes any settings but those that
change answers without being in the payload, and the number of tasks, by which the input is dealt out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datatrove_ckpt.checkpoint.lines import Json, is_count
from datatrove_ckpt.errors import CheckpointMismatch

FORKED = "forked"
OF_INPUT = ("identity_version", "tasks")
"""Fields of the identity with which a fork cannot use the input if they differ."""
WAY_OUT = (
    "Go back to the old value, or fork again with --no-answers into another folder: then these settings may change. "
    "With another number of tasks nothing can be kept: start a new run instead."
)
"""What a user does about settings that do not fit what a fork keeps."""


@dataclass(frozen=True)
class Forked:
    """What was kept.

    Attributes:
        source: the checkpoint of the other run, for people.
        documents: how many documents the rank's input has; None: the other run had not read all of it.
        fingerprints: of documents as they were read, by ordinal.
    """

    source: str
    documents: int | None = None
    fingerprints: dict[int, str] = field(default_factory=dict)

    def to_json(self) -> Json:
        fingerprints = {str(ordinal): text for ordinal, text in self.fingerprints.items()}
        return {"from": self.source, "documents": self.documents, "fingerprints": fingerprints}

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> Forked | None:
        """What ``run.json`` says; None if the rank is no fork.

        Raises:
            ValueError: it is damaged.
        """
        found = run.get(FORKED)
        if found is None:
            return None
        try:
            fingerprints = {int(ordinal): text for ordinal, text in found["fingerprints"].items()}
            forked = cls(found["from"], found["documents"], fingerprints)
            texts = (forked.source, *fingerprints.values())
            if not all(isinstance(text, str) for text in texts) or not is_count(forked.documents or 0):
                raise TypeError
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError("what it says of the run that it was forked from is damaged") from None
        return forked


def is_unstarted(run: Mapping[str, Any]) -> bool:
    """Whether a fork has made this ``run.json``, and no process has worked on the rank yet."""
    return FORKED in run and not run.get("owner", {}).get("fence", 0)


def fork_lock(root: Path) -> Path:
    """The lock of a fork that is being made, and the first thing of it that is on the disk; ``root`` is the last."""
    return root.absolute().with_name(f"{root.name}.forking.lock")


def refuse_half_forked(root: Path) -> None:
    """Refuses a start that would pay for the answers which an interrupted fork was to keep.

    Raises:
        CheckpointMismatch: it says what to do.
    """
    if (lock := fork_lock(root)).exists() and not any(root.glob("*")):
        raise CheckpointMismatch(
            f"`datatrove-ckpt fork` was interrupted while it made {root}, or is still at work. Run the fork again. To "
            f"start without what it keeps, remove {lock}."
        )
