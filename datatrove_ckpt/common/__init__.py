"""What every room uses: texts for people, secrets kept out of them, calls that are made again."""

from __future__ import annotations

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""An object of a JSON text, as a parser returns it."""
