"""Compares two runs: the settings in which they differ, the error that refuses them, and the
records of differences that a user accepted.
"""

import datetime
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import orjson

from datatrove_ckpt.checkpoint.checksummed_lines import Json
from datatrove_ckpt.checkpoint.identity import (
    IDENTITY_VERSION,
    OUTPUT_FOLDER,
    RunIdentity,
    comparable,
    settings_in,
)
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.errors import CheckpointMismatch, setting_name

# Reshards: an earlier build changed the number of tasks, so that ranks read parts of files.
_LAYOUT = frozenset({"records_per_chunk", "tasks", "reshards", OUTPUT_FOLDER})


class SettingChange(NamedTuple):
    """A field in which two runs differ."""

    field: str
    old: object
    new: object
    lines: list[str]
    note: str | None

    @property
    def is_layout(self) -> bool:
        """Whether the folder's content depends on the field, so that accept_changes refuses it."""
        return self.field in _LAYOUT


def compare(
    recorded: Json, identity: RunIdentity, with_output: bool = False
) -> list[SettingChange]:
    """Returns the fields in which a run differs from the content of a ``run.json`` or ``job.json``.

    Args:
        with_output: also compare ``output_folder``.
    """
    old = settings_in(recorded)
    new = settings_in(identity.stored)
    if not describe_alike(old, new):
        old = without_code(old)
        new = without_code(new)
    changes = []
    for name in dict.fromkeys([*old, *new]):
        lines = differences(name, old.get(name, _NOT_SET), new.get(name, _NOT_SET))
        if lines and (with_output or name != OUTPUT_FOLDER):
            note = identity.notes.get(name)
            changes.append(SettingChange(name, old.get(name), new.get(name), lines, note))
    return changes


def differences(name: str, old: object, new: object) -> list[str]:
    is_set = old is not _NOT_SET and new is not _NOT_SET
    if is_set and same_value(name, old, new):
        return []
    lines = []
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            lines += differences(f"{name}.{key}", old.get(key, _NOT_SET), new.get(key, _NOT_SET))
    return lines or [f"{setting_name(name)}: {_display(old)} -> {_display(new)}"]


def describe_alike(old: Json, new: Json) -> bool:
    return bool(old.get(IDENTITY_VERSION) == new.get(IDENTITY_VERSION))


def is_of_code(changes: Iterable[SettingChange]) -> bool:
    return not without_code({change.field: change.new for change in changes})


def without_code(fields: Json) -> Json:
    of_code = r"identity_version$|(rollout_fn|shared_context|imports|uses)\b|output_writer\."
    return {name: value for name, value in fields.items() if not re.match(of_code, name)}


def changes_text(subject: str, changes: Sequence[SettingChange]) -> str:
    lines = [line for change in changes for line in change.lines]
    lines += [f"({change.note})" for change in changes if change.note]
    return "\n  ".join([f"{subject} made by another run:", *dict.fromkeys(lines)]) + "\n"


def mismatch_error(
    subject: str, changes: Sequence[SettingChange], advice: str = "", may_mix: bool = True
) -> CheckpointMismatch:
    text = f"{changes_text(subject, changes)}{advice}"
    old = changes[0].old
    if [change.field for change in changes] == ["tasks"] and isinstance(old, int):
        return CheckpointMismatch(
            f"{text}Go on with {plural(old, 'task')} (tasks: {old}).",
            changes=[{"tasks": old}],
            starts_over="with old results",
        )
    text += "Go on with the old settings"
    if not may_mix or any(change.is_layout for change in changes):
        return CheckpointMismatch(f"{text}.", starts_over="anew")
    return CheckpointMismatch(
        f"{text}, or set accept_changes to mix the two.",
        changes=[{"accept_changes": True}],
        starts_over="anew",
    )


def records(changes: Iterable[SettingChange]) -> list[Json]:
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return [
        {"when": when, "field": change.field, "old": change.old, "new": change.new}
        for change in changes
    ]


def new_records(accepted: Sequence[Json], identity: RunIdentity) -> list[Json]:
    recorded = [change | {"when": ""} for change in accepted]
    return [change for change in identity.accepted if change | {"when": ""} not in recorded]


def mixed_settings(changes: Iterable[Json]) -> list[tuple[str, str, str]]:
    """Returns each accepted change once, as field, old and new value (JSON, cut off). Omits changes
    of the output folder. A change of requests, which the replay check found, has a path.
    """
    settings = [
        (
            str(change.get("field", f"requests ({change.get('path')})")),
            _display(change.get("old", _NOT_SET)),
            _display(change.get("new", _NOT_SET)),
        )
        for change in changes
        if change.get("field") != OUTPUT_FOLDER
    ]
    return [*dict.fromkeys(settings)]


def _display(value: object) -> str:
    if value is _NOT_SET:
        return "(not set)"
    text = orjson.dumps(value).decode()
    if len(text) <= 300:
        return text
    return f"{text[:300]}... ({len(text)} characters)"


_NOT_SET = object()
_HASH = re.compile(rb'"hash (scrypt|keyed-[0-9a-f]{8})-[0-9a-f]{32}"')  # see redaction.hashed


def same_value(name: str, old: object, new: object) -> bool:
    old = comparable(name, old)
    new = comparable(name, new)
    before, after = ({match[1] for match in _HASH.finditer(value)} for value in (old, new))
    if before and after and before != after:
        old, new = (_HASH.sub(b"", value) for value in (old, new))
    return bool(old == new)
