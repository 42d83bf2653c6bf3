"""Adds the user's code to a run's identity, as a description of the source that it reaches
(``description``).

Functions that a pickle holds by value (of the script, nested, lambdas) are described as they were
when the job was made; imported functions are described as this process has imported them.
"""

import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from datatrove_ckpt.common import redaction
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.user_code.description import (
    PIPELINE,
    CodeDescription,
    describe,
    inspect_objects,
    is_detached,
)
from datatrove_ckpt.user_code.statements import CELL, digest

_PROCESS = secrets.token_hex(8)
_VERSION = 7
"""Version of the description, in ``run.json``. Each version describes code in another way.

Release 0.1.0 wrote no version.
"""
_NOTEBOOK_VERSION = 8
"""The version for the cells of a notebook."""
_CONSTANTS = (str, int, float, bytes, type(None))
_NOTHING = CodeDescription({}, {}, {}, [], frozenset(), [])
_SETTING = re.compile(r"(rollout_fn|shared_context)\.(?!.* code$)")


@dataclass(frozen=True)
class CodeIdentity:
    """The part of a run's identity that describes the user's code. It is pickled with its step."""

    made: CodeDescription
    process: str = ""
    """The process that described the code. Its forks have the same functions, and the same name."""
    version: int = 3
    """Version of the description. Pickles of version 3 hold no number."""
    things: tuple[object, ...] = ()
    """The described objects. A pickle with the step holds each object once."""
    given: Mapping[str, object] | None = None
    """Texts and numbers of the shared context, which a program may replace in its dictionary."""

    @property
    def fields(self) -> dict[str, object]:
        return self.made.fields

    @property
    def digest(self) -> str:
        return digest(repr(sorted(self.fields.items())))


def code_identity(
    rollout_fn: object,
    shared_context: object,
    when_made: CodeIdentity | None = None,
    output_writer: object = None,
    rollout_version: str | None = None,
) -> CodeIdentity:
    """Describes the user's code.

    Args:
        when_made: this function's result in the process that made the job, for code that was
            pickled by value. None: the job is being made now.
    """
    if rollout_version is not None:
        named = _NOTHING._replace(fields={"rollout_version": rollout_version})
        return CodeIdentity(named, version=_VERSION)
    # A job that was queued before an upgrade.
    if when_made is not None and when_made.version not in (_VERSION, _NOTEBOOK_VERSION):
        if when_made.made is None:  # version 5 and before: the code could not be described
            return CodeIdentity(_NOTHING, version=2)
        return when_made
    objects = (rollout_fn, shared_context, output_writer)
    shared = shared_context if isinstance(shared_context, dict) else {}
    constants = {
        name: setting for name, setting in shared.items() if isinstance(setting, _CONSTANTS)
    }
    if when_made is not None and (
        when_made.given != constants
        or any(
            current is not recorded
            for current, recorded in zip(objects, when_made.things, strict=False)
        )
    ):
        when_made = None
    if when_made is not None and when_made.process == _PROCESS:
        return when_made
    described = {
        "rollout_fn": rollout_fn,
        "shared_context": shared_context,
        **_of_writer(output_writer),
    }
    version = _VERSION
    before = None
    try:
        roots = inspect_objects(described).roots
        if any(CELL.match(root.file) for root in roots):
            version = _NOTEBOOK_VERSION
        if when_made is not None and any(map(is_detached, roots)):
            before = when_made.made
            version = when_made.version  # of the process that had the cells
        made = _redacted(describe(described, before), output_writer)
    except Exception as error:  # the user's objects may raise any error
        raise ConfigError(
            f"its code could not be described: {error!r}. Set rollout_version, and change it "
            "with the code.",
            setting="rollout_fn",
        ) from error
    # The objects hold settings when the step is made, and state later.
    if when_made is not None:
        made.fields.update(
            {name: value for name, value in when_made.fields.items() if _SETTING.match(name)}
        )
    return CodeIdentity(made, _PROCESS, version, objects, constants)


def code_of(thing: object) -> dict[str, str]:
    """Hashes the user's code that begins at a function or class. Empty for code of packages.

    Bytecode differs between Python versions, so its name contains the version.
    """
    try:
        fields = {} if _is_of_pipeline(thing) else describe({"step": thing}).fields
    except Exception:
        return {}
    if not fields:
        return {}
    python = ""
    if any(str(value).startswith("bytecode ") for value in fields.values()):
        python = f" in {sys.implementation.cache_tag}"
    return {f"code{python}": digest(repr(sorted(fields.items())))}


def _is_of_pipeline(thing: object) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in PIPELINE


def _of_writer(writer: object) -> dict[str, object]:
    described = {}
    adapter = getattr(writer, "adapter", None)
    adapter = getattr(adapter, "__func__", adapter)
    if adapter is not None and not _is_of_pipeline(adapter):
        described["output_writer.adapter"] = adapter
    if writer is not None and not _is_of_pipeline(type(writer)):
        described["output_writer"] = type(writer)
    return described


def _redacted(made: CodeDescription, writer: object) -> CodeDescription:
    """Removes secrets and long texts: the identity is written to run.json and executor.json."""
    secrets = redaction.environment_secrets(redaction.is_surely_secret).values()
    fields, by_value = (
        {
            name: _short(
                value if name.endswith(" code") else redaction.without_secrets(name, value, secrets)
            )
            for name, value in described.items()
        }
        for described in (made.fields, made.by_value)
    )
    if getattr(writer, "expand_metadata", False):
        fields["output_writer.expand_metadata"] = True
    return made._replace(fields=fields, by_value=by_value)


def _short(value: object) -> object:
    text = value
    if not isinstance(text, str):
        text = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    if len(text) <= 2000:
        return value
    return f"{len(text)} characters, hash {digest(text)}"
