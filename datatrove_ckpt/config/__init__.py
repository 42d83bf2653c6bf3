"""Settings: ``InferenceConfig``, the parameters of requests, and paths."""

from datatrove_ckpt.config import engines as engines
from datatrove_ckpt.config.inference_config import InferenceConfig
from datatrove_ckpt.config.monitoring import MonitoringConfig
from datatrove_ckpt.redaction import EnvironmentSecret

__all__ = ["InferenceConfig", "MonitoringConfig", "Secret"]

Secret = EnvironmentSecret
"""The name in 0.1, by which steps that 0.1 pickled (tasks in a queue) find the class."""
