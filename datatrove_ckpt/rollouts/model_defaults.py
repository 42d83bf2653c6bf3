"""The sampling parameters that a model's authors recommend: its ``generation_config.json``."""

from __future__ import annotations

from typing import Any

import orjson

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.rollouts.model_files import find_file

_FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Those that vLLM and SGLang take, under the same names."""


def load_defaults(model: str, revision: str | None) -> dict[str, Any]:
    """Payload keys from the file; none where the file says nothing of them.

    Raises:
        ConfigError: there is no such file, or it is no JSON object.
    """
    path = find_file("generation_config", model, _FILE, revision)
    try:
        content = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"generation_config: {path} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"generation_config: {path} is no JSON object.")
    return {name: content[name] for name in _NAMES if content.get(name) is not None}
