"""The fields by which two runs are the same run, as ``run.json`` and ``job.json`` keep them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson

from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.checkpoint.versions import stamped
from datatrove_ckpt.redaction import environment_secrets, is_surely_secret, without_secrets

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
