"""Builds an executor from a YAML file. A mistake is one line with step, key, value and
alternatives.

YAML is read and written as 1.2, because PyYAML's 1.1 breaks datatrove's values: ``no`` is a
language, ``20:00:00`` a Slurm time limit, ``1e-5`` a number.
"""

import contextlib
import importlib
import inspect
import math
import re
import typing
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from datatrove_ckpt.common import JsonObject, redaction
from datatrove_ckpt.common.formatting import did_you_mean, missing_package
from datatrove_ckpt.common.redaction import is_secret
from datatrove_ckpt.common.setting_types import (
    alternatives,
    argument_hint,
    check_value,
    collection_of,
    dataclass_of,
    describe_types,
    is_callable,
    is_class,
    item_hint,
    origin,
    parameters_of,
    show,
    takes,
    takes_class,
    value_hint,
)
from datatrove_ckpt.config.generation_params import REQUEST_PARAMETERS
from datatrove_ckpt.errors import ConfigError, form, setting_name
from datatrove_ckpt.output.formats import FORMATS
from datatrove_ckpt.readers import READERS


def read_value(text: str) -> object:
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError):
        return text


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.2's core schema. Duplicate keys are errors: PyYAML would silently drop the first."""

    yaml_implicit_resolvers: ClassVar[JsonObject] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, object]:
        names: list[object] = []
        for key, _ in node.value:
            if key.value in names:
                raise yaml.constructor.ConstructorError(
                    problem=f'key "{key.value}" twice', problem_mark=key.start_mark
                )
            names.append(key.value)
        mapping: dict[Hashable, object] = super().construct_mapping(node, deep)
        return mapping


for _tag, _first, _pattern in (
    ("null", "~nN", r"~|null|Null|NULL|"),
    ("bool", "tTfF", r"true|True|TRUE|false|False|FALSE"),
    ("int", "-+0123456789", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+"),
    (
        "float",
        "-+.0123456789",
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+",
    ),
    ("float", "-+.", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
    ("merge", "<", r"<<"),
):
    Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [*_first, ""]
    )


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def ignore_aliases(self, data: object) -> bool:
        return True


# PyYAML writes these unescaped in keys, and reads them as spaces.
_ODD_BREAKS = re.compile("[\r\x85\u2028\u2029]")


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    style = None
    if _ODD_BREAKS.search(text):
        style = '"'
    elif "\n" in text:
        style = "|"
    elif read_value(text) != text:
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump(value: object) -> str:
    """Returns YAML that ``read_value`` reads back unchanged."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=math.inf
    )
    return text


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
"""``run --dry-run`` writes it in place of a secret. A file that has it is refused."""
_EXPANDED = {"checkpoints_local_dir", "server_log_folder"}  # where the task runs
SHORT_NAMES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
SHORT_NAMES |= {file_format.writer: file_format.module for file_format in FORMATS}

# The settings by the names that other tools have for them.
OTHER_NAMES = {
    other_name: name
    for name, other_names in {
        "api_key_env": "key",
        "default_generation_params": "generation generation_config sampling sampling_params",
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
        "rollouts_per_document": "num_samples rollouts",
        "run_folder": "checkpoint_dir checkpoints_dir checkpoints_local_dir logging_dir out output "
        "output_dir output_folder output_path",
        "system_prompt": "system system_message",
        "text_key": "column text_column text_field",
        "tp": "tensor_parallel_size",
        "workers": "num_workers processes",
    }.items()
    for other_name in other_names.split()
}
_OF_REQUESTS = "default_generation_params"
_MAX_LISTED = 21
_SCALARS = {str, int, float, bool, type(None)}


def load(path: str | Path) -> JsonObject:
    """Reads the YAML file of a job.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not have the key "executor".
    """
    hint = ""
    if Path(path).suffix not in (".yaml", ".yml"):
        hint = (
            " If it is the input, write --input before it; for several files, a folder, or a "
            "pattern such as 'documents/*.jsonl'."
        )
    try:
        job = yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}. Give a job's "
            "YAML file, or flags, such as --input."
        ) from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or error
        location = ""
        if mark:
            location = f":{mark.line + 1}:{mark.column + 1}"
        if not hint and re.search("character '[@`%]|mapping values|alphabetic", str(problem)):
            hint = " Does a text need quotes?"
        raise ConfigError(f"{path}{location}: not valid YAML: {problem}.{hint}") from None
    if not isinstance(job, dict) or not job.keys() & {"executor", "run_folder", "input"}:
        raise ConfigError(
            f'{path}: needs at the top "executor", with class_path and init_args; or run_folder, '
            f"input, prompt and model.{hint}"
        )
    if "executor" in job:
        refuse_unknown(job, ["executor", "kubernetes"], str(path))
    return job


def build(job: JsonObject) -> Any:
    """Builds the executor and every step of its pipeline.

    Raises:
        ConfigError: the first mistake in the file.
    """
    from datatrove.executor.base import PipelineExecutor

    for yaml_path, value in leaves(job["executor"], "executor"):
        if value == MASK:
            raise ConfigError(
                f"{yaml_path}: --dry-run hid its value. Write it into a file that only you can "
                "read."
            )
    return _build(job["executor"], "executor", PipelineExecutor)


def leaves(value: object, yaml_path: str) -> Iterator[tuple[str, object]]:
    """Yields the plain values in mappings and lists, each after its path, as an override writes
    the path.
    """
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, yaml_path if key == "init_args" else f"{yaml_path}.{key}")
    else:
        if yaml_path.startswith("executor.pipeline."):
            yaml_path = yaml_path.removeprefix("executor.")
        yield yaml_path, value


def _build(node: object, yaml_path: str, hint: object) -> object:
    if not isinstance(node, dict) or "class_path" not in node:
        raise ConfigError(f"{yaml_path}: needs class_path (and init_args); it is {show(node)}.")
    refuse_unknown(node, ["class_path", "init_args"], yaml_path)
    cls = import_name(node["class_path"], yaml_path)
    text = f"{yaml_path}: class_path: {show(node['class_path'])}"
    if not isinstance(cls, type):
        raise ConfigError(f"{text} is not a class.")
    if not takes_class(hint, cls):
        raise ConfigError(f"{text} is not {describe_types(hint)}.")
    label = yaml_path
    if yaml_path == "executor" or yaml_path.endswith("]"):
        label = form() or f"{yaml_path} {cls.__name__}"
    return construct(cls, node.get("init_args"), label)


def construct(cls: type[_Built], arguments: object, label: str) -> _Built:
    """Builds an object of a class from the mapping of its arguments.

    Raises:
        ConfigError: the first mistake in the arguments, after ``label``.
    """
    if not isinstance(arguments, dict | None):
        raise ConfigError(f"{label}: init_args: {show(arguments)} is not a mapping.")
    arguments = arguments or {}
    parameters, is_open_ended = parameters_of(typing.cast(Any, cls))
    if not is_open_ended:
        refuse_unknown(arguments, list(parameters), label)
    if "api_key_env" in parameters and arguments.get("api_key"):
        raise ConfigError(
            f"{_inside(label, 'api_key')}: a key does not belong into a file. Export it where "
            "the tasks run, and write api_key_env: NAME_OF_ITS_VARIABLE."
        )
    values = {
        key: _value(argument_hint(cls, key), value, label, key) for key, value in arguments.items()
    }
    missing = [
        f'"{key}"'
        for key, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and key not in values
    ]
    if missing:
        raise ConfigError(f"{label}: missing key {', '.join(missing)}.")
    try:
        built = cls(**values)
    except Exception as error:
        text = str(error)
        if not isinstance(error, ValueError):
            text = missing_package(text) or f"{type(error).__name__}: {text}"
        raise ConfigError(f"{label}: {text}") from error
    if cls.__module__.startswith("datatrove"):
        _refuse_variables(built, label)
    return built


def _refuse_variables(built: object, label: str) -> None:
    """Refuses variables in paths that datatrove opens: it would make a folder of their names."""
    for key, value in getattr(built, "__dict__", {}).items():
        path = getattr(value, "path", value)
        is_opened = key.endswith(("_folder", "_dir", "_file")) and key not in _EXPANDED
        if is_opened and isinstance(path, str):
            redaction.refuse_variables(f"{label}: {setting_name(key)}", path)


def _value(hint: object, value: object, label: str, key: str) -> object:
    yaml_path = _inside(label, key)
    kinds = alternatives(hint)
    if isinstance(value, dict):
        if "class_path" in value:
            return _build(value, yaml_path, hint)
        inner = value_hint(hint, value)
        if inner is not None:
            return {name: _value(inner, part, yaml_path, name) for name, part in value.items()}
        cls = dataclass_of(hint)
        if cls is not None:
            return construct(cls, value, yaml_path)
        if all(map(is_class, kinds)):
            return _build(value, yaml_path, hint)
    elif isinstance(value, list):
        # [URL, storage options].
        if len(value) == 2 and isinstance(value[0], str):
            redaction.check_options(value[1], value[0], yaml_path)
        value = _items(hint, value, label, key)
    elif isinstance(value, str) and {str, Any}.isdisjoint(kinds):
        if any(map(is_callable, kinds)):
            return _import_function(value, yaml_path)
        unquoted = read_value(value)
        if takes(hint, unquoted):
            value = unquoted
    try:
        check_value(key, hint, value)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None
    # A temperature of 0 is sent as 0.0, always: answers are kept by the bytes of their request.
    if type(value) is int and {int, float, Any} & {*map(origin, kinds)} == {float}:
        return float(value)
    return value


def _items(hint: object, values: list[object], label: str, key: str) -> object:
    collection = collection_of(hint)
    if collection is None:
        return values
    items = [
        _value(item_hint(collection, index), value, label, f"{key}[{index}]")
        for index, value in enumerate(values)
    ]
    if origin(collection) is Sequence:
        return items
    return origin(collection)(items)


def _import_function(name: str, yaml_path: str) -> object:
    function = import_name(name, yaml_path, "function")
    if isinstance(function, type):
        raise ConfigError(f'{yaml_path}: "{name}" is a class; write class_path: {name}.')
    if not callable(function):
        raise ConfigError(f'{yaml_path}: "{name}" is not a function.')
    return function


def import_name(path: object, yaml_path: str, kind: str = "class") -> Any:
    """Imports the class of a class_path, or the function of another import path in the file.

    Raises:
        ConfigError: there is no such name, or its module cannot be imported.
    """
    if re.search(r"[/:]|\.py$", str(path)):
        raise ConfigError(
            f'{yaml_path}: "{path}" names a file. Write an import path, such as '
            "my_module.my_name, from the working folder."
        )
    module_name, _, name = str(path).rpartition(".")
    if not module_name and name not in SHORT_NAMES:
        hint = (
            did_you_mean(name, SHORT_NAMES) or "; give its import path, such as my_module.my_name."
        )
        raise ConfigError(f'{yaml_path}: no {kind} "{name}"{hint}')
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
            f'{yaml_path}: {kind} "{path}" needs module "{error.name}", neither in the working '
            f"folder nor installed; {advice}."
        ) from None
    except Exception as error:
        raise ConfigError(
            f'{yaml_path}: importing "{module_name}" failed: {type(error).__name__}: {error}'
        ) from error
    if not hasattr(module, name):
        hint = did_you_mean(name, dir(module)) or "."
        raise ConfigError(f'{yaml_path}: no {kind} "{name}" in {module_name}{hint}')
    return getattr(module, name)


def _inside(label: str, key: str) -> str:
    if key.startswith("pipeline["):
        return key
    if label != form():
        return f"{label}.{key}"
    if key in ("config", "rollout_fn", "output_writer"):
        return label
    return f"{label}: {key}"


def refuse_unknown(mapping: JsonObject, allowed: list[str], yaml_path: str) -> None:
    for key in mapping:
        if key not in allowed:
            name = OTHER_NAMES.get(key, key)
            hint = did_you_mean(name, allowed, 0.7) or did_you_mean(key, allowed, 0.7)
            if key in REQUEST_PARAMETERS and key not in OTHER_NAMES and _OF_REQUESTS in allowed:
                hint = f"; as a parameter of requests it belongs into {_OF_REQUESTS}."
            if not hint and len(allowed) > _MAX_LISTED and "pipeline" not in allowed:
                hint = "; see docs/settings.md."
            hint = hint or f"; allowed are {', '.join(allowed) or 'none'}."
            raise ConfigError(f'{yaml_path}: unknown key "{key}"{hint}')


def set_at_path(job: JsonObject, override: str, short: type | None = None) -> None:
    """Sets the value at a path of the job, as the override ``path=value`` gives them.

    ``short``: the class that declares the settings of the short form; None: the job is in the long
    form.
    """
    path, _, text = override.removeprefix("--").partition("=")
    keys = [key for key in path.split(".") if key != "init_args"]
    hint: object = Any
    if short is not None:
        hint = short
        keys = [key.replace("-", "_") for key in keys]
        if not text:
            raise ConfigError(f"--{path}: its value is empty. Leave it out, or write null.")
    elif keys[0] not in ("executor", "kubernetes"):
        keys = ["executor", *keys]
    if "api_key" in keys:
        raise ConfigError(
            f"--{path}: other users can see command lines; export the key and name its variable in "
            "api_key_env."
        )
    node: object = job
    for depth, key in enumerate(keys, 1):
        hint = _hint_inside(node, hint, key)
        if isinstance(node, dict) and "class_path" in node:
            node["init_args"] = node.get("init_args") or {}
            node = node["init_args"]
        index: Any = key
        if isinstance(node, list) and key.isdigit() and int(key) < len(node):
            index = int(key)
        elif not isinstance(node, dict):
            raise ConfigError(f'--{path}: there is no "{key}" inside {show(node)}.')
        if depth == len(keys):
            node[index] = read_argument(text, hint)
        elif isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[index]


def _hint_inside(node: object, hint: object, key: str) -> object:
    if isinstance(node, list):
        return item_hint(collection_of(hint), 0)
    cls = dataclass_of(hint)
    inner = None
    if isinstance(node, dict) and "class_path" in node:
        with contextlib.suppress(ConfigError):  # reported with its path when the executor is built
            cls = import_name(node["class_path"], "class_path")
    else:
        inner = value_hint(hint, {key: {}})
    if inner is not None:
        return inner
    if cls is None:
        return Any
    return argument_hint(cls, key)


def read_argument(text: str, hint: object) -> object:
    """Reads a value of the command line as in the file. In text arguments, ``Summarise: {text}`` is
    no mapping, and ``# {text}`` no comment.
    """
    if hint is Any and len(text) == 1 and not text.isalnum():
        return text
    value = read_value(text)
    outers = {origin(kind) for kind in alternatives(hint)}
    if isinstance(value, dict | list):
        is_meant = outers - _SCALARS and text.lstrip().startswith(("{", "["))
        is_text = not is_meant and bool({str, Any} & outers)
    elif isinstance(value, str):
        is_text = str in outers and not text.startswith(("'", '"'))
    elif value is None:
        is_text = text.strip().lower() not in ("", "null", "~")
    else:
        is_text = str in outers and type(value) not in outers
    if is_text:
        return text
    return value


# the long form ------------------------------------------------------------------------------------


class FullConfig:
    def __init__(self, config: JsonObject) -> None:
        self._secrets: list[str] = []
        self._config = {**config, "executor": self._masked("", config["executor"])}

    def text(self) -> str:
        return (
            "# The long form of the run, which runs as it stands, but for what is hidden.\n"
            f"{dump(self._config)}"
        )

    def redact(self, text: str) -> str:
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, MASK)
        return text

    def _masked(self, name: str, value: object) -> object:
        if value and isinstance(value, str | list | dict) and is_secret(name, value):
            self._secrets += [
                text for _, text in leaves(value, "") if text and isinstance(text, str)
            ]
            return MASK
        if isinstance(value, list):
            return [self._masked(name, part) for part in value]
        if not isinstance(value, dict):
            return value
        if "class_path" not in value:
            return {key: self._masked(f"{name}.{key}", part) for key, part in value.items()}
        cls = import_name(value["class_path"], "class_path")
        arguments = {}
        declared = {
            name
            for base in cls.__mro__
            if base.__module__.partition(".")[0] in ("datatrove", "datatrove_ckpt")
            for name in parameters_of(base)[0]
        }
        for key, part in (value.get("init_args") or {}).items():
            secret_name = key
            if key in declared:  # such as ``text_key``, which is no secret by its name
                secret_name = ""
            arguments[key] = self._masked(secret_name, part)
        return {"class_path": value["class_path"], "init_args": arguments}
