"""The section ``kubernetes`` of a job's file: what a pod is, for ``datatrove-ckpt k8s``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.redaction import may_name_secret
from datatrove_ckpt.errors import ConfigError

_OURS = ("containers", "restartPolicy", "terminationGracePeriodSeconds", "volumes")


@dataclass(frozen=True)
class KubernetesJob:
    """The section ``kubernetes`` of a job's file.

    Attributes:
        image: has datatrove-ckpt in the version of this command, the engine, and the packages that
            the job imports.
        name: of Job and ConfigMap. None: that of the file.
        namespace: None: the one that kubectl has chosen.
        workers: how many pods share the tasks. None: one for each task.
        gpus: of a pod. None: as many as its servers need.
        gpu_resource: what the cluster calls them.
        cpu: requested cores.
        memory: requested.
        grace_seconds: from SIGTERM to SIGKILL. The drain (``drain_seconds``) and saving must fit
            in. A spot node may give less.
        backoff: how often a worker may fail before it is given up. Evictions and preemptions do not
            count.
        secrets: names of Secret objects. Their keys become environment variables.
        env: more environment variables; no secrets.
        volumes: where PersistentVolumeClaims are mounted, by their names. Folders on them are kept.
        pod: more fields of the pod's spec, such as ``nodeSelector`` and ``tolerations``.
    """

    image: str
    name: str | None = None
    namespace: str | None = None
    workers: int | None = None
    gpus: int | None = None
    gpu_resource: str = "nvidia.com/gpu"
    cpu: str | float = "4"
    memory: str = "16Gi"
    grace_seconds: int = 60
    backoff: int = 3
    secrets: list[str] | None = None
    env: dict[str, str] | None = None
    volumes: dict[str, str] | None = None
    pod: JsonObject | None = None

    def __post_init__(self) -> None:
        for variable in self.env or ():
            if may_name_secret(variable):
                raise ConfigError(
                    f"env: {variable}: its value may be a secret, and anybody who sees the Job "
                    "sees it. Put it into a Secret (kubectl create secret generic NAME "
                    f"--from-literal={variable}=...) and write secrets: [NAME]."
                )
        for field in (self.pod or {}).keys() & {*_OURS}:
            raise ConfigError(f"pod: {field}: is set by this command. Remove it.")

    def is_kept(self, folder: str) -> bool:
        """Whether a folder outlives the pod."""
        path = Path(folder).absolute()
        return "://" in folder or any(
            path.is_relative_to(mount) for mount in (self.volumes or {}).values()
        )
