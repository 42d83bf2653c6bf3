"""The fields by which two runs are the same run, as ``run.json`` and ``job.json`` keep them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint.lines import Json, is_count
from datatrove_ckpt.errors import CheckpointMismatch, VersionMismatch
from datatrove_ckpt.redaction import environment_secrets, is_surely_secret, without_secrets

# What a rank keeps of the run that it was forked from: ``forked`` in its ``run.json``.
#
# A fork processes the same input with another prompt or model, so nothing that is finished there is finished here. It
# keeps what shows that the input is the same (fingerprints of some documents, and their number), and a request cache:
# an answer in it is used if the final payload of a request is equal.
#
# Until its first start such a rank has no owner that ever worked on it (fence 0), and takes any settings but those that
# change answers without being in the payload, and the number of tasks, by which the input is dealt out.


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


_USERS_FIELDS = (
    "imports",
    "uses",
    "rollout_fn",
    "shared_context",
    "output_writer",
    "default_generation_params",
    "model_kwargs",
)
"""Fields, and beginnings of dotted fields, whose names and values the user has chosen."""
_ANSWERING = ("canned_answers", "model_kwargs", "models", "use_chat")


def of_model(name: str) -> str:
    """A field of one of several models as that of a single one: ``model_kwargs`` of ``judge.model_kwargs``."""
    head, _, inner = name.partition(".")
    return name if head in _USERS_FIELDS else inner or name


def decides(name: str) -> bool:
    """Whether a field of the identity, of any model, decides about an answer and is in no payload."""
    return of_model(name) in _ANSWERING


@dataclass(frozen=True)
class RunIdentity:
    """What makes a run this run and no other."""

    fields: Json
    """Plain JSON values. ``identity_version`` names the way in which they describe the run."""
    notes: dict[str, str] = field(default_factory=dict)
    """What to add to the error if a field differs, by the name of the field."""
    how_to_accept: str = "set accept_changes=True"
    """What a user who is refused does to continue in spite of the changes."""

    @cached_property
    def kept(self) -> Json:
        """The fields as files keep them."""
        return as_kept(self.fields)


def fields_without_secrets(fields: Json) -> Json:
    """The fields of an identity, with hashes in the place of the user's secrets."""
    found = environment_secrets(is_surely_secret).values()
    return {name: _field_without_secrets(name, value, found) for name, value in fields.items()}


def _field_without_secrets(name: str, value: object, found: Collection[str] | None = None) -> Any:
    is_users = of_model(name).partition(".")[0] in _USERS_FIELDS and not name.endswith(" code")
    return without_secrets(name, value, found) if is_users else value


def without_its_secrets(content: Json) -> Json:
    """The content of a ``run.json`` or ``job.json``, with hashes in the place of secrets."""
    clean = fields_without_secrets(content)
    if accepted := content.get("accepted_changes"):
        clean["accepted_changes"] = [_change_without_secrets(change) for change in accepted]
    return clean


def _change_without_secrets(change: Json) -> Json:
    name = str(change.get("field"))
    return change | {key: _field_without_secrets(name, change[key]) for key in ("old", "new") if key in change}


def as_kept(fields: Json) -> Json:
    """Through JSON and back, so that what is compared is what is kept: a tuple becomes a list, 1.0 stays 1.0."""
    kept: Json = orjson.loads(orjson.dumps(stamped(fields)))
    return fields_without_secrets(kept)


# Which version of this program wrote a checkpoint, and whether this one can go on with it.
#
# ``format`` in ``run.json`` and ``job.json`` is the version of everything in a rank's folder. It grows with each
# release that an earlier one could misread. Code goes on with every format that it lists here, and the next start
# writes its own; it refuses a newer one before it reads anything else, and names the release (``written_by``) to
# install.
#
# format first written by what changed 1 0.1.0 2 0.2.0 history.jsonl, job.json, shard.json; times, work and hashes of
# the hub in commits, and checksums of answers, which 0.1.0 takes for damage 3 0.2.0 a checksum in front of run.json,
# job.json, shard.json and shares.json, which earlier builds of 0.2.0 take for a setting 4 0.2.0 results without a
# wrapper in journals (``documents.encode_finished``)

FORMAT = 4
"""What this version writes."""
SEALED_FORMATS = range(3, FORMAT + 1)
"""``run.json`` and ``job.json`` of these have a checksum."""
OLDEST_FORMAT = 1
"""All formats from this one on can be continued. It stays as it is within a major version of the package."""
FORMAT_KEY = "format"
WRITTEN_BY = "written_by"
"""In ``run.json`` and ``job.json``: the version of the package that wrote the file. 0.1.0 wrote none."""
RESHARDS = "reshards"
"""In ``run.json``: how many times ``shares.json`` said, at the rank's last start, that the input was dealt out anew."""
NO_SETTINGS = frozenset({FORMAT_KEY, WRITTEN_BY, FORKED, RESHARDS, "owner", "accepted_changes"})
"""What ``run.json`` and ``job.json`` hold besides the identity of the run."""
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!-]{0,39}")


def stamped(fields: Mapping[str, Any]) -> dict[str, Any]:
    """An identity as this version writes it: with its format and its version in front."""
    rest = {name: value for name, value in fields.items() if name not in (FORMAT_KEY, WRITTEN_BY)}
    return {FORMAT_KEY: FORMAT, WRITTEN_BY: __version__, **rest}


def settings_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """The identity in the content of ``run.json`` or ``job.json``: the settings that all ranks of a run share."""
    return {name: value for name, value in content.items() if name not in NO_SETTINGS}


def check_format(where: object, content: object, known: int = FORMAT, written_by: object = None) -> None:
    """Checks that this version can go on with what another one wrote. Anything without a number passes.

    Args:
        where: the file, for the message.
        content: of the file; its ``format`` is compared.
        known: the newest format of such files.
        written_by: the version that wrote it, if ``content`` does not say.

    Raises:
        VersionMismatch: it is of a newer version, or of one that is too old.
    """
    number = content.get(FORMAT_KEY) if isinstance(content, dict) else None
    if type(number) is not int or OLDEST_FORMAT <= number <= known:
        return
    assert isinstance(content, dict)
    writer = content.get(WRITTEN_BY, written_by)
    is_named = isinstance(writer, str) and writer != __version__ and _VERSION.fullmatch(writer) is not None
    who = f"datatrove-ckpt {writer}" if is_named else f"{'a newer' if number > known else 'an older'} datatrove-ckpt"
    is_new = number > known
    get = f"datatrove-ckpt {writer}{' or newer' * is_new}" if is_named else "the version that wrote it"
    formats = f"format {known}" if known == OLDEST_FORMAT else f"formats {OLDEST_FORMAT} to {known}"
    raise VersionMismatch(
        f"{where} was written by {who} (format {number}). This is datatrove-ckpt {__version__}, which reads {formats}. "
        f"Nothing was changed. Install {get}, and run the same command again; or start a new run in other folders."
    )
