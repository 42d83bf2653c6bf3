"""``datatrove-ckpt run`` and ``doctor``, which build executors of YAML files, and import slowly.

``execution.py`` does the rest of ``run``.
"""

import argparse
from typing import Any

from datatrove_ckpt.cli import printing, short_form
from datatrove_ckpt.cli.short_form import make_executor
from datatrove_ckpt.cli.yaml_config import FullConfig
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import plural, plural_or_no
from datatrove_ckpt.errors import ConfigError


def run(arguments: argparse.Namespace) -> int:
    """Builds the executor and runs it. Returns the exit code.

    Raises:
        ConfigError: a mistake in the file or on the command line; nothing was started.
    """
    job = short_form.read_job(arguments.config, arguments.overrides)
    if "steps" in job:
        from datatrove_ckpt.cli.steps import run_steps  # slow to import

        return run_steps(job, arguments, run_job)
    if arguments.redo:
        raise ConfigError("--redo: is for a job with steps.")
    config, executor = make_executor(arguments.config, arguments.overrides)
    return run_job(config, executor, arguments)


def run_job(config: JsonObject, executor: Any, arguments: argparse.Namespace) -> int:
    """Runs an executor, or does what else the flags say. Returns the exit code."""
    if arguments.worker:
        for name in ("retry_dead_letters", "fail_on_dead_letters"):
            if getattr(arguments, name):
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag}: is for a run of all tasks. Give it without --worker.")
        from datatrove_ckpt.cli.kubernetes import refuse_other_kinds  # slow to import

        refuse_other_kinds(executor, "--worker")
        init_args = config["executor"].get("init_args") or {}
        if not init_args.get("logging_dir"):  # each worker would have one of its own
            raise ConfigError(
                "executor: logging_dir: --worker needs one, where workers find each other's claims."
            )
        if init_args.get("workers", 1) != 1:
            printing.note(
                f"workers: {init_args['workers']}: --worker is one process; start as many as you "
                "want."
            )
        config["executor"]["init_args"] = init_args | {"workers": 1}
        executor.workers = 1
    if "kubernetes" in config:
        from datatrove_ckpt.cli.kubernetes import kubernetes_job  # slow to import
        from datatrove_ckpt.run_folder.run_plan import RunPlan

        kubernetes_job(config, RunPlan(executor))
    if arguments.print_config:
        printing.say(FullConfig(config).text().rstrip())
        return 0
    if arguments.sample is not None:
        from datatrove_ckpt.cli.output_commands import sample

        return sample(executor, arguments.sample)
    from datatrove_ckpt.cli.execution import execute  # not imported for a file with a mistake

    return execute(executor, config, arguments)


def doctor(arguments: argparse.Namespace) -> int:
    job = short_form.read_job(arguments.config, arguments.overrides)
    if "steps" in job:
        from datatrove_ckpt.cli.steps import examine_steps  # slow to import

        checks = [*examine_steps(job, arguments.config or "the command line")]
    else:
        _, executor = make_executor(arguments.config, arguments.overrides)
        # Not imported for a file with a mistake.
        from datatrove_ckpt.run_folder.preflight import doctor as examine

        checks = examine(executor)
    problems = sum(check.state == "problem" for check in checks)
    code = int(problems > 0)
    fields = {
        "config": arguments.config,
        "exit_code": code,
        "checks": [check.to_json() for check in checks],
    }
    warnings = sum(check.state == "warning" for check in checks)
    summary = f"{plural_or_no(problems, 'problem')}, {plural_or_no(warnings, 'warning')}"
    states = ["note", "warning", "problem"]  # what matters most, last
    if arguments.all:
        states = ["ok", *states]
    findings = [str(check) for state in states for check in checks if check.state == state]
    printing.say_result(
        arguments.json, fields, [*findings, f"{summary}: {plural(len(checks), 'check')}"]
    )
    return code
