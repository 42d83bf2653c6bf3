"""HTML and SVG elements. Text becomes markup in ``element`` alone, which escapes whatever is not ``Markup`` already."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import TypeAlias

# Control characters, and those that turn the direction of the text around them.
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_MAX_NAME = 160


class Markup(str):
    """Text that is markup already. Only this module makes it."""

    __slots__ = ()


Value: TypeAlias = str | float | None
"""An attribute's value; None leaves the attribute out."""


def element(name: str, /, *children: str, **attributes: Value) -> Markup:
    """One element. An underscore in an attribute's name stands for a hyphen, and one at its end is left out.

    Args:
        children: ``Markup`` is taken as it is; any other text is escaped.
    """
    return Markup(f"<{name}{_attributes(attributes)}>{joined(children)}</{name}>")


def void(name: str, /, **attributes: Value) -> Markup:
    """An HTML element that has no content, such as meta."""
    return Markup(f"<{name}{_attributes(attributes)}>")


def joined(children: Iterable[str]) -> Markup:
    """Several pieces of markup or text as one."""
    return Markup("".join([child if isinstance(child, Markup) else text(child) for child in children]))


def text(value: str) -> Markup:
    """Escapes a text, for content and for attributes. Characters that no page may hold become U+FFFD."""
    return Markup(escape(value if value.isascii() and value.isprintable() else _UNSHOWN.sub("\ufffd", value)))


def raw(content: str) -> Markup:
    """A part of the page that this package has written itself, such as its style."""
    return Markup(content)


def name(value: str, limit: int = _MAX_NAME) -> Markup:
    """A name from outside: shortened in its middle, and kept apart from the direction of the text around it."""
    return element("bdi", shortened(value, limit))


def shortened(value: str, limit: int = _MAX_NAME) -> str:
    """The text with "..." in its middle if it has more than ``limit`` characters."""
    half = (limit - 3) // 2
    return value if len(value) <= limit else f"{value[:half]}...{value[-half:]}"


def _attributes(attributes: dict[str, Value]) -> str:
    parts = []
    for key, value in attributes.items():
        if value is not None:
            shown = value if isinstance(value, str) else number(value)
            parts.append(f' {key.rstrip("_").replace("_", "-")}="{text(shown)}"')
    return "".join(parts)


def number(value: float) -> str:
    """A coordinate: at most one decimal, because a picture needs no more and a page of a thousand ranks less."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
