"""What makes two runs the same run: a flat dict of plain values, whose names appear in ``CheckpointMismatch``.

Settings that cannot change an answer (concurrency, timeouts, parallelism, log folders) are left out, so they may
change freely. A rollout function is described by its code (see ``code_hash.py``), the variables of enclosing functions,
its default arguments, the plain values among the globals of its module that it names (a PROMPT constant, for example),
and the functions of its own module that it calls. Of a secret (see ``redaction.py``) the hash is kept.

Functions and literals of the user's other modules that it uses have fields of their own (see ``followed_code.py``).

Limits: what the rollout reads from files, and installed packages, are not seen. Of a value that JSON cannot express
(a set, a path, an object) only the type is seen. Lists and dicts are taken as they were when the step was made, because
a rollout may use one as a cache. What a pickle holds by value is described as it was when the job was made (see
``describe_code.py``).

The description is the same on every supported Python version. That of release 0.1.0 was not. It is made as well, so
that a checkpoint of 0.1.0 continues on the Python version that it was made with.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datatrove.pipeline.writers.disk_base import DiskWriter
from loguru import logger

from datatrove_ckpt.checkpoint.identity import RunIdentity, fields_without_secrets
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation import code_hash, code_hash_0_1
from datatrove_ckpt.generation.describe_code import CodeDescriber, Hashes, plain_value
from datatrove_ckpt.generation.unstable_values import unstable_values
from datatrove_ckpt.output.trial import writer_name

# The flags of a server that change its answers.
_ANSWERING_FLAGS = {
    "chat-template",
    "dtype",
    "generation-config",
    "hf-overrides",
    "lora-modules",
    "override-generation-config",
    "quantization",
    "reasoning-parser",
    "revision",
    "rope-scaling",
    "seed",
    "server-script",
    "tokenizer",
    "tool-call-parser",
}
_PROCESS = secrets.token_hex(8)
_VERSION = 2
"""Version of the description, in ``run.json``. Release 0.1.0 wrote none."""
_BYTECODE_NOTE = "without its source, code is compared by its bytecode, which differs between Python versions"
_MOVED_NOTE = "if checkpoint and output were copied there: datatrove-ckpt relocate CHECKPOINTS --output NEW_FOLDER"
_0_1_NOTE = (
    "release 0.1.0 hashed code in a way that differs between Python versions; if only Python has changed, continue the "
    "run once with the Python version that made the checkpoint, or set accept_changes=True"
)


@dataclass(frozen=True)
class CodeIdentity:
    """What the user's code adds to a run's identity.

    A step keeps one that was made when the step was made, and is pickled with it.
    """

    fields: dict[str, Any]
    fields_0_1: dict[str, Any]
    """The same code as release 0.1.0 described it."""
    bytecode: dict[str, str] = field(default_factory=dict)
    """Digests of the functions that ``fields`` describes by a hash, by field."""
    process: str = ""
    """The process that made the step. One that it forked is the same, since it has the same functions."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A step that an earlier version pickled has no digests.
        vars(self).update({"bytecode": {}, "process": "", **state})


def code_identity(
    rollout_fn: Any, shared_context: Any, when_made: CodeIdentity | dict[str, Any] | None = None
) -> CodeIdentity:
    """Describes the user's code.

    Args:
        when_made: what this gave in the process that made the job, possibly long ago and on another machine. Functions
            that were pickled by value, and settings, are described as they were then. A dict in a step that was pickled
            by 0.1.0. None: the job is being made now.
    """
    if when_made is None:
        return _describe(rollout_fn, shared_context, CodeIdentity({}, {}))
    if isinstance(when_made, dict):
        made_0_1 = fields_without_secrets(when_made)
        now = _describe(rollout_fn, shared_context, CodeIdentity({}, made_0_1))
        made = CodeIdentity(_from_0_1(made_0_1, now), made_0_1)
    else:
        made = when_made
        now = _describe(rollout_fn, shared_context, made)
    travelled = made.process != _PROCESS
    return CodeIdentity(
        _code_fields(now.fields, made.fields, travelled),
        _code_fields(now.fields_0_1, made.fields_0_1, travelled),
        {**made.bytecode, **now.bytecode},
        made.process,
    )


def check_stable(rollout_fn: Any, shared_context: Any, accept_changes: bool) -> None:
    """Refuses code whose description would differ at each start, before the run is paid for.

    Args:
        accept_changes: only warn, because each start accepts the new values.

    Raises:
        ConfigError: names the function, the variable, where its value comes from, and what to do.
    """
    describer = CodeDescriber(code_hash, {}, {})
    fields = describer.code(rollout_fn, shared_context)
    if not (found := list(unstable_values(fields, describer.variables))):
        return
    text = (
        f"rollout_fn: {'; '.join(found)}. So the value differs at each start. It is a part of the run's identity: no "
        "start could continue this run. Compute it inside the function, or in a function that is given as "
        "shared_context (neither is compared), or give it a fixed value"
    )
    if not accept_changes:
        raise ConfigError(f"{text}; or set accept_changes, if old and new values may be mixed.")
    logger.warning(f"{text}. With accept_changes each start goes on with its own value.")


def _describe(rollout_fn: Any, shared_context: Any, made: CodeIdentity) -> CodeIdentity:
    today = CodeDescriber(code_hash, made.fields, made.bytecode)
    as_0_1_0 = CodeDescriber(code_hash_0_1, made.fields_0_1, made.bytecode)
    fields = today.code(rollout_fn, shared_context)
    fields |= today.followed()
    return CodeIdentity(fields, as_0_1_0.code(rollout_fn, shared_context), today.bytecode, _PROCESS)


def run_identity(
    code: CodeIdentity,
    config: InferenceConfig,
    writer: DiskWriter,
    records_per_chunk: int,
    metadata_key: str,
    world_size: int,
    how_to_accept: str,
) -> RunIdentity:
    """The identity of a run, as plain JSON values.

    Args:
        code: see ``code_identity``.
    """
    output = {
        "metadata_key": metadata_key,
        "records_per_chunk": records_per_chunk,
        "tasks": world_size,
        "output_writer": writer_name(writer),
        "output_folder": writer.output_folder.resolve_paths(""),
        "output_filename": writer.output_filename.template,
    }
    fields = {"identity_version": _VERSION, **_config_fields(config, code_hash), **code.fields, **output}
    fields_0_1 = {**_config_fields(config, code_hash_0_1), **code.fields_0_1, **output}
    functions, functions_0_1 = _function_notes(fields), _function_notes(fields_0_1)
    functions, functions_0_1 = ({**notes, "output_folder": _MOVED_NOTE} for notes in (functions, functions_0_1))
    bytecode = {name: _BYTECODE_NOTE for name, value in fields.items() if code_hash.is_bytecode(value)}
    hashes_0_1 = {name: _0_1_NOTE for name, value in fields_0_1.items() if value != fields.get(name)}
    earlier = RunIdentity(fields_0_1, _joined(functions_0_1, hashes_0_1))
    return RunIdentity(fields, _joined(functions, bytecode), earlier, how_to_accept)


def answering_flags(model_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The flags of a server that change its answers, by their names in alphabetical order."""
    flags = {name.replace("_", "-"): value for name, value in (model_kwargs or {}).items()}
    return {name: flags[name] for name in sorted(_ANSWERING_FLAGS & set(flags))}


def _config_fields(config: InferenceConfig, hashes: Hashes) -> dict[str, Any]:
    flags = answering_flags(config.model_kwargs)
    return {
        "model": config.model_name_or_path,
        "canned_answers": config.server_type == "dummy",
        "use_chat": config.use_chat,
        "default_generation_params": plain_value(config.default_generation_params, hashes),
        "model_kwargs": {name: plain_value(value, hashes) for name, value in flags.items()},
        "rollouts_per_document": config.rollouts_per_document,
        # Left out when it is None: checkpoints of before it was there continue.
        **({} if config.seed is None else {"seed": config.seed}),
        # Answers that were believed must not become a part of a run that would not believe them, nor the other way.
        **({"accept_null_finish_reason": True} if config.accept_null_finish_reason else {}),
    }


def _function_notes(fields: dict[str, Any]) -> dict[str, str]:
    """Which function each hash of code describes."""
    notes = {}
    for name in fields:
        place, is_code = name.removesuffix(" code"), name.endswith(" code")
        owner, _, last = place.rpartition(".")
        if is_code:
            known = fields.get(place) or (f"{fields[owner]}.{last}" if last == "__call__" else last)
            notes[name] = f"code of the function {known}"
    return notes


def _joined(first: dict[str, str], second: dict[str, str]) -> dict[str, str]:
    return {name: "; ".join(filter(None, [first.get(name), second.get(name)])) for name in {**first, **second}}


_NAMES = ("rollout_fn", "shared_context")


def _code_fields(now: dict[str, Any], when_made: dict[str, Any], travelled: bool) -> dict[str, Any]:
    """The description of the code now, with what must be taken as it was when the job was made.

    Lists, dicts, and the attributes of an object are settings when the step is made, and state later. If no code has
    changed, what is missing now was lost on the way to a worker (dill leaves out the name that ``functools.wraps``
    gave), and what is new is of the program that loads the pickle, whose globals such a function sees as its own.

    Args:
        travelled: another process has made the step.
    """
    kept = {name: value for name, value in when_made.items() if isinstance(value, list | dict)}
    if _is_object(when_made):
        attributes = [name for name in when_made if name.startswith("rollout_fn.") and not name.endswith(" code")]
        kept |= {name: when_made[name] for name in attributes}
        now = {name: value for name, value in now.items() if name in when_made}
    if all(now.get(name, value) == value for name, value in when_made.items() if name.endswith(" code")):
        kept |= {name: when_made[name] for name in when_made if name not in now or name in _NAMES}
        if travelled:
            now = {name: value for name, value in now.items() if name in when_made}
    return {**now, **kept}


def _from_0_1(when_made: dict[str, Any], now: CodeIdentity) -> dict[str, Any]:
    """A step that 0.1.0 pickled has its description of the code. What has not changed since has today's form, too."""
    return {
        name: now.fields[name] if value == now.fields_0_1.get(name) else value
        for name, value in when_made.items()
        if name in now.fields
    }


def _is_object(code: dict[str, Any]) -> bool:
    """The rollout is an object of a class with ``__call__``, not a function."""
    return "rollout_fn code" not in code
