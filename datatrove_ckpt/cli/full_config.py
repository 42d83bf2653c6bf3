"""The whole configuration of a run: what a file and its overrides say, and the defaults of all that they leave out.

It is YAML that can be run again. Comments at its top say what a file cannot: defaults that are no plain values, and
where a secret was hidden.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal

import jsonargparse

from datatrove_ckpt.cli.short_form import OURS, READERS, ShortJob
from datatrove_ckpt.cli.yaml_config import (
    ANSWER,
    ANYTHING,
    MASK,
    REQUIRED,
    SHORT_NAMES,
    Parameter,
    alternatives,
    checked,
    dump,
    fits,
    import_name,
    is_callable,
    is_class,
    is_open,
    item_hint,
    leaves,
    named_hint,
    origin,
    parameters_of,
    sayable,
    short,
)
from datatrove_ckpt.config.kubernetes import KubernetesJob
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.redaction import is_secret

_PLAIN = (str, bool, int, float, type(None))
_NOT_PLAIN = (TypeError, jsonargparse.ArgumentError)


class FullConfig:
    """Everything that an executor is built from.

    Args:
        content: what the file says, with overrides applied. ``build`` must have accepted it.
        defaults: with those of all that it leaves out.
    """

    def __init__(self, content: dict[str, Any], defaults: bool = True) -> None:
        self._with_defaults = defaults
        self._defaults: list[str] = []
        self._secrets: list[str] = []
        self._content = {**content, "executor": self._node(content["executor"], "executor")}

    def text(self) -> str:
        """The configuration as YAML, with secrets masked."""
        how = ", with all defaults" if self._with_defaults else ""
        head = f"# The configuration as it will be used{how}. This text can be run as it stands.\n"
        head += _comment("Left out, because a file cannot say these defaults", self._defaults)
        hidden = [place for place, value in leaves(self._content["executor"], "executor") if value == MASK]
        head += _comment("Hidden: write each secret in its place, into a file that only you can read", hidden)
        return head + dump(self._content)

    def redact(self, text: str) -> str:
        """Another text, with the same secrets masked."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, MASK)
        return text

    def _node(self, node: dict[str, Any], place: str) -> dict[str, Any]:
        cls = import_name(node["class_path"], place)
        return {"class_path": node["class_path"], "init_args": self._arguments(cls, node.get("init_args") or {}, place)}

    def _arguments(self, cls: Any, given: dict[str, Any], place: str) -> dict[str, Any]:
        """Every argument of a class: those that are given, and the defaults of the others. The pipeline is the last."""
        parameters, _ = parameters_of(cls)
        # Arguments that classes of datatrove or ours have are no secrets by their names, such as ``text_key``.
        known = (one for one in cls.__mro__ if one.__module__.partition(".")[0] in ("datatrove", "datatrove_ckpt"))
        harmless = {name for one in known for name in parameters_of(one)[0]}
        values: dict[str, Any] = {}
        others = parameters if self._with_defaults else ()
        for name in sorted([*others, *(name for name in given if name not in others)], key="pipeline".__eq__):
            where, says = f"{place}.{name}", "" if name in harmless else name
            if name in given:
                values[name] = self._given(parameters.get(name, ANYTHING).hint, given[name], where, says)
                continue
            hint, default = parameters[name].hint, parameters[name].default
            with suppress(*_NOT_PLAIN):
                value = _as_written(default)
                same = default if default is None or Any in alternatives(hint) else _as_written(checked(hint, value))
                if value == same and not (value and is_secret(says, value)):
                    values[name] = value
            if name not in values:
                self._defaults.append(short(where))
        return values

    def _given(self, hint: Any, value: Any, place: str, name: str) -> Any:
        """A value of the file, as ``build`` reads it."""
        kinds = alternatives(hint)
        plain = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        if isinstance(value, dict) and "class_path" in value:
            return self._node(value, place)
        if isinstance(value, dict) and plain and (named := named_hint(kinds, value)) is not None:
            return {key: self._given(named, one, f"{place}.{key}", "") for key, one in value.items()}
        if isinstance(value, dict) and plain:
            return self._arguments(plain[0], value, place)
        if isinstance(value, list) and (element := item_hint(kinds)) is not None:
            return [self._given(element, item, f"{place}.{index}", name) for index, item in enumerate(value)]
        is_text = isinstance(value, str) and (str in kinds or any(map(is_callable, kinds)))
        if not (is_text or Any in kinds or (isinstance(value, dict) and is_open(kinds))):
            with suppress(*_NOT_PLAIN):
                value = _as_written(checked(hint, value))  # such as 2.0 of "2"
        return self._masked(name, value, place)

    def _masked(self, name: str, value: Any, place: str) -> Any:
        """A value without its secrets. ``name`` is "" if it says nothing about them."""
        if value and isinstance(value, str | list | dict) and is_secret(name, value):
            self._secrets += [text for _, text in leaves(value, place) if text and isinstance(text, str)]
            return MASK
        if isinstance(value, dict):
            checked_before = place.endswith(".model_kwargs")  # and "</s>" is a token, but no secret
            return {
                key: self._masked("" if checked_before else f"{name}.{key}", part, f"{place}.{key}")
                for key, part in value.items()
            }
        if isinstance(value, list):
            return [self._masked(name, part, f"{place}.{index}") for index, part in enumerate(value)]
        return value


def _as_written(value: Any) -> Any:
    """A plain value with lists for tuples. Raises TypeError if it is not plain."""
    if isinstance(value, dict):
        return {key: _as_written(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_written(part) for part in value]
    if type(value) not in _PLAIN:
        raise TypeError
    return value


def _comment(title: str, lines: list[str]) -> str:
    return f"# {title}:\n" + "".join(f"#   {line}\n" for line in lines) if lines else ""


# ``datatrove-ckpt schema``: a JSON schema of the YAML file, with which editors complete, explain and check it.
#
# It is made of the constructors' annotations and docstrings, as ``yaml_config`` reads them. Draft 7 is the newest that
# the common editors know. It is a little stricter than ``run``, which takes ``"4"`` for a number. A class of your own
# may have any arguments.


Schema = dict[str, Any]

_NULL = {"type": "null"}
_PLAIN_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}
_IMPORT_PATH = {"type": "string", "pattern": r"^\w+(\.\w+)+$", "description": "import path: my_module.my_name"}
_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:[ ]+.*\n|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*)(?: ?\([^)]*\))?: ?(.*(?:\n(?:     .*|[ ]*(?=\n     )))*)", re.MULTILINE)


def schema(arguments: argparse.Namespace) -> int:
    """Prints the schema. Returns the exit code."""
    print(json.dumps(make_schema(), indent=1, ensure_ascii=False))
    return 0


def make_schema() -> Schema:
    """The schema, as JSON values."""
    from datatrove.executor.base import PipelineExecutor

    definitions = _Definitions()
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A file for datatrove-ckpt run",
        "type": "object",
        "if": {"required": ["executor"]},
        "then": {
            "properties": {"executor": definitions.node([PipelineExecutor]), "kubernetes": definitions.section()},
            "additionalProperties": False,
        },
        "else": definitions.short(),
        "definitions": definitions.found,
    }


class _Definitions:
    """The parts that the schema refers to: the arguments of each class."""

    def __init__(self) -> None:
        self.found: dict[str, Schema] = {}
        self._classes: dict[str, Any] = {}
        self._functions: list[str] = []
        self._unknown_steps: list[str] = []  # what they need is not installed
        for name in SHORT_NAMES:
            try:
                one = import_name(name, "schema", "name")
            except ConfigError:
                self._unknown_steps.append(name)
                continue
            if isinstance(one, type):
                self._classes[name] = one
            else:
                self._functions.append(name)

    def node(self, kinds: list[Any]) -> Schema:
        """An object of these kinds: class_path and init_args."""
        from datatrove.pipeline.base import PipelineStep

        known = [name for name, cls in self._classes.items() if _may_be(cls, kinds)]
        names = [*known, *(self._unknown_steps if PipelineStep in kinds else [])]
        class_path = {"anyOf": [{"enum": names}, _IMPORT_PATH]}
        properties = {"class_path": class_path, "init_args": {"type": ["object", "null"]}}
        node = {"type": "object", "properties": properties, "required": ["class_path"], "additionalProperties": False}
        return node | ({"allOf": [self._choice(name) for name in known]} if known else {})

    def short(self) -> Schema:
        """The short form: its own settings, and by their names those of the classes that it is written out as."""
        properties: Schema = {name: {} for name in ANSWER}
        names = ("InferenceRunner", "InferenceConfig", "PromptRollout", *READERS)
        found = [self._classes[name] for name in names if name in self._classes]
        for cls in (*found, ShortJob):
            key = self._arguments(cls)["$ref"].rpartition("/")[2]
            properties |= {name: value for name, value in self.found[key]["properties"].items() if name not in OURS}
        properties |= self.found[key]["properties"]
        return {"properties": properties, "required": ["run_folder", "input"], "additionalProperties": False}

    def section(self) -> Schema:
        """The settings of ``datatrove-ckpt k8s``."""
        return self._arguments(KubernetesJob)

    def _choice(self, name: str) -> Schema:
        """With this class_path, init_args must be the class's."""
        cls = self._classes[name]
        needed = any(one.default is REQUIRED for one in parameters_of(cls)[0].values())
        condition = {"properties": {"class_path": {"enum": [name, f"{SHORT_NAMES[name]}.{name}"]}}}
        then: Schema = {"properties": {"init_args": self._arguments(cls)}}
        return {
            "if": condition | {"required": ["class_path"]},
            "then": then | ({"required": ["init_args"]} if needed else {}),
        }

    def _arguments(self, cls: Any) -> Schema:
        """A mapping of the constructor's arguments."""
        key = f"{cls.__module__}.{cls.__qualname__}"
        if key not in self.found:
            parameters, open_ended = parameters_of(cls)
            texts = _descriptions(cls)
            needed = [name for name, one in parameters.items() if one.default is REQUIRED]
            found: Schema = {"description": inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]}
            self.found[key] = found
            found["type"] = "object" if needed else ["object", "null"]
            found["properties"] = {
                name: self._argument(name, one, "api_key_env" in parameters) | texts.get(name, {})
                for name, one in parameters.items()
            }
            found["required"] = needed
            found["additionalProperties"] = open_ended
        return {"$ref": f"#/definitions/{key}"}

    def _argument(self, name: str, parameter: Parameter, names_a_variable: bool) -> Schema:
        if name == "api_key" and names_a_variable:
            return _NULL  # a key does not belong into a file
        found = self._value(parameter.hint)
        default = parameter.default
        written = default is not None and type(default) in _PLAIN_TYPES
        return found | ({"default": default} if written else {})

    def _value(self, hint: Any) -> Schema:
        kinds = sayable(alternatives(hint))
        if Any in kinds:
            return {}
        objects = [kind for kind in kinds if kind not in _PLAIN_TYPES and _is_object(kind)]
        found = [self._kind(kind) for kind in kinds if kind not in objects]
        if any(map(is_callable, objects)):
            found += [{"enum": self._functions}, _IMPORT_PATH]
        if not objects:
            return _any_of(found)
        node = self.node(objects)
        plain = [self._arguments(kind) for kind in objects if dataclasses.is_dataclass(kind)]
        if plain:
            node = {"if": {"required": ["class_path"]}, "then": node, "else": plain[0]}
        if any(named_hint([kind], {"name": {}}) is not None for kind in kinds):  # several, by names of the user's own
            (named,) = found
            holds = {"minProperties": 1, "additionalProperties": {"type": "object"}}
            return {"if": holds, "then": named, "else": node}
        if any(one.get("type") == "object" for one in found):
            return _any_of([*found, node])
        # Not "anyOf", of which an editor shows no mistake inside the object.
        return {"if": {"type": "object"}, "then": node, "else": _any_of(found)} if found else node

    def _kind(self, kind: Any) -> Schema:
        outer, inner = origin(kind), typing.get_args(kind)
        if kind in _PLAIN_TYPES:
            return {"type": _PLAIN_TYPES[kind]}
        if outer is Literal:
            return {"enum": [*inner]}
        if outer is dict:
            return {"type": "object", "additionalProperties": self._value(inner[1]) if inner else True}
        if outer is tuple and inner and inner[-1] is not ...:
            items = [self._value(one) for one in inner]
            return {"type": "array", "items": items, "minItems": len(items), "additionalItems": False}
        if isinstance(outer, type) and issubclass(outer, Iterable):
            return {"type": "array", "items": self._value(inner[0]) if inner else {}}
        return {}


def _any_of(found: list[Schema]) -> Schema:
    return found[0] if len(found) == 1 else {"anyOf": found}


def _is_object(kind: Any) -> bool:
    one = origin(kind)
    return is_callable(kind) or (is_class(one) and not issubclass(one, Iterable))


def _may_be(cls: type, kinds: list[Any]) -> bool:
    """Whether somebody would choose the class where these kinds are taken: a step can be called, but is no rollout."""
    from datatrove.executor.base import PipelineExecutor
    from datatrove.pipeline.base import PipelineStep

    named = [kind for kind in kinds if not is_callable(kind)]
    return fits(cls, named or kinds) and bool(named or not issubclass(cls, PipelineStep | PipelineExecutor))


def _descriptions(cls: type) -> dict[str, Schema]:
    """What the docstrings of a class, its constructor and its bases say of each argument."""
    found: dict[str, Schema] = {}
    for one in cls.__mro__[:-1]:
        for text in (one.__doc__, vars(one).get("__init__", one).__doc__):
            for section in _SECTION.findall(inspect.cleandoc(text or "") + "\n"):
                for names, said in _ENTRY.findall(section):
                    for name in names.split(", "):
                        found.setdefault(name, {"description": " ".join(said.split())})
    return found
