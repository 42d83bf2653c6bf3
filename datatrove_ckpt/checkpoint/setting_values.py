"""When two values of a setting are the same: as JSON, with two rules of its own.

The order of keys does not matter, except in a JSON schema: engines answer in the order of its properties, and requests
keep it. True is not 1, because a request says ``true``; 1 is 1.0.
"""

from __future__ import annotations

from typing import Any

import orjson

# Parts of a request that hold a schema. A setting of the user's own may be called anything with "schema" in it.
_ORDERED = ("response_format", "structured_outputs", "schema")


def comparable(name: str, value: Any) -> bytes:
    """The same bytes for two values of this setting that are the same.

    Args:
        value: anything that JSON can express.
    """
    return orjson.dumps(_plain(value, _is_ordered(name)))


def same_value(name: str, old: Any, new: Any) -> bool:
    """Whether two values of this setting are the same. Earlier releases kept a writer without its module."""
    if name == "output_writer" and not ("." in str(old) and "." in str(new)):
        old, new = (str(value).rpartition(".")[2] for value in (old, new))
    return comparable(name, old) == comparable(name, new)


def _is_ordered(name: str) -> bool:
    return any(part in name for part in _ORDERED)


def _plain(value: Any, ordered: bool) -> Any:
    if isinstance(value, dict):
        names = value if ordered else sorted(value)
        return {name: _plain(value[name], ordered or _is_ordered(name)) for name in names}
    if isinstance(value, list):
        return [_plain(one, ordered) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
