"""Builds an executor from a YAML file. Each mistake is one line that names step, key, value and what is allowed.

    executor:
      class_path: LocalPipelineExecutor       a short name of SHORT_NAMES, or any import path
      init_args:                              the arguments of its constructor
        tasks: 4
        pipeline:
          - class_path: JsonlReader
            init_args: {data_folder: documents}

This module walks the tree, and jsonargparse checks one plain value at a time: for a typo in the whole file, with its
lists of unions, jsonargparse's message is pages long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import json
import re
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonargparse
import yaml  # type: ignore[import-untyped]

from datatrove_ckpt.cli.annotations import (
    ANYTHING,
    REQUIRED,
    alternatives,
    choices_of,
    fits,
    in_words,
    is_callable,
    is_class,
    origin,
    parameters_of,
)
from datatrove_ckpt.cli.yaml_text import Loader
from datatrove_ckpt.config.paths import refuse_variables
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import missing_package
from datatrove_ckpt.redaction import HIDDEN, check_options, may_name_secret

_NAMES_BY_MODULE = {
    "datatrove_ckpt": "InferenceRunner InferenceConfig LocalPipelineExecutor",
    "datatrove_ckpt.readers": "HuggingFaceDatasetReader IpcReader JsonlReader ParquetReader",
    "datatrove_ckpt.rollouts": "PromptRollout CompletionRollout ChunkedRollout BestOfRollout chat",
    "datatrove.executor": "SlurmPipelineExecutor RayPipelineExecutor",
    "datatrove.pipeline.readers": "CSVReader WarcReader",
    "datatrove.pipeline.writers": "HuggingFaceBucketWriter HuggingFaceDatasetWriter JsonlWriter ParquetWriter",
    "datatrove.pipeline.filters": "C4BadWordsFilter C4ParagraphFilter C4QualityFilter FastTextClassifierFilter "
    "FineWebQualityFilter GopherQualityFilter GopherRepetitionFilter LambdaFilter LanguageFilter RegexFilter "
    "SamplerFilter UnigramLogProbFilter URLFilter",
    "datatrove.pipeline.extractors": "Trafilatura",
    "datatrove.pipeline.formatters": "FTFYFormatter PIIFormatter SymbolLinesFormatter",
}
MASK = "*** hidden ***"
"""What ``run --dry-run`` writes in the place of a secret. No file with it is built."""
_EXPANDED = {"checkpoints_local_dir", "server_log_folder", "metrics_file", "metrics_targets"}  # where the task runs
SHORT_NAMES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

# With 0 of these, datatrove does nothing and reports success. The values say what -1 stands for.
_NUMBERS = {"tasks": "", "workers": "one per task", "local_tasks": "all", "tasks_per_job": ""}


def load(path: str | Path) -> dict[str, Any]:
    """The file's content. Builds nothing.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not have the one key "executor".
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {problem}.") from None
    if not isinstance(content, dict) or "executor" not in content:
        raise ConfigError(f'{path}: must have the key "executor" at the top, with class_path and init_args.')
    _refuse_unknown(content, ["executor"], str(path))
    return content


def build(content: dict[str, Any]) -> Any:
    """Builds the executor and every step of its pipeline.

    Raises:
        ConfigError: the first mistake in the file.
    """
    from datatrove.executor.base import PipelineExecutor

    _refuse_mask(content["executor"], "")
    executor = _build(content["executor"], "executor", [PipelineExecutor])
    for name, default in _NUMBERS.items():
        number = (content["executor"].get("init_args") or {}).get(name, 1)
        if number < 1 and (number != -1 or not default):
            allowed = f"at least 1, or -1 for {default}" if default else "at least 1"
            raise ConfigError(f"executor {type(executor).__name__}: {name}: must be {allowed}; it is {number}.")
    return executor


def _refuse_mask(value: Any, place: str) -> None:
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_mask(part, place if key == "init_args" else f"{place}.{key}")
    elif value == MASK:
        raise ConfigError(
            f"{place[1:]}: its value was hidden by --dry-run, because it may be a secret. Write the value in its "
            "place, into a file that only you can read."
        )


def _build(node: Any, place: str, kinds: list[Any]) -> Any:
    """Builds the object that a mapping with class_path and init_args describes."""
    if not isinstance(node, dict) or "class_path" not in node:
        raise ConfigError(f"{place}: needs class_path (and init_args); it is {show(node)}.")
    _refuse_unknown(node, ["class_path", "init_args"], place)
    found = import_name(node["class_path"], place)
    if not isinstance(found, type) or not fits(found, kinds):
        wanted = in_words(kinds) if isinstance(found, type) else "a class"
        raise ConfigError(f"{place}: class_path: {show(node['class_path'])} is not {wanted}.")
    label = f"{place} {found.__name__}" if place == "executor" or place.endswith("]") else place
    return _construct(found, node.get("init_args"), label)


def _construct(cls: Any, arguments: Any, label: str) -> Any:
    if not isinstance(arguments, dict | None):
        raise ConfigError(f"{label}: init_args: {show(arguments)} is not a mapping.")
    parameters, open_ended = parameters_of(cls)
    if not open_ended:
        _refuse_unknown(arguments or {}, list(parameters), label)
    if "api_key_env" in parameters and (arguments or {}).get("api_key"):
        raise ConfigError(
            f"{_inside(label, 'api_key')}: a key does not belong into a file. Export it where the tasks run, such as "
            "ENDPOINT_API_KEY, and write api_key_env: ENDPOINT_API_KEY instead of api_key."
        )
    values = {k: _value(parameters.get(k, ANYTHING).hint, v, label, k) for k, v in (arguments or {}).items()}
    missing = [f'"{key}"' for key, one in parameters.items() if one.default is REQUIRED and key not in values]
    if missing:
        raise ConfigError(f"{label}: missing key {', '.join(missing)}.")
    ours = cls.__module__.startswith("datatrove")
    if ours:
        _check_paths(label, values)
    try:
        built = cls(**values)
    except ImportError as error:
        raise ConfigError(_not_installed(error, values, label)) from error
    except Exception as error:
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ConfigError(f"{label}: {name}{error}") from error
    if ours:  # folders again, because a tuple or another argument may name one
        attributes = getattr(built, "__dict__", {})
        _check_paths(label, {key: value.path for key, value in attributes.items() if hasattr(value, "resolve_paths")})
    return built


def _check_paths(label: str, arguments: dict[str, Any]) -> None:
    """Refuses variables in paths that datatrove opens: it would make a folder of that name."""
    for key, value in arguments.items():
        if isinstance(value, str) and key.endswith(("_folder", "_dir", "_file")) and key not in _EXPANDED:
            refuse_variables(f"{label}: {key}", value)


def _not_installed(error: ImportError, values: dict[str, Any], label: str) -> str:
    """A step needs a package: itself, or for the URL of one of its arguments."""
    folders = {key: value[0] if isinstance(value, list) and value else value for key, value in values.items()}
    urls = [key for key, folder in folders.items() if isinstance(folder, str) and re.match(r"\w+://", folder)]
    key = f".{urls[0]}" if len(urls) == 1 else ""
    return f"{label}{key}: {missing_package(str(error)) or f'{type(error).__name__}: {error}'}"


def _value(hint: Any, value: Any, label: str, key: str) -> Any:
    """A value as its annotation requires it: built, imported, or checked by jsonargparse."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):  # [URL, storage options]
        check_options(value[1], value[0], _inside(label, key))
    kinds = alternatives(hint)
    is_object, plain = isinstance(value, dict) and "class_path" in value, [*filter(dataclasses.is_dataclass, kinds)]
    if isinstance(value, dict) and plain and not is_object:
        return _construct(plain[0], value, _inside(label, key))
    if is_object or (value is not None and all(map(is_class, kinds)) and not plain):
        return _build(value, _inside(label, key), kinds)
    if isinstance(value, list) and len(lists := [kind for kind in kinds if origin(kind) is list]) == 1:
        element = (typing.get_args(lists[0]) or (Any,))[0]
        return [_value(element, item, label, f"{key}[{index}]") for index, item in enumerate(value)]
    if Any in kinds or (isinstance(value, str) and str in kinds):  # jsonargparse would read "null" as None
        return value
    if isinstance(value, str) and any(map(is_callable, kinds)):
        return _function(value, label, key)
    with contextlib.suppress(jsonargparse.ArgumentError):
        return checked(hint, value)
    shown = HIDDEN if may_name_secret(key) else show(value)
    raise ConfigError(
        f"{label}: {key}: {shown} is not {in_words(kinds)}{_did_you_mean(value, choices_of(kinds)) or '.'}"
    )


def checked(hint: Any, value: Any) -> Any:
    """A plain value as its annotation requires it.

    Raises:
        jsonargparse.ArgumentError: it does not fit.
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
    except ValueError:
        return value  # a type that jsonargparse does not know: the constructor checks it
    if value is None and type(None) not in alternatives(hint):  # jsonargparse takes null for an int
        raise jsonargparse.ArgumentError(None, "null")
    return parser.parse_object({"value": value}).value


def _function(path: str, label: str, key: str) -> Any:
    place = _inside(label, key)
    found = import_name(path, place, "function")
    if isinstance(found, type) or not callable(found):
        advice = f"a class; write class_path: {path}" if isinstance(found, type) else "not a function"
        raise ConfigError(f'{place}: "{path}" is {advice}.')
    return found


def import_name(path: Any, place: str, what: str = "class") -> Any:
    """What a class_path, or another import path of the file, names.

    Raises:
        ConfigError: there is no such name, or its module cannot be imported.
    """
    module_name, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", str(path))
    if not module_name and name not in SHORT_NAMES:
        hint = _did_you_mean(name, SHORT_NAMES) or "; give its import path, such as my_module.my_name."
        raise ConfigError(f'{place}: no {what} "{name}"{hint}')
    module_name = module_name or SHORT_NAMES[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        advice = "correct the path, or install what is missing"
        if module_name.startswith("datatrove."):
            advice += " (datatrove's own filters and extractors: pip install 'datatrove[processing]')"
        raise ConfigError(
            f'{place}: {what} "{path}" needs module "{error.name}", which is not installed; {advice}.'
        ) from None
    except Exception as error:
        raise ConfigError(f'{place}: importing "{module_name}" failed: {type(error).__name__}: {error}') from error
    if not hasattr(module, name):
        raise ConfigError(f'{place}: no {what} "{name}" in {module_name}{_did_you_mean(name, dir(module)) or "."}')
    return getattr(module, name)


def _inside(label: str, key: str) -> str:
    """The path of an argument for messages; pipeline steps are pipeline[0], pipeline[1], ..."""
    return key if re.fullmatch(r"executor \w+", label) and key.startswith("pipeline[") else f"{label}.{key}"


def _refuse_unknown(mapping: dict[str, Any], known: list[str], place: str) -> None:
    for key in mapping:
        if key not in known:
            hint = _did_you_mean(key, known) or f"; allowed are {', '.join(known) or 'none'}."
            raise ConfigError(f'{place}: unknown key "{key}"{hint}')


def _did_you_mean(name: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f', did you mean "{close[0]}"?' if close else ""


def show(value: Any) -> str:
    """A value for a message: as JSON, shortened to 60 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
