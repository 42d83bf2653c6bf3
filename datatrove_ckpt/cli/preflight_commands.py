"""datatrove-ckpt doctor and plan: what they take, what they print, how they end.

What they find out is in ``preflight``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import orjson
from loguru import logger

from datatrove_ckpt.cli.overrides import add_config_command, make_executor
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.preflight.doctor import examine
from datatrove_ckpt.preflight.plan import advise, describe
from datatrove_ckpt.runner import InferenceRunner

_DOCTOR_EPILOG = """\
Run it where the job will run: on the node, as the user, in the container. Each line is a check: ok, warning (know it,
and go on if you meant it) or problem (the run would fail, or could lose work), and what to do. The checks try things:
they write, sync, lock, upload and delete probes of their own, named .datatrove-ckpt-probe-..., and leave nothing.
A run may be on meanwhile. The first documents of the input are read, to estimate sizes.

exit codes:
  0  no problem
  1  a problem
  2  a mistake in CONFIG or on the command line
"""

_PLAN_EPILOG = """\
It writes and syncs in the checkpoint folder as a run does, and uploads to checkpoints_remote_dir (or to a remote output
folder, if there is none), for a few seconds, and removes what it wrote. Run it on the kind of node the job will run on.

--mtbf is the mean time between two losses on one node: tasks are independent, so the loss of another node costs this
one nothing, and the number of nodes does not matter. For sync_seconds a loss is a power loss or a kernel crash, after
which the disk is there again. For mirror_seconds it is a node that never comes back: a spot instance, a container.
Leave out kill -9, out of memory and preemption on a node that keeps its disk: they cost nothing of what was answered.

Each row of the table is an interval: overhead is the share of time that saving takes (of the thread that saves: answers
go on meanwhile, so the run loses less), lost is what a loss costs, in seconds of work, and efficiency what is left of
all time. Too often wastes time on saving, too seldom on doing again. The best interval is sqrt(2 * cost * MTBF) (Young
1974), refined by Daly in 2006. Near it the choice hardly matters: twice the interval, or half of it, is as good.
"auto" is another aim: lose as little as can be had for a set share of time (2 % for syncs, 5 % for the mirror).

exit codes:
  0  the table is printed
  1  something could not be measured
  2  a mistake in CONFIG or on the command line
"""

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def add_doctor(commands: Any) -> None:
    """Adds the subcommand to the parser's."""
    what = "check the folders of a YAML file before a job starts"
    add_config_command(commands, "doctor", _doctor, what, _DOCTOR_EPILOG)


def _doctor(arguments: argparse.Namespace) -> int:
    executor = make_executor(arguments)
    with _quiet():
        checks = examine(executor)
    problems = sum(check.state == "problem" for check in checks)
    code = 1 if problems else 0
    if arguments.json:
        content = {"config": arguments.config, "exit_code": code, "checks": [asdict(check) for check in checks]}
        print(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())
    else:
        warnings = sum(check.state == "warning" for check in checks)
        found = plural(problems, "problem") if problems else "no problem"
        total = f"{found}, {plural(warnings, 'warning') if warnings else 'no warning'}: {plural(len(checks), 'check')}"
        print("\n".join([*map(str, checks), total]))
    return code


@contextmanager
def _quiet() -> Iterator[None]:
    """Readers say in the log what they read."""
    logger.disable("datatrove")
    logger.disable("datatrove_ckpt")
    try:
        yield
    finally:
        logger.enable("datatrove")
        logger.enable("datatrove_ckpt")


def add_plan(commands: Any) -> None:
    """Adds the subcommand to the parser's."""
    what = "measure what saving costs here, and say how often is enough"
    parser = add_config_command(commands, "plan", _plan, what, _PLAN_EPILOG)
    parser.add_argument("--mtbf", required=True, type=parse_time, metavar="TIME", help="such as 90m, 6h or 2d")


def parse_time(text: str) -> float:
    """Seconds, from a number with its unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)", text)
    if not found or not float(found[1]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give a number and s, m, h or d, such as 6h")
    return float(found[1]) * _UNITS[found[2]]


def _plan(arguments: argparse.Namespace) -> int:
    executor = make_executor(arguments)
    steps = {index: step for index, step in enumerate(executor.pipeline) if isinstance(step, InferenceRunner)}
    advice = [advise(f"pipeline[{index}]", step, arguments.mtbf) for index, step in steps.items()]
    if not advice:
        raise ConfigError(f"{arguments.config}: has no InferenceRunner, so there is nothing to save.")
    if arguments.json:
        content = {"config": arguments.config, "mtbf": arguments.mtbf, "runners": [asdict(one) for one in advice]}
        print(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())
    else:
        print("\n\n".join("\n".join(describe(one)) for one in advice))
    return 0
