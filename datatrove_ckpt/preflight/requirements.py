"""What a run needs on this machine before its first task starts: packages for the input, model file, keys.

A rank checks the same for itself at its start, on its own machine. Here it is said once, and before any process starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from datatrove.executor import LocalPipelineExecutor

from datatrove_ckpt.errors import ConfigError, ServerStartFailed
from datatrove_ckpt.generation.export.exporter import check_monitoring
from datatrove_ckpt.inference.servers.connect import check_servers
from datatrove_ckpt.output.file_managers import missing_codec
from datatrove_ckpt.runner import InferenceRunner


def check_codecs(place: str, reader: Any, names: Iterable[str]) -> None:
    """Refuses compressed input files whose package is not installed. ``Any``: any step with a ``data_folder``.

    Raises:
        ConfigError: names a file and the package.
    """
    compression = getattr(reader, "compression", None)
    for name in names:
        if advice := missing_codec(compression, name):
            raise ConfigError(f'{place}: "{name}" cannot be read: {advice}')


def check_launch(executor: Any) -> None:
    """Refuses a local run whose servers cannot start. Jobs of a cluster run elsewhere, and may have what is missing.

    Raises:
        ConfigError: names the step and the setting.
    """
    if not isinstance(executor, LocalPipelineExecutor) or not executor.get_incomplete_ranks():
        return
    for index, step in enumerate(executor.pipeline):
        if isinstance(step, InferenceRunner):
            try:
                check_servers(step.config)
                check_monitoring(step.monitoring)
            except (ConfigError, ServerStartFailed) as error:
                raise ConfigError(f"pipeline[{index}] InferenceRunner: {error}") from error
