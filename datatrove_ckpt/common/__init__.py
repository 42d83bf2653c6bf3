"""Shared by every room: texts for people, redaction of secrets, retries."""

from __future__ import annotations

from typing import Any, TypeAlias

BATCH = "batch"
"""The ``service_tier`` of answers of provider batches."""
JsonObject: TypeAlias = dict[str, Any]
"""An object of a JSON text, as a parser returns it."""
