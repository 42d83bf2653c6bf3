"""The engines: the values of ``server_type``.

Each engine is one file, and one row here. The short form takes the first installed engine that
leases GPUs.
"""

from datatrove_ckpt.config.engines.llamacpp import Llamacpp
from datatrove_ckpt.config.engines.others import Custom, Dummy, Endpoint
from datatrove_ckpt.config.engines.sglang import SGLang
from datatrove_ckpt.config.engines.vllm import Vllm
from datatrove_ckpt.config.inference_config import ENGINES

ENGINES |= {
    engine.name: engine for engine in (Llamacpp(), Vllm(), SGLang(), Endpoint(), Dummy(), Custom())
}
