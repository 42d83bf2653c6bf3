"""Builds an executor from a YAML file. Each mistake is one line that names step, key, value and what is allowed.

    executor:
      class_path: LocalPipelineExecutor       a short name of SHORT_NAMES, or any import path
      init_args:                              the arguments of its constructor
        tasks: 4
        pipeline:
          - class_path: JsonlReader
            init_args: {data_folder: documents}

This module walks the tree, and jsonargparse checks one plain value at a time: for a typo in the whole file, with its
lists of unions, jsonargparse's message is pages long. YAML is read by the rules of YAML 1.2, because those of 1.1 break
datatrove's values: ``no`` is a language, ``20:00:00`` a Slurm time limit, ``1e-5`` a number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import yaml  # type: ignore[import-untyped]

from datatrove_ckpt.config.paths import refuse_variables
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import missing_package
from datatrove_ckpt.redaction import HIDDEN, check_options, may_name_secret

_NAMES_BY_MODULE = {
    "datatrove_ckpt": "InferenceRunner InferenceConfig LocalPipelineExecutor",
    "datatrove_ckpt.readers": "IpcReader JsonlReader ParquetReader",
    "datatrove_ckpt.rollouts": "PromptRollout CompletionRollout ChunkedRollout chat",
    "datatrove.executor": "SlurmPipelineExecutor RayPipelineExecutor",
    "datatrove.pipeline.readers": "CSVReader HuggingFaceDatasetReader WarcReader",
    "datatrove.pipeline.writers": "HuggingFaceBucketWriter HuggingFaceDatasetWriter JsonlWriter ParquetWriter",
    "datatrove.pipeline.filters": "C4BadWordsFilter C4ParagraphFilter C4QualityFilter FastTextClassifierFilter "
    "FineWebQualityFilter GopherQualityFilter GopherRepetitionFilter LambdaFilter LanguageFilter RegexFilter "
    "SamplerFilter UnigramLogProbFilter URLFilter",
    "datatrove.pipeline.extractors": "Trafilatura",
    "datatrove.pipeline.formatters": "FTFYFormatter PIIFormatter SymbolLinesFormatter",
}
_EXPANDED = {"checkpoints_local_dir", "server_log_folder"}  # where the task runs
SHORT_NAMES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

# With 0 of these, datatrove does nothing and reports success. The values say what -1 stands for.
_NUMBERS = {"tasks": "", "workers": "one per task", "local_tasks": "all", "tasks_per_job": ""}


def load(path: str | Path) -> dict[str, Any]:
    """The file's content. Builds nothing.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not have the one key "executor".
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
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

    executor = _build(content["executor"], "executor", [PipelineExecutor])
    for name, default in _NUMBERS.items():
        number = (content["executor"].get("init_args") or {}).get(name, 1)
        if number < 1 and (number != -1 or not default):
            allowed = f"at least 1, or -1 for {default}" if default else "at least 1"
            raise ConfigError(f"executor {type(executor).__name__}: {name}: must be {allowed}; it is {number}.")
    return executor


def read_value(text: str) -> Any:
    """A value from the command line, by the rules of the file."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.2's core schema. Duplicate keys are errors: YAML would silently drop the first one."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        names: list[Any] = []
        for key, _ in node.value:
            if key.value in names:
                raise yaml.constructor.ConstructorError(problem=f'key "{key.value}" twice', problem_mark=key.start_mark)
            names.append(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


for _tag, _first, _pattern in (
    ("null", "~nN", r"~|null|Null|NULL|"),
    ("bool", "tTfF", r"true|True|TRUE|false|False|FALSE"),
    ("int", "-+0123456789", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+"),
    ("float", "-+.0123456789", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"),
    ("float", "-+.", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
    ("merge", "<", r"<<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [*_first, ""])


def _build(node: Any, place: str, kinds: list[Any]) -> Any:
    """Builds the object that a mapping with class_path and init_args describes."""
    if not isinstance(node, dict) or "class_path" not in node:
        raise ConfigError(f"{place}: needs class_path (and init_args); it is {show(node)}.")
    _refuse_unknown(node, ["class_path", "init_args"], place)
    found = _import(node["class_path"], place)
    if not isinstance(found, type) or not _fits(found, kinds):
        wanted = _words(kinds) if isinstance(found, type) else "a class"
        raise ConfigError(f"{place}: class_path: {show(node['class_path'])} is not {wanted}.")
    label = f"{place} {found.__name__}" if place == "executor" or place.endswith("]") else place
    return _construct(found, node.get("init_args"), label)


def _construct(cls: Any, arguments: Any, label: str) -> Any:
    if not isinstance(arguments, dict | None):
        raise ConfigError(f"{label}: init_args: {show(arguments)} is not a mapping.")
    parameters, open_ended = _parameters(cls)
    if not open_ended:
        _refuse_unknown(arguments or {}, list(parameters), label)
    if "api_key_env" in parameters and (arguments or {}).get("api_key"):
        raise ConfigError(
            f"{_inside(label, 'api_key')}: a key does not belong into a file. Export it where the tasks run, such as "
            "ENDPOINT_API_KEY, and write api_key_env: ENDPOINT_API_KEY instead of api_key."
        )
    anything = (Any, False)
    values = {k: _value(parameters.get(k, anything)[0], v, label, k) for k, v in (arguments or {}).items()}
    missing = [f'"{key}"' for key, (_, required) in parameters.items() if required and key not in values]
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
    kinds = _alternatives(hint)
    is_object, plain = isinstance(value, dict) and "class_path" in value, [*filter(dataclasses.is_dataclass, kinds)]
    if isinstance(value, dict) and plain and not is_object:
        return _construct(plain[0], value, _inside(label, key))
    if is_object or (value is not None and all(map(_is_class, kinds)) and not plain):
        return _build(value, _inside(label, key), kinds)
    if isinstance(value, list) and len(lists := [kind for kind in kinds if _origin(kind) is list]) == 1:
        element = (typing.get_args(lists[0]) or (Any,))[0]
        return [_value(element, item, label, f"{key}[{index}]") for index, item in enumerate(value)]
    if Any in kinds or (isinstance(value, str) and str in kinds):  # jsonargparse would read "null" as None
        return value
    if isinstance(value, str) and any(map(_is_callable, kinds)):
        return _function(value, label, key)
    return _checked(hint, kinds, value, label, key)


def _checked(hint: Any, kinds: list[Any], value: Any, label: str, key: str) -> Any:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
    except ValueError:
        return value  # a type that jsonargparse does not know: the constructor checks it
    with contextlib.suppress(jsonargparse.ArgumentError):
        if value is not None or type(None) in kinds:  # jsonargparse takes null for an int
            return parser.parse_object({"value": value}).value
    shown = HIDDEN if may_name_secret(key) else show(value)
    raise ConfigError(f"{label}: {key}: {shown} is not {_words(kinds)}{_did_you_mean(value, _choices(kinds)) or '.'}")


def _function(path: str, label: str, key: str) -> Any:
    place = _inside(label, key)
    found = _import(path, place, "function")
    if isinstance(found, type) or not callable(found):
        advice = f"a class; write class_path: {path}" if isinstance(found, type) else "not a function"
        raise ConfigError(f'{place}: "{path}" is {advice}.')
    return found


def _import(path: Any, place: str, what: str = "class") -> Any:
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


def _parameters(cls: Any) -> tuple[dict[str, tuple[Any, bool]], bool]:
    """Each constructor argument's annotation and whether it is required; and whether there may be others (**kwargs)."""
    try:
        hints = typing.get_type_hints(cls.__init__)
    except NameError:  # an annotation that exists only for type checkers: the constructor checks it
        hints = {}
    arguments = list(inspect.signature(cls.__init__).parameters.values())[1:]
    named = [argument for argument in arguments if argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)]
    annotated = {one.name: (_hint(hints.get(one.name, Any), one.default), one.default is one.empty) for one in named}
    return annotated, any(argument.kind is argument.VAR_KEYWORD for argument in arguments)


def _hint(hint: Any, default: Any) -> Any:
    """Corrects datatrove's annotations: ``adapter: Callable = None``, ``save_media_bytes=False``, ``tuple[str]`` for a
    tuple of any length."""
    if hint is Any:
        return bool if isinstance(default, bool) else Any
    kinds = _alternatives(hint)
    for index, kind in enumerate(kinds):
        if typing.get_origin(kind) is tuple and len(typing.get_args(kind)) == 1:
            kinds[index] = types.GenericAlias(tuple, (*typing.get_args(kind), ...))
    return typing.Union[tuple([*kinds, None] if default is None else kinds)]  # noqa: UP007 (made at run time)


def _alternatives(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in _alternatives(part)]
    return [hint]


def _origin(kind: Any) -> Any:
    return typing.get_origin(kind) or kind


def _is_class(kind: Any) -> bool:
    return kind is type(None) or (inspect.isclass(kind) and kind.__module__ not in ("builtins", "typing"))


def _is_callable(kind: Any) -> bool:
    origin = _origin(kind)
    return origin is Callable or (getattr(origin, "_is_protocol", False) and "__call__" in vars(origin))


def _fits(cls: type, kinds: list[Any]) -> bool:
    origins = [Callable if _is_callable(kind) else _origin(kind) for kind in kinds]
    return Any in kinds or any(inspect.isclass(origin) and issubclass(cls, origin) for origin in origins)


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


def _words(kinds: list[Any]) -> str:
    """The allowed alternatives: "an int or null", "one of gzip, zstd, null"."""
    choices = _choices(kinds)
    if str in kinds:  # a user who can give a string gives no DataFolder or file system object
        kinds = [k for k in kinds if k is type(None) or not any(map(_is_class, (k, *typing.get_args(k))))]
    words = [f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]] if choices else []
    words += [_word(kind) for kind in kinds if not (choices and (kind is type(None) or _origin(kind) is Literal))]
    return ", ".join(words[:-1]) + (" or " if len(words) > 1 else "") + words[-1]


def _choices(kinds: list[Any]) -> list[str]:
    choices = [str(choice) for kind in kinds if _origin(kind) is Literal for choice in typing.get_args(kind)]
    return [*choices, "null"] if choices and type(None) in kinds else choices


def _word(kind: Any) -> str:
    if _is_callable(kind):
        return "an import path such as my_module.my_function"
    name = getattr(_origin(kind), "__name__", str(kind))
    inner = " and ".join(getattr(item, "__name__", "") for item in typing.get_args(kind) if item is not ...)
    if name in ("list", "tuple"):
        return f"a list of {inner}" if inner not in ("", "Union") else "a list"
    words = {"int": "an int", "NoneType": "null", "dict": "a mapping", "bool": "true or false"}
    return words.get(name, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")
