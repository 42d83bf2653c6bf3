"""The settings of inference: ``InferenceConfig``, the parameters of requests, and paths."""

from datatrove_ckpt.config import engines as engines
from datatrove_ckpt.config.inference_config import InferenceConfig
from datatrove_ckpt.config.monitoring import MonitoringConfig

__all__ = ["InferenceConfig", "MonitoringConfig"]
