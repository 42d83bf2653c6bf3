"""``datatrove-ckpt k8s``: a job as a ConfigMap and an Indexed Job of Kubernetes, for ``kubectl
apply -f -``.

    index of the Job    a worker: its pods run ``run job.yaml --worker``
    ConfigMap           the job's file in the long form, and the user's own modules. Its keys hold
                        no /: pa..roll.py
    emptyDir            the working folder: new for each pod. What must stay has a URL, or is on a
                        volume
    podFailurePolicy    what follows from the exit codes of ``run --worker`` (``cli/execution.py``)

The next pod of an index has the same host name, and starts after the last pod ended, so its claims
are free at once. If a node only seems to be gone, the mirror or the lock decides which pod resumes.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.cli.job_settings import KubernetesJob
from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.cli.short_form import Node, make_executor
from datatrove_ckpt.cli.yaml_config import MASK, FullConfig, construct, dump, leaves
from datatrove_ckpt.common import LAUNCH
from datatrove_ckpt.common.redaction import may_hold_secret
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.executors.local import LocalPipelineExecutor
from datatrove_ckpt.run_folder.run_plan import (
    RunPlan,
    lost_with_disk,
    note_workers,
    refuse_without_claims,
)
from datatrove_ckpt.user_code.own_modules import own_modules

_SECTION = "kubernetes"
# The pod's working folder, also if the submitter's folder is on a volume.
_WORK = "/work"
_CONFIG = "/etc/datatrove-ckpt"
# Seconds after the drain for rollouts and the mirror's last upload (5), besides the servers'.
_TO_SAVE = 10.0
# ``kubectl apply`` copies the object into an annotation, which has at most 256 KiB.
_MOST_BYTES = 200_000
_KEY = re.compile("[-_.a-zA-Z0-9]{1,253}")
_NAME_LENGTH = 56  # with the number of a pod at most the 63 of a label
_LAUNCH_LABEL = "metadata.labels['batch.kubernetes.io/controller-uid']"  # of this very Job


def _on_exit(action: str, *codes: int) -> Node:
    return {"action": action, "onExitCodes": {"operator": "In", "values": list(codes)}}


# The first matching rule counts. Other failures are those of ``backoff``.
_RULES: list[Node] = [
    # Evicted, node lost.
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    _on_exit("Ignore", 129, 130, 138, 143),  # drained on SIGHUP, SIGINT, SIGUSR1, SIGTERM
    _on_exit("FailJob", 2),
    _on_exit("FailIndex", 3),
]


def k8s(arguments: argparse.Namespace) -> int:
    """Prints the manifests. Returns the exit code.

    Raises:
        ConfigError: a mistake in the file, or a job that would lose its work with its pods.
    """
    source = arguments.config or "the command line"
    content, executor = make_executor(arguments.config, arguments.overrides)
    refuse_other_kinds(executor, "k8s")
    plan = RunPlan(executor)
    job = kubernetes_job(content, plan)
    _refuse_lost(plan, job)
    refuse_without_claims(plan)
    note_workers(job.workers or 0, plan.tasks)
    workers = min(job.workers or plan.tasks, plan.tasks)
    name = re.sub("[^a-z0-9]+|^[^a-z]+", "-", Path(source).stem.lower())
    metadata = {"name": job.name or name.strip("-")[:_NAME_LENGTH].rstrip("-")}
    if job.namespace is not None:
        metadata["namespace"] = job.namespace
    config_map = _config_map(content, plan, metadata)
    manifest = _job(plan, job, config_map, workers)
    _refuse_secrets(*leaves(config_map["data"], "ConfigMap"), *leaves(manifest["spec"], "Job"))
    say(f"{dump(config_map)}---\n{dump(manifest)}".rstrip())
    return 0


def refuse_other_kinds(executor: PipelineExecutor, command: str) -> None:
    """Raises:
    ConfigError: its ranks are for other machines, or wait for those of another job.
    """
    if not isinstance(executor, LocalPipelineExecutor):
        given = type(executor).__name__
        raise ConfigError(
            f"{command} needs LocalPipelineExecutor (a job without slurm and jobs); it is {given}.",
            setting="executor",
        )
    if executor.depends is not None:
        raise ConfigError(
            "depends: each worker would run that job. Run it first, as one of "
            "its own, and remove this.",
            setting="executor",
        )


def kubernetes_job(content: Node, plan: RunPlan) -> KubernetesJob:
    """Builds the section, and checks that a drain ends before the grace period.

    Raises:
        ConfigError: a mistake in it, or too little time.
    """
    job = construct(KubernetesJob, content.get(_SECTION), _SECTION)
    steps = [runner.step for runner in plan.runners]
    drain = max((step.drain_seconds for step in steps), default=0.0)
    stops = (config.server_stop_timeout_sec for step in steps for config in step.models.values())
    saving = _TO_SAVE + max(stops, default=0.0)
    if drain + saving > job.grace_seconds:
        longest = job.grace_seconds - saving
        shorter = ""
        if longest >= 0:
            shorter = f", or drain_seconds to at most {longest:g}"
        raise ConfigError(
            f"{_SECTION}: grace_seconds: {job.grace_seconds} s are too few: the drain takes up to "
            f"{drain:g} s (drain_seconds), saving and server_stop_timeout_sec {saving:g} s. Set it "
            f"to at least {drain + saving:g}{shorter}."
        )
    return job


def _refuse_lost(plan: RunPlan, job: KubernetesJob) -> None:
    """Raises:
    ConfigError: names all that would be on the pod's own disk.
    """
    lost = lost_with_disk(plan, job.is_kept)
    if lost:
        raise ConfigError(
            f"{_SECTION}: a pod starts with an empty disk, which goes with it. Set to a URL "
            "(s3://..., hf://buckets/...), or to a folder on a claim of kubernetes.volumes: "
            f"{'; '.join(lost)}."
        )


def _config_map(content: Node, plan: RunPlan, metadata: Node) -> Node:
    """Returns the job's file, and the user's own modules, as far as there is room."""
    text = FullConfig(content).text()
    data = {"job.yaml": text}
    left = _MOST_BYTES - len(text.encode())
    wanted = {
        getattr(runner.step.rollout_fn, "__module__", "").partition(".")[0]
        for runner in plan.runners
    }
    modules = own_modules()
    for module in sorted({*modules, *wanted} - {"datatrove", "datatrove_ckpt"}):
        texts = _texts(modules.get(module, {}), left)
        left -= sum(len(text.encode()) for text in texts.values())
        data |= texts
        if not texts:
            print(f"{module}: is not in the ConfigMap: it must be in the image.", file=sys.stderr)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _texts(files: dict[str, Path], most: int) -> dict[str, str]:
    """Returns texts by key of a ConfigMap; none if one cannot be there, or they are too large."""
    keys = {name: name.replace("/", "..") for name in files}
    fit = all(".." not in name and _KEY.fullmatch(key) for name, key in keys.items())
    if not fit or sum(path.stat().st_size for path in files.values()) > most:
        return {}
    try:
        return {keys[name]: path.read_bytes().decode() for name, path in files.items()}
    except UnicodeDecodeError:
        return {}


def _refuse_secrets(*texts: tuple[str, object]) -> None:
    """Raises:
    ConfigError: names the first that holds what may be one.
    """
    for place, text in texts:
        if isinstance(text, str) and (MASK in text or may_hold_secret(text)):
            raise ConfigError(
                f"{place}: holds what may be a secret (`run --print-config` hides it), and this is "
                "no place for one. Let the job read it from the environment, out of a Secret that "
                f"{_SECTION}.secrets names."
            )


def _job(plan: RunPlan, job: KubernetesJob, config_map: Node, workers: int) -> Node:
    metadata = config_map["metadata"]
    files = {"name": metadata["name"]}
    if any(".." in key for key in config_map["data"]):  # of packages
        files["items"] = [
            {"key": key, "path": key.replace("..", "/")} for key in config_map["data"]
        ]
    here = str(Path.cwd())
    if not job.is_kept(here):
        here = _WORK
    mounts = [
        {"name": "job", "mountPath": _CONFIG, "readOnly": True},
        {"name": "work", "mountPath": _WORK},
    ]
    volumes: list[Node] = [{"name": "job", "configMap": files}, {"name": "work", "emptyDir": {}}]
    for index, (claim, path) in enumerate((job.volumes or {}).items()):
        mounts.append({"name": f"claim-{index}", "mountPath": path})
        volumes.append({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim}})
    folders = {str(runner.step.checkpoints_local_dir) for runner in plan.runners}
    for index, folder in enumerate(
        sorted(one for one in folders if one.startswith("/") and not job.is_kept(one))
    ):
        # No container layer.
        mounts.append({"name": "work", "mountPath": folder, "subPath": f"checkpoints-{index}"})
    gpus = _gpus(plan) if job.gpus is None else job.gpus
    if gpus > 1:  # NCCL needs more than the 64 MiB of a container
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    env = {"PYTHONPATH": _CONFIG, **(job.env or {})}
    variables: list[Node] = [{"name": variable, "value": value} for variable, value in env.items()]
    variables.append({"name": LAUNCH, "valueFrom": {"fieldRef": {"fieldPath": _LAUNCH_LABEL}}})
    container: Node = {
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
    pod: Node = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_seconds,
        # The kernel drops signals without a handler for process 1.
        "shareProcessNamespace": True,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": volumes,
    }
    spec: Node = {
        "completionMode": "Indexed",
        "completions": workers,
        "parallelism": workers,
        "backoffLimitPerIndex": job.backoff,
        "podFailurePolicy": {"rules": _RULES},
        "template": {"spec": pod | (job.pod or {})},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _gpus(plan: RunPlan) -> int:
    configs = [config for runner in plan.runners for config in runner.step.models.values()]
    leased = (config.gpus_each * config.replicas for config in configs if config.engine.leases_gpus)
    return sum(leased) + sum(
        config.gpus or 0 for config in configs if not config.engine.leases_gpus
    )
