"""Parses and fills templates of prompts.

Only the template is parsed, never a document, so braces in a document have no meaning.
"""

import json
import re
from functools import lru_cache
from string import Formatter

import orjson
from datatrove.data import Document

from datatrove_ckpt.common.formatting import did_you_mean
from datatrove_ckpt.common.warnings import warn_once
from datatrove_ckpt.errors import ConfigError

_NAME = r"[^\W\d](?:[\w -]*\w)?"
_PART = rf"\[(?:\d+|{_NAME})\]|\.{_NAME}"
_FIELD = re.compile(
    rf"metadata\[([^\[\]{{}}]+)\]|(?!metadata(?:$|\[\D)|text[.\[]|id[.\[])({_NAME}(?:{_PART})*)"
)
_OWN = ("text", "id")
_ALLOWED = (
    "allowed are {text}, {id}, {KEY}, {metadata[KEY]}, {KEY[0].NAME} for a part, and {{ or }} for "
    "a brace; with [[DOCUMENT]] for the text, braces have no meaning"
)
_DOCUMENT = "[[DOCUMENT]]"
BARE = ("{text}", _DOCUMENT)
"""Templates that add nothing to the text."""


@lru_cache(maxsize=64)
def parse(template: str, setting: str = "prompt") -> tuple[tuple[str, str, str], ...]:
    """Returns (literal, name, metadata key) for each part of a template. A literal has no name; the
    name of ``{KEY}`` is "key".

    ``str.format`` would reach Python's objects: ``{text.__class__}``.

    Raises:
        ConfigError: the template is broken, or has a name that is not allowed.
    """
    parts = []
    if _DOCUMENT in template:
        if "{text}" in template:
            raise ConfigError(f"{setting}: has both {{text}} and {_DOCUMENT}; use one of them.")
        for literal in template.split(_DOCUMENT):
            if literal:
                parts.append((literal, "", ""))
            parts.append(("", "text", ""))
        return tuple(parts[:-1])
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"{setting}: the template is broken ({error}); {_ALLOWED}.") from None
    for literal, field, spec, conversion in parsed:
        if literal:
            parts.append((literal, "", ""))
        if field is None:
            continue
        match = _FIELD.fullmatch(field)
        if match is None or spec or conversion:
            if conversion:
                field += f"!{conversion}"
            if spec:
                field += f":{spec}"
            raise ConfigError(f"{setting}: {{{field}}} cannot be filled in; {_ALLOWED}.")
        if field in _OWN:
            parts.append(("", field, ""))
        elif match[1]:
            parts.append(("", "metadata", match[1]))
        else:
            parts.append(("", "key", field))
    return tuple(parts)


def check_template(template: str, setting: str = "prompt") -> None:
    if not any(name for _, name, _ in parse(template, setting)):
        raise ConfigError(f"{setting}: nothing is filled in; {_ALLOWED}.")


def times_text(template: str) -> int:
    return sum(name == "text" for _, name, _ in parse(template))


def fill(template: str, document: Document, text: str, **values: str) -> str:
    """Returns the template with the document's values. ``values`` come before the metadata for
    ``{KEY}``.

    Raises:
        ConfigError: the document lacks a value.
    """
    return "".join(
        literal or _lookup(name, key, document, text, values)
        for literal, name, key in parse(template)
    )


def lacks(document: Document, setting: str, key: str) -> ConfigError:
    columns = list(map(str, document.metadata))
    if setting == "prompt":
        columns = [*_OWN, *columns]
    hint = did_you_mean(key, columns) or "."
    if f"/{key}=" in str(document.metadata.get("file_path")):
        hint = ". It is in the name of a folder: set path_columns to true."
    return ConfigError(
        f"{setting}: document {document.id!r} has no column {key!r}; its columns: "
        f"{', '.join(columns) or 'none'}{hint} Correct the name; or drop this document, or fill "
        "the column in."
    )


def _lookup(name: str, key: str, document: Document, text: str, values: dict[str, str]) -> str:
    if name == "text":
        return text
    if name == "id":
        return str(document.id)
    if name == "key" and key in values:
        return values[key]
    value = document.metadata
    path = _parts(name, key)
    if path[0] not in value and key in value:  # a column with a dot in its name
        path = (key,)
    for part in path:
        if value is None:  # a struct
            break
        if isinstance(value, str):  # a part of it would be a character
            raise lacks(document, "prompt", key)
        try:
            value = value[part]
        except (LookupError, TypeError):
            raise lacks(document, "prompt", key) from None
    if value is None:
        warn_once(f'{key} is null in a document, whose prompt has "None" there.')
    if isinstance(value, dict | list):  # no model should read Python
        try:
            return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        except TypeError:  # an integer beyond 64 bits
            return json.dumps(value, default=str, ensure_ascii=False, separators=(",", ":"))
    return str(value)


@lru_cache(maxsize=256)
def _parts(name: str, key: str) -> tuple[str | int, ...]:
    if name == "metadata":
        return (key,)
    matches = re.findall(r"\[([^\]]+)\]|([^.\[]+)", key)
    return tuple(int(inner) if inner.isdecimal() else inner or name for inner, name in matches)
