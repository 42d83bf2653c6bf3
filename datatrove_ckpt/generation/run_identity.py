"""What identifies a run: a flat dict of plain values, whose names appear in ``CheckpointMismatch``.

Settings that cannot change an answer (concurrency, timeouts, log folders) are left out. Source
reached by the user's code describes the code (``user_code.description``). Secrets are hashed.

Functions that a pickle holds by value (of the script, nested, lambdas) are described as they were
when the job was made; imported functions as this process has imported them.
"""

import operator
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import orjson
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.identity import (
    ENDPOINT_MODELS,
    OUTPUT_FOLDER,
    RunIdentity,
    decides,
    fields_without_secrets,
    of_model,
)
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import Engine, dashed_names
from datatrove_ckpt.config.templates import BARE
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.output.names import writer_name
from datatrove_ckpt.user_code.description import (
    PIPELINE,
    CodeDescription,
    describe,
    is_away,
    look_at,
    type_name,
)
from datatrove_ckpt.user_code.statements import digest

_PROCESS = secrets.token_hex(8)
_VERSION = 7
"""Version of the description, in ``run.json``.

Release 0.1.0 wrote none. What code is differs between versions.
"""
_UNDESCRIBED = 2
"""Version where the code could not be described, up to version 5."""
_SHOWN_CHARACTERS = 2000
_CONSTANTS = (str, int, float, bytes, type(None))
_OTHER_NAME = "an endpoint names a model that is new to the run; set it only if it is the same one"
CHAT_TEXTS = "rollout_fn.chat_texts"
"""The field of runs that take JSON in ``prompt_column`` for the chat that it is."""
_NOTHING = CodeDescription({}, {}, {}, [], frozenset(), [])
_SETTING = re.compile(r"(rollout_fn|shared_context)\.(?!.* code$)")


@dataclass(frozen=True)
class CodeIdentity:
    """What the user's code adds to a run's identity.

    Made with a step, and pickled with it.
    """

    made: CodeDescription
    process: str = ""
    """The process that described the code.

    One that it forked is the same, since it has the same functions.
    """
    version: int = 3
    """Version of the description. Pickles of version 3 hold no number."""
    things: tuple[object, ...] = ()
    """What is described. A pickle holds these objects and the step's as the same ones."""
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
        when_made: this function's result in the process that made the job, for what was pickled by
            value. None: the job is being made now.
        output_writer: its adapter is code of the user, too.
        rollout_version: replaces the description.
    """
    if rollout_version is not None:
        named = _NOTHING._replace(fields={"rollout_version": rollout_version})
        return CodeIdentity(named, version=_VERSION)
    # A job that was queued before an upgrade.
    if when_made is not None and when_made.version != _VERSION:
        if when_made.made is None:  # version 5 and before: the code could not be described
            return CodeIdentity(_NOTHING, version=_UNDESCRIBED)
        return when_made
    things = (rollout_fn, shared_context, output_writer)
    shared = shared_context if isinstance(shared_context, dict) else {}
    given = {name: one for name, one in shared.items() if isinstance(one, _CONSTANTS)}
    if when_made is not None and (
        when_made.given != given or not all(map(operator.is_, things, when_made.things))
    ):
        when_made = None
    if when_made is not None and when_made.process == _PROCESS:
        return when_made
    described = {
        "rollout_fn": rollout_fn,
        "shared_context": shared_context,
        **_of_writer(output_writer),
    }
    before = None
    if when_made is not None and any(map(is_away, look_at(described).roots)):
        before = when_made.made
    try:
        made = _shown(describe(described, before), output_writer)
    except Exception as error:  # the user's objects may do anything when they are looked at
        raise ConfigError(
            f"its code could not be described, so a resume could not compare it: {error!r}. Set "
            "rollout_version to a text that you change with the code.",
            setting="rollout_fn",
        ) from error
    # The object holds settings when the step is made, and state later.
    if when_made is not None:
        made.fields.update(
            {name: value for name, value in when_made.fields.items() if _SETTING.match(name)}
        )
    return CodeIdentity(made, _PROCESS, _VERSION, things, given)


def code_of(thing: object) -> dict[str, str]:
    """Hashes the user's code that begins at a function or class. Empty for code of packages.

    Bytecode differs between Pythons, so its name says which.
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
    found: dict[str, object] = {}
    adapter = getattr(writer, "adapter", None)
    adapter = getattr(adapter, "__func__", adapter)
    if adapter is not None and not _is_of_pipeline(adapter):
        found["output_writer.adapter"] = adapter
    if writer is not None and not _is_of_pipeline(type(writer)):
        found["output_writer"] = type(writer)
    return found


def _shown(made: CodeDescription, writer: object) -> CodeDescription:
    """Removes secrets and long texts: the identity is written to run.json and executor.json."""
    fields, own = (
        {name: _short(value) for name, value in fields_without_secrets(each).items()}
        for each in (made.fields, made.own)
    )
    if getattr(writer, "expand_metadata", False):
        fields["output_writer.expand_metadata"] = True
    return made._replace(fields=fields, own=own)


def _short(value: object) -> object:
    text = value
    if not isinstance(text, str):
        text = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    if len(text) <= _SHOWN_CHARACTERS:
        return value
    return f"{len(text)} characters, hash {digest(text)}"


def run_identity(
    code: CodeIdentity,
    models: Mapping[str, InferenceConfig],
    writer: DiskWriter,
    records_per_chunk: int,
    metadata_keys: JsonObject,
    world_size: int,
    begun: JsonObject,
) -> RunIdentity:
    """Returns the identity of a run. ``begun``: the settings with which it began, if it did."""
    output = {
        **metadata_keys,
        "records_per_chunk": records_per_chunk,
        "tasks": world_size,
        "output_writer": writer_name(writer),
        OUTPUT_FOLDER: writer.output_folder.resolve_paths(""),
        "output_filename": writer.output_filename.template,
    }
    version = {"identity_version": code.version}
    notes = {name: note for name, note in code.made.notes.items() if name in code.fields}
    notes[OUTPUT_FOLDER] = "a task is running: stop the run before its output is moved"
    notes[CHAT_TEXTS] = "before, JSON in prompt_column was sent as one message; others are the same"
    notes[ENDPOINT_MODELS] = _OTHER_NAME
    fields = {**version, **_fields_of_models(models), **code.fields, **output}
    # Answers that it has may come from endpoints that are no more in the list.
    for name, found in begun.items():
        if of_model(name) == ENDPOINT_MODELS:
            fields[name] = sorted({*found, *fields.get(name, ())})
    if b'"extra_body":' in orjson.dumps(fields):
        fields["extra_body"] = "merged"
        notes["extra_body"] = "before, the server got it as a key of that name"
    return RunIdentity(fields, notes)


def servers_digest(models: Mapping[str, InferenceConfig]) -> str:
    """Hashes the settings of servers that affect answers, and are not in a payload."""
    of_models = _fields_of_models(models)
    answering = {name: value for name, value in of_models.items() if decides(name)}
    # The providers of ``endpoints`` have one model, whichever they are.
    places = [(config.server_type, sorted(map(redact, config.urls))) for config in models.values()]
    return digest(repr((sorted(answering.items()), places)))


def sent_chats_as_texts(begun: JsonObject) -> bool:
    """Whether a run that has begun sent JSON in ``prompt_column`` as one message."""
    is_of_column = (
        begun.get("rollout_fn.prompt_column") and begun.get("rollout_fn.prompt") in BARE
    ) or "rollout_version" in begun
    return bool(is_of_column) and CHAT_TEXTS not in begun


def answering_flags(engine: Engine, model_kwargs: Mapping[str, object] | None) -> JsonObject:
    flags = dashed_names(model_kwargs)
    return {name: flags[name] for name in sorted(engine.answering_flags & set(flags))}


def _fields_of_models(models: Mapping[str, InferenceConfig]) -> JsonObject:
    """Returns the fields of all models; names of models after the first precede theirs."""
    first, *others = models
    fields = _config_fields(models[first])
    if others:
        fields["models"] = [first, *others]
    for name in others:
        found = _config_fields(models[name])
        fields |= {
            f"{name}.{field}": found[field] for field in found if field != "rollouts_per_document"
        }
    return fields


def _config_fields(config: InferenceConfig) -> JsonObject:
    flags = answering_flags(config.engine, config.model_kwargs)
    fields = {
        "model": config.model_name_or_path,
        "canned_answers": config.engine.is_canned,
        "use_chat": config.use_chat,
        "default_generation_params": _plain(config.default_generation_params),
        "model_kwargs": {name: _plain(value) for name, value in flags.items()},
        "rollouts_per_document": config.rollouts_per_document,
    }
    for name in config.compared:
        value = getattr(config, name)
        if value != InferenceConfig.__dataclass_fields__[name].default:
            fields[name] = _plain(value)
    if config.other_models:
        fields[ENDPOINT_MODELS] = config.other_models
    return fields


def _plain(value: object) -> object:
    """Converts a setting to JSON; other values become their type."""
    try:
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
    except TypeError:
        return f"<{type_name(type(value))}>"
