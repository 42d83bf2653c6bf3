"""JSON with integers of any size: orjson makes floats of those beyond 64 bits."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

_AS_ZEROS = bytes.maketrans(b"0123456789", b"0" * 10)
_LONG_INTEGER = re.compile(rb"(?<![.0-9])(?:[0-9]{20}|-[0-9]{19})")


def loads(line: bytes) -> Any:
    """Raises orjson.JSONDecodeError for what is no JSON."""
    data = orjson.loads(line)
    # The pattern alone takes ten times as long as orjson.
    if b"0" * 19 in line.translate(_AS_ZEROS) and _LONG_INTEGER.search(line):
        return json.loads(line)
    return data
