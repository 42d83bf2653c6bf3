"""The engines: the values of ``server_type``. Each is one file, and one row here; ``base.py`` says what it may set."""

from __future__ import annotations

from typing import Literal

from datatrove_ckpt.config.engines.base import Engine
from datatrove_ckpt.config.engines.llamacpp import Llamacpp
from datatrove_ckpt.config.engines.others import Custom, Dummy, Endpoint
from datatrove_ckpt.config.engines.sglang import SGLang
from datatrove_ckpt.config.engines.vllm import Vllm

ServerType = Literal["llamacpp", "vllm", "sglang", "endpoint", "dummy", "custom"]
FormEngine = Literal["vllm", "sglang", "llamacpp", "openai", "none"]
"""The engines whose request fields a rollout may ask for."""

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (Llamacpp(), Vllm(), SGLang(), Endpoint(), Dummy(), Custom())
}
