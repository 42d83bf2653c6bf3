"""Makes a ConfigMap and an Indexed Job of Kubernetes from a job.

    index of the Job    a worker: its pods run ``run job.yaml --worker``
    ConfigMap           the job's file in the long form, and the user's own modules. Its keys hold
                        no /: pa..roll.py
    emptyDir            the working folder: new for each pod. What must stay has a URL, or is on a
                        volume
    podFailurePolicy    what follows from the exit codes of ``run --worker`` (``cli/execution.py``)

The next pod of an index has the same host name, and starts after the last pod ended, so its claims
are free at once. If a node only seems to be gone, the mirror or the lock decides which pod resumes.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from datatrove_ckpt.common import LAUNCH, JsonObject
from datatrove_ckpt.common.redaction import may_name_secret
from datatrove_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from datatrove_ckpt.run_folder.run_plan import RunPlan

# The pod's working folder, also if the submitter's folder is on a volume.
_WORK = "/work"
_CONFIG = "/etc/datatrove-ckpt"
_KEY = re.compile("[-_.a-zA-Z0-9]{1,253}")


@dataclass(frozen=True)
class KubernetesJob:
    """The section ``kubernetes`` of a job's file.

    Attributes:
        image: has datatrove-ckpt in the version of this command, the engine, and the packages that
            the job imports.
        name: name of Job and ConfigMap. None: the file's name.
        namespace: their namespace. None: kubectl's current namespace.
        workers: how many pods share the tasks. None: one for each task.
        gpus: number of GPUs for a pod. None: as many as its servers need.
        gpu_resource: the cluster's name for GPUs.
        cpu: requested cores.
        memory: requested memory.
        grace_seconds: seconds from SIGTERM to SIGKILL. The drain (``drain_seconds``) and saving
            must fit in. A spot node may give less.
        backoff: how often a worker may fail before it is given up. Evictions and preemptions do not
            count.
        secrets: names of Secret objects. Their keys become environment variables.
        env: more environment variables; no secrets.
        volumes: mount paths of PersistentVolumeClaims, by claim. Folders on them are kept.
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
                    f"env: {variable}: its value may be a secret. Use secrets: [NAME] (kubectl "
                    f"create secret generic NAME --from-literal={variable}=...)."
                )
        reserved = {"containers", "restartPolicy", "terminationGracePeriodSeconds", "volumes"}
        for field in (self.pod or {}).keys() & reserved:
            raise ConfigError(f"pod: {field}: is set by this command. Remove it.")

    def is_kept(self, folder: str) -> bool:
        path = Path(folder).absolute()
        return "://" in folder or any(
            path.is_relative_to(mount) for mount in (self.volumes or {}).values()
        )


def _on_exit(action: str, *codes: int) -> JsonObject:
    return {"action": action, "onExitCodes": {"operator": "In", "values": list(codes)}}


# The first matching rule counts. ``backoff`` limits other failures.
_RULES: list[JsonObject] = [
    # Evicted, node lost.
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    _on_exit("Ignore", 129, 130, 138, 143),  # drained on SIGHUP, SIGINT, SIGUSR1, SIGTERM
    _on_exit("FailJob", 2, 4),
    _on_exit("FailIndex", 3),
]


def config_map(text: str, plan: "RunPlan", metadata: JsonObject) -> tuple[JsonObject, list[str]]:
    from datatrove_ckpt.user_code.script_names import own_modules  # slow to import

    data = {"job.yaml": text}
    # ``kubectl apply`` copies the object into an annotation, which has at most 256 KiB.
    free_bytes = 200_000 - len(text.encode())
    wanted = {
        getattr(runner.step.rollout_fn, "__module__", "").partition(".")[0]
        for runner in plan.runners
    }
    modules = own_modules()
    left_out = []
    for module in sorted({*modules, *wanted} - {"datatrove", "datatrove_ckpt"}):
        texts = _texts(modules.get(module, {}), free_bytes)
        free_bytes -= sum(len(text.encode()) for text in texts.values())
        data |= texts
        if not texts:
            left_out.append(module)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}, left_out


def _texts(files: dict[str, Path], max_bytes: int) -> dict[str, str]:
    keys = {name: name.replace("/", "..") for name in files}
    fit = all(".." not in name and _KEY.fullmatch(key) for name, key in keys.items())
    if not fit or sum(path.stat().st_size for path in files.values()) > max_bytes:
        return {}
    try:
        return {keys[name]: path.read_bytes().decode() for name, path in files.items()}
    except UnicodeDecodeError:
        return {}


def manifest(plan: "RunPlan", job: KubernetesJob, files: JsonObject, workers: int) -> JsonObject:
    metadata = files["metadata"]
    mounted = {"name": metadata["name"]}
    if any(".." in key for key in files["data"]):  # of packages
        mounted["items"] = [{"key": key, "path": key.replace("..", "/")} for key in files["data"]]
    here = str(Path.cwd())
    if not job.is_kept(here):
        here = _WORK
    mounts = [
        {"name": "job", "mountPath": _CONFIG, "readOnly": True},
        {"name": "work", "mountPath": _WORK},
    ]
    volumes: list[JsonObject] = [
        {"name": "job", "configMap": mounted},
        {"name": "work", "emptyDir": {}},
    ]
    for index, (claim, path) in enumerate((job.volumes or {}).items()):
        mounts.append({"name": f"claim-{index}", "mountPath": path})
        volumes.append({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim}})
    folders = {str(runner.step.checkpoints_local_dir) for runner in plan.runners}
    for index, folder in enumerate(
        sorted(
            checkpoints
            for checkpoints in folders
            if checkpoints.startswith("/") and not job.is_kept(checkpoints)
        )
    ):
        # No container layer.
        mounts.append({"name": "work", "mountPath": folder, "subPath": f"checkpoints-{index}"})
    gpus = job.gpus
    if gpus is None:
        gpus = sum(
            config.gpus_of_task for runner in plan.runners for config in runner.step.models.values()
        )
    if gpus > 1:  # NCCL needs more than the 64 MiB of a container
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    env = {"PYTHONPATH": _CONFIG, **(job.env or {})}
    variables: list[JsonObject] = [
        {"name": variable, "value": value} for variable, value in env.items()
    ]
    launch = "metadata.labels['batch.kubernetes.io/controller-uid']"  # of this very Job
    variables.append({"name": LAUNCH, "valueFrom": {"fieldRef": {"fieldPath": launch}}})
    container: JsonObject = {
        "name": "worker",
        "image": job.image,
        "command": ["datatrove-ckpt", "run", f"{_CONFIG}/job.yaml", "--worker"],
        "workingDir": here,
        "env": variables,
        "envFrom": [{"secretRef": {"name": secret}} for secret in job.secrets or ()],
        "resources": {"requests": {"cpu": str(job.cpu), "memory": job.memory}},
        "volumeMounts": mounts,
    }
    if gpus:
        container["resources"]["limits"] = {job.gpu_resource: gpus}
    pod: JsonObject = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_seconds,
        # The kernel drops signals without a handler for process 1.
        "shareProcessNamespace": True,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes,
    }
    spec: JsonObject = {
        "completionMode": "Indexed",
        "completions": workers,
        "parallelism": workers,
        "backoffLimitPerIndex": job.backoff,
        "podFailurePolicy": {"rules": _RULES},
        "template": {"spec": pod | (job.pod or {})},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
