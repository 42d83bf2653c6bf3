"""Builds an executor from a YAML file. A mistake is one line with step, key, value and
alternatives.

    executor:
      class_path: LocalPipelineExecutor       a short name of SHORT_NAMES, or any import path
      init_args:                              the arguments of its constructor
        tasks: 4
        pipeline:
          - class_path: JsonlReader
            init_args: {data_folder: documents}
"""

import contextlib
import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from datatrove_ckpt.cli import yaml_text
from datatrove_ckpt.common import JsonObject, redaction
from datatrove_ckpt.common.formatting import did_you_mean, missing_package
from datatrove_ckpt.common.setting_types import (
    alternatives,
    check_value,
    describe_types,
    is_callable,
    is_class,
    origin,
    parameters_of,
    show,
    takes,
)
from datatrove_ckpt.config.generation_params import REQUEST_PARAMETERS
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.errors.setting_names import form, setting_name
from datatrove_ckpt.output.formats import FORMATS
from datatrove_ckpt.readers import READERS

_Built = typing.TypeVar("_Built")
_NAMES_BY_MODULE = {
    "datatrove_ckpt": "InferenceRunner InferenceConfig LocalPipelineExecutor SlurmPipelineExecutor "
    "JobsPipelineExecutor",
    "datatrove_ckpt.readers": " ".join(reader.__name__ for reader in READERS),
    "datatrove_ckpt.rollouts": "PromptRollout CompletionRollout ChunkedRollout JudgeRollout "
    "EmbedRollout ClassifyRollout BatchRollout batch_line chat",
    "datatrove.executor": "RayPipelineExecutor",
    "datatrove.pipeline.readers": "WarcReader",
    "datatrove.pipeline.writers": "HuggingFaceBucketWriter HuggingFaceDatasetWriter",
    "datatrove.pipeline.filters": "C4BadWordsFilter C4ParagraphFilter C4QualityFilter "
    "FastTextClassifierFilter FineWebQualityFilter GopherQualityFilter GopherRepetitionFilter "
    "LambdaFilter LanguageFilter RegexFilter SamplerFilter UnigramLogProbFilter URLFilter",
    "datatrove.pipeline.extractors": "Trafilatura",
    "datatrove.pipeline.formatters": "FTFYFormatter PIIFormatter SymbolLinesFormatter",
}
MASK = "*** hidden ***"
"""What ``run --dry-run`` writes in the place of a secret. No file with it is built."""
_EXPANDED = {"checkpoints_local_dir", "server_log_folder"}  # where the task runs
SHORT_NAMES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
SHORT_NAMES |= {one.writer: one.module for one in FORMATS}

# What other tools call our settings.
OTHER_NAMES = {
    other: name
    for name, others in {
        "api_key_env": "key",
        "dp": "data_parallel_size",
        "endpoint": "api_base base_url url",
        "input": "data dataset file files input_dir input_file input_files inputs",
        "json_schema": "schema",
        "max_concurrent_generations": "batch_size concurrency max_concurrency "
        "max_concurrent max_parallel max_workers parallel threads",
        "max_tokens": "max_completion_tokens max_length max_new_tokens max_output_tokens",
        "model_max_context": "context_length ctx_size max_model_len n_ctx num_ctx",
        "pp": "pipeline_parallel_size",
        "request_max_attempts": "max_retries retries",
        "request_timeout": "timeout",
        "rollouts_per_document": "num_samples rollouts samples",
        "run_folder": "checkpoint_dir checkpoints_dir checkpoints_local_dir logging_dir out output "
        "output_dir output_folder output_path",
        "system_prompt": "system system_message",
        "text_key": "column text_column text_field",
        "tp": "tensor_parallel_size",
        "workers": "num_workers processes",
    }.items()
    for other in others.split()
}
_OF_REQUESTS = "default_generation_params"
_MOST_LISTED = 21
_SCALARS = {str, int, float, bool, type(None)}


def load(path: str | Path) -> JsonObject:
    """Reads the file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not have the key "executor".
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), yaml_text.Loader)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}. Give the YAML "
            "file of a job, or flags alone, such as --input."
        ) from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or error
        where = ""
        if mark:
            where = f":{mark.line + 1}:{mark.column + 1}"
        hint = ""
        if re.search("character '[@`%]|mapping values", str(problem)):
            hint = " Does a text need quotes?"
        if Path(path).suffix not in (".yaml", ".yml"):
            hint = " Is it the input? Then write --input before it."
        raise ConfigError(f"{path}{where}: not valid YAML: {problem}.{hint}") from None
    if not isinstance(content, dict) or not content.keys() & {"executor", "run_folder", "input"}:
        raise ConfigError(
            f'{path}: must have the key "executor" at the top, with class_path and init_args; or '
            "those of the short form: run_folder, input, prompt and model."
        )
    if "executor" in content:
        refuse_unknown(content, ["executor", "kubernetes"], str(path))
    return content


def build(content: JsonObject) -> Any:
    """Builds the executor and every step of its pipeline.

    Raises:
        ConfigError: the first mistake in the file.
    """
    from datatrove.executor.base import PipelineExecutor

    for place, value in leaves(content["executor"], "executor"):
        if value == MASK:
            raise ConfigError(
                f"{place}: its value was hidden by --dry-run, because it may be a secret. Write "
                "the value in its place, into a file that only you can read."
            )
    return _build(content["executor"], "executor", [PipelineExecutor])


def leaves(value: object, place: str) -> Iterator[tuple[str, object]]:
    """Yields the plain values in mappings and lists, each after its place as an override names
    it.
    """
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, place if key == "init_args" else f"{place}.{key}")
    else:
        if place.startswith("executor.pipeline."):
            place = place.removeprefix("executor.")
        yield place, value


def _build(node: object, place: str, kinds: Sequence[object]) -> object:
    if not isinstance(node, dict) or "class_path" not in node:
        raise ConfigError(f"{place}: needs class_path (and init_args); it is {show(node)}.")
    refuse_unknown(node, ["class_path", "init_args"], place)
    found = import_name(node["class_path"], place)
    shown = f"{place}: class_path: {show(node['class_path'])}"
    if not isinstance(found, type):
        raise ConfigError(f"{shown} is not a class.")
    origins = [Callable if is_callable(kind) else origin(kind) for kind in kinds]
    is_wanted = any(inspect.isclass(one) and issubclass(found, one) for one in origins)
    if not (is_wanted or Any in kinds):
        raise ConfigError(f"{shown} is not {describe_types(kinds)}.")
    label = place
    if place == "executor" or place.endswith("]"):
        label = form() or f"{place} {found.__name__}"
    return construct(found, node.get("init_args"), label)


def construct(cls: type[_Built], given: object, label: str) -> _Built:
    if not isinstance(given, dict | None):
        raise ConfigError(f"{label}: init_args: {show(given)} is not a mapping.")
    arguments: JsonObject = given or {}
    parameters, open_ended = parameters_of(typing.cast(Any, cls))
    if not open_ended:
        refuse_unknown(arguments, list(parameters), label)
    if "api_key_env" in parameters and arguments.get("api_key"):
        raise ConfigError(
            f"{_inside(label, 'api_key')}: a key does not belong into a file. Export it where the "
            "tasks run, such as ENDPOINT_API_KEY, and write api_key_env: ENDPOINT_API_KEY instead "
            "of api_key."
        )
    values = {
        key: _value(parameters.get(key, ANYTHING).annotation, value, label, key)
        for key, value in arguments.items()
    }
    absent = [
        f'"{key}"'
        for key, one in parameters.items()
        if one.default is inspect.Parameter.empty and key not in values
    ]
    if absent:
        raise ConfigError(f"{label}: missing key {', '.join(absent)}.")
    try:
        built = cls(**values)
    except ImportError as error:
        missing = missing_package(str(error)) or f"{type(error).__name__}: {error}"
        raise ConfigError(f"{label}: {missing}") from error
    except Exception as error:
        name = ""
        if not isinstance(error, ValueError):
            name = f"{type(error).__name__}: "
        raise ConfigError(f"{label}: {name}{error}") from error
    if cls.__module__.startswith("datatrove"):
        for key, value in getattr(built, "__dict__", {}).items():
            path = getattr(value, "path", value)
            # datatrove opens these, and would make a folder of a variable's name.
            is_opened = key.endswith(("_folder", "_dir", "_file")) and key not in _EXPANDED
            if is_opened and isinstance(path, str):
                redaction.refuse_variables(f"{label}: {setting_name(key)}", path)
    return built


def _value(hint: object, value: object, label: str, key: str) -> object:
    """Returns a value as its annotation requires it: built, imported or converted, and checked."""
    place = _inside(label, key)
    kinds = alternatives(hint)
    if isinstance(value, dict) and "class_path" in value:
        return _build(value, place, kinds)
    if isinstance(value, dict):
        inner = _value_hint(kinds, value)
        if inner is not None:
            return {name: _value(inner, one, place, name) for name, one in value.items()}
        for cls in _dataclasses(kinds):
            return construct(cls, value, place)
        if all(map(is_class, kinds)):
            return _build(value, place, kinds)
    elif isinstance(value, list):
        # [URL, storage options].
        if len(value) == 2 and isinstance(value[0], str):
            redaction.check_options(value[1], value[0], place)
        value = _items(kinds, value, label, key)
    elif isinstance(value, str) and not {str, Any} & {*kinds}:
        if any(map(is_callable, kinds)):
            found = import_name(value, place, "function")
            if isinstance(found, type):
                raise ConfigError(f'{place}: "{value}" is a class; write class_path: {value}.')
            if not callable(found):
                raise ConfigError(f'{place}: "{value}" is not a function.')
            return found
        # A quoted number.
        if takes(hint, yaml_text.read_value(value)):
            value = yaml_text.read_value(value)
    try:
        check_value(key, hint, value)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    # A temperature of 0 is sent as 0.0, always: answers are kept by the bytes of their request.
    if type(value) is int and {int, float, Any} & {*map(origin, kinds)} == {float}:
        return float(value)
    return value


def _items(kinds: Sequence[object], value: list[object], label: str, key: str) -> object:
    """Converts a list to the collection that the kinds name. datatrove writes ``tuple[str]`` for a
    tuple of any length.
    """
    kind = _list_kind(kinds)
    if kind is None:
        return value
    hints = typing.get_args(kind) or (Any,)
    if origin(kind) is not tuple or ... in hints or len(hints) != len(value):
        hints = hints[:1] * len(value)
    items = [
        _value(hint, item, label, f"{key}[{index}]")
        for index, (hint, item) in enumerate(zip(hints, value, strict=True))
    ]
    if origin(kind) is Sequence:
        return items
    return origin(kind)(items)


def _list_kind(kinds: Sequence[object]) -> object:
    """Returns the kind that a list becomes, at best a list; None: none of them."""
    for outer in (list, Sequence, tuple, set, frozenset):
        for kind in kinds:
            if origin(kind) is outer:
                return kind
    return None


def _value_hint(kinds: Sequence[object], value: JsonObject) -> object:
    """Returns the annotation of a mapping's values, such as models by their names.

    None: there is none, or the mapping has fields of a dataclass.
    """
    plain = _dataclasses(kinds)
    for kind in kinds:
        inner = typing.get_args(kind)
        if origin(kind) in (dict, Mapping) and inner and inner[1] not in (Any, object):
            is_one = not value or not all(isinstance(one, dict) for one in value.values())
            is_one = is_one or any(value.keys() & parameters_of(cls)[0].keys() for cls in plain)
            if not (plain and is_one):
                return inner[1]
    return None


def import_name(path: object, place: str, what: str = "class") -> Any:
    """Imports what a class_path, or another import path of the file, names.

    Raises:
        ConfigError: there is no such name, or its module cannot be imported.
    """
    if re.search(r"[/:]|\.py$", str(path)):
        file, _, name = str(path).partition(":")
        module_name = Path(file).stem
        raise ConfigError(
            f'{place}: "{path}" names a file. Write {module_name}.{name or "my_name"}; '
            f"{module_name}.py is found in the folder where the command runs."
        )
    module_name, _, name = str(path).rpartition(".")
    if not module_name and name not in SHORT_NAMES:
        hint = (
            did_you_mean(name, SHORT_NAMES) or "; give its import path, such as my_module.my_name."
        )
        raise ConfigError(f'{place}: no {what} "{name}"{hint}')
    module_name = module_name or SHORT_NAMES[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        advice = "correct the path, or install what is missing"
        if module_name.startswith("datatrove."):
            advice += (
                " (datatrove's own filters and extractors: pip install 'datatrove[processing]')"
            )
        raise ConfigError(
            f'{place}: {what} "{path}" needs module "{error.name}", which is neither in the '
            f"working folder nor installed; {advice}."
        ) from None
    except Exception as error:
        raise ConfigError(
            f'{place}: importing "{module_name}" failed: {type(error).__name__}: {error}'
        ) from error
    if not hasattr(module, name):
        raise ConfigError(
            f'{place}: no {what} "{name}" in {module_name}{did_you_mean(name, dir(module)) or "."}'
        )
    return getattr(module, name)


def _inside(label: str, key: str) -> str:
    if key.startswith("pipeline["):
        return key
    if label == form() and key in ("config", "rollout_fn", "output_writer"):
        return label
    if label == form():
        return f"{label}: {key}"
    return f"{label}.{key}"


def refuse_unknown(mapping: JsonObject, known: list[str], place: str) -> None:
    for key in mapping:
        if key not in known:
            near = (did_you_mean(name, known, 0.7) for name in (OTHER_NAMES.get(key, key), key))
            hint = next(filter(None, near), "")
            if key in REQUEST_PARAMETERS and key not in OTHER_NAMES and _OF_REQUESTS in known:
                hint = f"; as a parameter of requests it belongs into {_OF_REQUESTS}."
            if not hint and len(known) > _MOST_LISTED:
                hint = "; see docs/settings.md."
            hint = hint or f"; allowed are {', '.join(known) or 'none'}."
            raise ConfigError(f'{place}: unknown key "{key}"{hint}')


def read_argument(text: str, kinds: Sequence[object]) -> object:
    """Reads a value of the command line as in the file. In text arguments, ``Summarise: {text}`` is
    no mapping, and ``# {text}`` no comment.
    """
    value = yaml_text.read_value(text)
    outers = {origin(kind) for kind in kinds}
    if isinstance(value, dict | list):
        is_meant = outers - _SCALARS and text.lstrip().startswith(("{", "["))
        is_text = not is_meant and bool({str, Any} & outers)
    elif isinstance(value, str):
        is_text = str in kinds and not text.startswith(("'", '"'))
    elif value is None:
        is_text = text.strip().lower() not in ("", "null", "~")
    else:
        is_text = str in kinds and type(value) not in outers
    if is_text:
        return text
    return value


def set_at_path(content: JsonObject, override: str, short: type | None = None) -> None:
    """Applies ``path=value``. ``short``: of the short form, whose settings this class has."""
    path, _, text = override.removeprefix("--").partition("=")
    keys = [key for key in path.split(".") if key != "init_args"]
    if short is not None:
        keys = [key.replace("-", "_") for key in keys]
    elif keys[0] not in ("executor", "kubernetes"):
        keys = ["executor", *keys]
    if short is not None and not text:
        raise ConfigError(
            f"--{path}: its value is empty. Leave it out, or write null for no value."
        )
    if "api_key" in keys:
        raise ConfigError(
            f"--{path}: other users can see command lines; export the key and name its variable in "
            "api_key_env."
        )
    node: Any = content
    kinds: Sequence[object] = []
    if short is not None:
        kinds = [short]
    for place, key in enumerate(keys):
        kinds = _kinds_inside(node, kinds, key)
        if isinstance(node, dict) and "class_path" in node:
            node["init_args"] = node.get("init_args") or {}
            node = node["init_args"]
        index: Any = key
        if isinstance(node, list) and key.isdigit() and int(key) < len(node):
            index = int(key)
        elif not isinstance(node, dict):
            raise ConfigError(f'--{path}: there is no "{key}" inside {show(node)}.')
        if place == len(keys) - 1:
            node[index] = read_argument(text, kinds)
        elif isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[index]


def _kinds_inside(node: object, kinds: Sequence[object], key: str) -> list[object]:
    hint: object = None
    classes: list[Any] = [*_dataclasses(kinds)]
    if isinstance(node, list):
        hint = (*typing.get_args(_list_kind(kinds)), None)[0]
    elif isinstance(node, dict) and "class_path" in node:
        with contextlib.suppress(ConfigError):  # reported with its place when the executor is built
            classes = [import_name(node["class_path"], "class_path")]
    else:
        hint = _value_hint(kinds, {key: {}})
    if hint is None and not isinstance(node, list):
        for cls in classes:
            hint = parameters_of(cls)[0].get(key, ANYTHING).annotation
    return alternatives(hint or Any)


ANYTHING = inspect.Parameter("any", inspect.Parameter.KEYWORD_ONLY, annotation=Any)
"""An argument that goes into ``**kwargs``."""


def _dataclasses(kinds: Iterable[object]) -> list[type]:
    return [kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
