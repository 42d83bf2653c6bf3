"""``datatrove-ckpt k8s``: prints a job for ``kubectl apply -f -``."""

import argparse
import re
from pathlib import Path

from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.cli import short_form, yaml_config
from datatrove_ckpt.cli.printing import note, say
from datatrove_ckpt.cli.yaml_config import FullConfig, dump
from datatrove_ckpt.common.redaction import may_hold_secret
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.executors import kubernetes
from datatrove_ckpt.run_folder import run_plan

_SECTION = "kubernetes"
# Seconds after the drain for rollouts and the mirror's last upload (5), besides the servers'.
_TO_SAVE = 10.0
_NAME_LENGTH = 56  # with the number of a pod at most the 63 of a label


def k8s(arguments: argparse.Namespace) -> int:
    """Prints the manifests.

    Raises:
        ConfigError: a mistake in the file, or a job that would lose its work with its pods.
    """
    source = arguments.config or "the command line"
    config, executor = short_form.make_executor(arguments.config, arguments.overrides)
    refuse_other_kinds(executor, "k8s")
    plan = run_plan.RunPlan(executor)
    job = kubernetes_job(config, plan)
    lost = run_plan.lost_with_disk(plan, job.is_kept)
    if lost:
        raise ConfigError(
            f"{_SECTION}: a pod's disk goes with it. Set to a URL (s3://..., hf://buckets/...), "
            f"or a folder on a claim of kubernetes.volumes: {'; '.join(lost)}."
        )
    run_plan.refuse_without_claims(plan)
    run_plan.note_workers(job.workers or 0, plan.tasks)
    workers = min(job.workers or plan.tasks, plan.tasks)
    name = re.sub("[^a-z0-9]+|^[^a-z]+", "-", Path(source).stem.lower())
    metadata = {"name": job.name or name.strip("-")[:_NAME_LENGTH].rstrip("-")}
    if job.namespace is not None:
        metadata["namespace"] = job.namespace
    files, left_out = kubernetes.config_map(FullConfig(config).text(), plan, metadata)
    for module in left_out:
        note(f"{module}: must be in the image.")
    printed = kubernetes.manifest(plan, job, files, workers)
    in_files = yaml_config.leaves(files["data"], "ConfigMap")
    for yaml_path, text in [*in_files, *yaml_config.leaves(printed["spec"], "Job")]:
        if isinstance(text, str) and (yaml_config.MASK in text or may_hold_secret(text)):
            raise ConfigError(
                f"{yaml_path}: holds what may be a secret. Let the job read it from a Secret "
                f"that {_SECTION}.secrets names."
            )
    say(f"{dump(files)}---\n{dump(printed)}".rstrip())
    return 0


def refuse_other_kinds(executor: PipelineExecutor, command: str) -> None:
    """Refuses an executor that a pod or a worker cannot run.

    Raises:
        ConfigError: its tasks are for other machines, or wait for another job.
    """
    if not hasattr(executor, "run_worker"):
        name = type(executor).__name__
        raise ConfigError(
            f"{command} needs LocalPipelineExecutor (no slurm, no jobs); it is {name}.",
            setting="executor",
        )
    if executor.depends is not None:
        raise ConfigError(
            "depends: run that job first, and remove depends.",
            setting="executor",
        )


def kubernetes_job(sections: short_form.Node, plan: run_plan.RunPlan) -> kubernetes.KubernetesJob:
    """Builds the settings of the section, and checks that a drain ends before the grace period.

    Raises:
        ConfigError: a mistake in the section, or too little time.
    """
    job = yaml_config.construct(kubernetes.KubernetesJob, sections.get(_SECTION), _SECTION)
    steps = [runner.step for runner in plan.runners]
    drain = max((step.drain_seconds for step in steps), default=0.0)
    stops = (config.server_stop_timeout_sec for step in steps for config in step.models.values())
    saving = _TO_SAVE + max(stops, default=0.0)
    if drain + saving > job.grace_seconds:
        raise ConfigError(
            f"{_SECTION}: grace_seconds: {job.grace_seconds} s are too few for drain_seconds "
            f"({drain:g} s), saving and server_stop_timeout_sec ({saving:g} s). Set at least "
            f"{drain + saving:g}, or lower drain_seconds."
        )
    return job
