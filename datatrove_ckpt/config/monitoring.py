"""The settings by which other systems can watch a run."""

from dataclasses import dataclass

from datatrove_ckpt.common.formatting import missing_package
from datatrove_ckpt.common.setting_types import Port, check
from datatrove_ckpt.errors import ConfigError

# Folder names that do not identify a job.
_TELL_NOTHING = {"checkpoint", "checkpoints", "ckpt", "ckpts", "ck", "output", "outputs", "out"}


@dataclass
class MonitoringConfig:
    """Settings by which other systems can watch a run. They are off by default, and cannot stop the
    run.

    Attributes:
        run_name: the run's name. None: that of the checkpoints' folder (of the folder above, if it
            is called checkpoints, ck or the like), or else of the output folder.
        metrics_port: port of ``/metrics``, for each process the first free one from here on. Needs
            the extra ``metrics``.
        metrics_host: address of that port. "0.0.0.0" opens it to other machines, without a
            password.

    Raises:
        ConfigError: a setting that cannot work.
    """

    run_name: str | None = None
    metrics_port: Port | None = None
    metrics_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        check(MonitoringConfig, vars(self))

    def check_packages(self) -> None:
        missing = missing_package("prometheus_client")
        if self.metrics_port is not None and missing is not None:
            raise ConfigError(f"monitoring.metrics_port: {missing}")


def name_of_folder(folder: str) -> str:
    parts = [part for part in folder.split("/") if part]
    telling = [part for part in parts if part.lower() not in _TELL_NOTHING]
    return (telling or parts or ["run"])[-1]
