"""``datatrove-ckpt run`` and ``doctor``, which build executors of YAML files, and import slowly."""

import argparse

from datatrove_ckpt.cli import printing, short_form
from datatrove_ckpt.cli.short_form import make_executor
from datatrove_ckpt.common.formatting import plural, plural_or_no
from datatrove_ckpt.errors import ConfigError


def run(arguments: argparse.Namespace) -> int:
    """Builds the executor and runs it.

    Raises:
        ConfigError: a mistake in the file or on the command line; nothing was started.
    """
    job = short_form.read_job(arguments.config, arguments.overrides)
    if "steps" in job:
        from datatrove_ckpt.cli.steps import run_steps

        return run_steps(job, arguments)
    if arguments.redo:
        raise ConfigError("--redo: is for a job with steps.")
    config, executor = make_executor(arguments.config, arguments.overrides)
    from datatrove_ckpt.cli.execution import run_job  # not imported for a file with a mistake

    return run_job(config, executor, arguments)


def doctor(arguments: argparse.Namespace) -> int:
    job = short_form.read_job(arguments.config, arguments.overrides)
    if "steps" in job:
        from datatrove_ckpt.cli.steps import examine_steps

        checks = [*examine_steps(job, arguments.config or "the command line")]
    else:
        _, executor = make_executor(arguments.config, arguments.overrides)
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
    states = ["note", "warning", "problem"]
    if arguments.all:
        states = ["ok", *states]
    findings = [str(check) for state in states for check in checks if check.state == state]
    printing.say_result(
        arguments.json, fields, [*findings, f"{summary}: {plural(len(checks), 'check')}"]
    )
    return code
