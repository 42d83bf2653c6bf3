"""When two values of a setting are the same: as JSON, with three rules of its own.

The order of keys does not matter, except in a JSON schema and inside of a parameter of requests: engines answer in the
order of a schema's properties, and requests keep it. True is not 1, because a request says ``true``; 1 is 1.0. Hashes
of secrets that were made with two keys of a mirror, or one without, cannot be compared, and count as the same.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

# Parts of a request that hold a schema. A setting of the user's own may be called anything with "schema" in it.
_ORDERED = ("response_format", "structured_outputs", "schema")
_ZERO = "float 0x0.0p+0"  # as an identity has it, which tells it from -0.0
_HASH = re.compile(rb'"hash (scrypt|keyed-[0-9a-f]{8})-[0-9a-f]{32}"')  # see redaction.hashed


def comparable(name: str, value: object) -> bytes:
    """The same bytes for two values of this setting that are the same.

    Args:
        value: anything that JSON can express.
    """
    return orjson.dumps(_plain(name, value))


def same_value(name: str, old: object, new: object) -> bool:
    """Whether two values of this setting are the same. Earlier releases kept a writer without its module."""
    if name == "output_writer" and not ("." in str(old) and "." in str(new)):
        old, new = (str(value).rpartition(".")[2] for value in (old, new))
    old, new = comparable(name, old), comparable(name, new)
    before, after = ({found[1] for found in _HASH.finditer(value)} for value in (old, new))
    if before and after and before != after:
        old, new = (_HASH.sub(b"", value) for value in (old, new))
    return bool(old == new)


def _plain(name: str, value: Any, ordered: bool = False) -> Any:
    if isinstance(value, dict):
        ordered = ordered or any(part in name for part in _ORDERED)
        inside = ordered or name.endswith("params")
        return {key: _plain(key, value[key], inside) for key in (value if ordered else sorted(value))}
    if isinstance(value, list):
        return [_plain(name, one, ordered) for one in value]
    if value == _ZERO:
        return 0
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
