"""Builds a run's identity: a flat dict of plain values, whose names appear in
``CheckpointMismatch``.

Settings that cannot change an answer (concurrency, timeouts, log folders) are left out. Secrets are
hashed. Release 0.2.0 pickled ``CodeIdentity`` under the name of this module.
"""

from collections.abc import Mapping

import orjson
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint.identity import (
    ENDPOINT_MODELS,
    OUTPUT_FOLDER,
    RunIdentity,
    affects_answers,
    without_model,
)
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.config.inference_config import KV_CACHE_FLAGS, Engine, dashed_names
from datatrove_ckpt.config.templates import BARE
from datatrove_ckpt.output.file_names import writer_name
from datatrove_ckpt.user_code.code_identity import CodeIdentity
from datatrove_ckpt.user_code.description import type_name
from datatrove_ckpt.user_code.statements import digest

_OTHER_NAME = "an endpoint names a new model; set it only if it is the same"
CHAT_TEXTS = "rollout_fn.chat_texts"
"""The field of runs that send a chat, as JSON in ``prompt_column``, as a chat."""


def run_identity(
    code: CodeIdentity,
    models: Mapping[str, InferenceConfig],
    writer: DiskWriter,
    records_per_chunk: int,
    metadata_keys: JsonObject,
    world_size: int,
    recorded: JsonObject,
) -> RunIdentity:
    """``recorded``: the settings with which the run began, or {}."""
    output = {
        **metadata_keys,
        "records_per_chunk": records_per_chunk,
        "tasks": world_size,
        "output_writer": writer_name(writer),
        OUTPUT_FOLDER: writer.output_folder.resolve_paths(""),
        "output_filename": writer.output_filename.template,
    }
    notes = {name: note for name, note in code.made.notes.items() if name in code.fields}
    notes[OUTPUT_FOLDER] = "a task is running: stop the run first"
    notes[CHAT_TEXTS] = "before, JSON in prompt_column was sent as one message"
    notes[ENDPOINT_MODELS] = _OTHER_NAME
    fields: JsonObject = {"identity_version": code.version}
    fields |= _fields_of_models(models) | code.fields | output
    for name, flags in fields.items():
        is_new = without_model(name) == "model_kwargs" and KV_CACHE_FLAGS & {*flags}
        if is_new and not KV_CACHE_FLAGS & {*recorded.get(name, ())}:
            notes[name] = "before, types of the KV cache were not recorded"
    # The run's answers may come from endpoints that are no longer in the list.
    for name, models_before in recorded.items():
        if without_model(name) == ENDPOINT_MODELS:
            fields[name] = sorted({*models_before, *fields.get(name, ())})
    if b'"extra_body":' in orjson.dumps(fields):
        fields["extra_body"] = "merged"
        notes["extra_body"] = "before, the server got it as a key of that name"
    return RunIdentity(fields, notes)


def servers_digest(models: Mapping[str, InferenceConfig]) -> str:
    of_models = _fields_of_models(models)
    answering = {name: value for name, value in of_models.items() if affects_answers(name)}
    # The providers of ``endpoints`` have one model, whichever they are.
    servers = [(config.server_type, sorted(map(redact, config.urls))) for config in models.values()]
    return digest(repr((sorted(answering.items()), servers)))


def sent_chats_as_texts(recorded: JsonObject) -> bool:
    is_of_column = (
        recorded.get("rollout_fn.prompt_column") and recorded.get("rollout_fn.prompt") in BARE
    ) or "rollout_version" in recorded
    return bool(is_of_column) and CHAT_TEXTS not in recorded


def answering_flags(engine: Engine, model_kwargs: JsonObject | None) -> JsonObject:
    flags = dashed_names(model_kwargs)
    return {name: flags[name] for name in sorted(engine.answering_flags & set(flags))}


def _fields_of_models(models: Mapping[str, InferenceConfig]) -> JsonObject:
    first, *later = models
    fields = _config_fields(models[first])
    if later:
        fields["models"] = [first, *later]
    for name in later:
        config_fields = _config_fields(models[name])
        fields |= {
            f"{name}.{field}": config_fields[field]
            for field in config_fields
            if field != "rollouts_per_document"
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
    try:
        return orjson.loads(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
    except TypeError:
        return f"<{type_name(type(value))}>"
