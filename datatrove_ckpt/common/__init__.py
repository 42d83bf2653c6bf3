"""Shared by every room: texts for people, redaction of secrets, retries."""

from __future__ import annotations

from typing import Any

BATCH = "batch"
"""The ``service_tier`` of answers of provider batches."""
LAUNCH = "DATATROVE_CKPT_LAUNCH"
"""The environment variable whose value all workers of a launch share.

A launch tries again the ranks that an earlier launch gave up.
"""
JsonObject = dict[str, Any]
"""An object of a JSON text, as a parser returns it."""
