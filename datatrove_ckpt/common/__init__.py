"""The room that every room may import: texts for people, redaction of secrets, retries."""

from typing import Any

BATCH = "batch"
"""The ``service_tier`` of answers of provider batches."""
CUSTOM_ID = b'{"custom_id":"'
"""The beginning of each line of a batch's requests."""
MESSAGES = "/v1/messages"
"""The path of requests whose batches have Anthropic's form."""
LAUNCH = "DATATROVE_CKPT_LAUNCH"
"""The environment variable whose value all workers of a launch share.

A launch tries again the ranks that an earlier launch gave up.
"""
JsonObject = dict[str, Any]
"""An object of a JSON text, as a parser returns it."""
