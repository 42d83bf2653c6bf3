"""All commands of ``datatrove-ckpt``, their options and their help texts. Imports nothing slow.

Each command names its handler as "module:function". ``main`` imports that module when the command is called, so
``--help`` and ``status`` start without datatrove.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from datatrove_ckpt import __version__

OVERRIDES_HELP = """\
any argument in the file can be set on the command line; init_args is left out, steps count from 0:
  --executor.tasks=4
  --pipeline.1.config.max_concurrent_generations=8
  --pipeline.1.rollout_fn.prompt="Summarise {text}"
"""

_RUN_EPILOG = f"""\
{OVERRIDES_HELP}
exit codes:
  0  done, or submitted
  1  stopped by an error; the same command resumes
  2  a mistake in CONFIG or on the command line; nothing was started
  128 + n  ended by signal n, so 130 for Ctrl-C; the same command resumes
"""

_STATUS_EPILOG = """\
exit codes:
  0  all is well
  1  a rank is damaged
  2  CHECKPOINTS is no checkpoint folder
"""

_DOCTOR_EPILOG = """\
Run it where the job will run: on the same node, as the same user, in the same container. Each line is one check: ok,
warning (continue if this is what you want) or problem (the run would fail, or could lose work), and what to do. The
checks write, sync, lock, upload and delete probes of their own, named .datatrove-ckpt-probe-..., and leave nothing
behind. A run may be active meanwhile. The first documents of the input are read to estimate sizes.

exit codes:
  0  no problem
  1  a problem
  2  a mistake in CONFIG or on the command line
"""

_PLAN_EPILOG = """\
It writes and syncs in the checkpoint folder as a run does, and uploads to checkpoints_remote_dir (or to a remote output
folder, if there is no mirror), for a few seconds, and removes what it wrote. Run it on the kind of node that the job
will use.

--mtbf is the mean time between two losses on one node. Tasks are independent, so the number of nodes does not matter.
For sync_seconds a loss is a power loss or a kernel crash, after which the disk is still there. For mirror_seconds it is
a node that never comes back: a spot instance, a container. Do not count kill -9, out of memory, or preemption on a node
that keeps its disk: they lose no answer.

Each row of the table is an interval. Overhead is the share of time that saving takes; only the saving thread spends it,
so the run loses less. Lost is what one loss costs, in seconds of work. Efficiency is the share of useful time. Saving
too often wastes time on saves, too rarely on repeated work. The best interval is sqrt(2 * cost * MTBF) (Young 1974),
refined by Daly in 2006. Near it the choice hardly matters: half or twice the interval is nearly as good. "auto" has
another aim: lose as little as possible for a fixed share of time (2 % for syncs, 5 % for the mirror).

exit codes:
  0  the table is printed
  1  something could not be measured
  2  a mistake in CONFIG or on the command line
"""

_VERIFY_EPILOG = """\
It only reads; a run may be active meanwhile. Each line names a file or a chunk, what is wrong with it, and what to do.

exit codes:
  0  no problem found, and everything is finished
  1  there are problems
  2  CHECKPOINTS is no checkpoint folder
  3  no problem found, but something is not finished
"""

_REPAIR_EPILOG = """\
It takes back the commits of chunks whose output is missing, truncated, grown or (with --full) altered, and removes what
is left of that output. Then run the pipeline again: exactly these chunks are processed again, from journals and cached
answers where they still exist. No rank may run during the repair. What it cannot repair, it names and leaves alone.

datatrove's executors skip a rank that has a marker in LOGGING_DIR/completions. With --logging-dir, the markers of the
repaired ranks are removed, too.

exit codes:
  0  all problems are repaired (with --dry-run: would be)
  1  some problems are left, or a rank is running
  2  CHECKPOINTS is no checkpoint folder
"""

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``datatrove-ckpt``. Parsed arguments have a ``handler``, as "module:function"."""
    parser = argparse.ArgumentParser(prog="datatrove-ckpt", description="Crash-proof LLM inference for datatrove.")
    parser.add_argument("--version", action="version", version=f"datatrove-ckpt {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_preflight(commands)
    _add_maintenance(commands)
    return parser


def _add_run(commands: Any) -> None:
    what = "run the pipeline of a YAML file; run it again to resume"
    run = _add(commands, "run", what, _RUN_EPILOG, "run:run")
    run.description = "Run the pipeline of a YAML file. After any interruption the same command finishes the rest."
    run.add_argument("config", metavar="CONFIG", help="YAML file with one key, executor")
    run.add_argument("--dry-run", action="store_true", help="build everything, print it, run nothing")
    run.add_argument(
        "--retry-dead-letters",
        action="store_true",
        help="process the dead letters of a finished run, into output files of their own, instead of the input",
    )
    run.set_defaults(overrides=[])


def _add_preflight(commands: Any) -> None:
    doctor = "check folders, input, servers and limits before a job starts"
    plan = "measure what saving costs here, and suggest how often to save"
    _add_config_command(commands, "doctor", doctor, _DOCTOR_EPILOG)
    parser = _add_config_command(commands, "plan", plan, _PLAN_EPILOG)
    parser.add_argument("--mtbf", required=True, type=parse_time, metavar="TIME", help="such as 90m, 6h or 2d")


def _add_config_command(commands: Any, name: str, what: str, epilog: str) -> argparse.ArgumentParser:
    """A command that takes a YAML file and overrides, and changes nothing."""
    parser = _add(commands, name, what, f"{epilog}\n{OVERRIDES_HELP}", f"preflight_commands:{name}")
    parser.add_argument("config", metavar="CONFIG", help="YAML file with one key, executor")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(overrides=[])
    return parser


def _add_maintenance(commands: Any) -> None:
    status = "show what each rank has done; also during a run"
    verify = "check the output against the checkpoint"
    repair = "let the next run process damaged chunks again"
    _add_checkpoint_command(commands, "status", status, _STATUS_EPILOG, "status:status")
    checker = _add_checkpoint_command(commands, "verify", verify, _VERIFY_EPILOG, "verify_repair:verify")
    fixer = _add_checkpoint_command(commands, "repair", repair, _REPAIR_EPILOG, "verify_repair:repair")
    for parser in (checker, fixer):
        parser.add_argument("--output", metavar="FOLDER", help="the output folder, if it isn't where run.json says")
        parser.add_argument("--full", action="store_true", help="read all output and compare its content, too")
    fixer.add_argument(
        "--logging-dir",
        metavar="DIR",
        help="the executor's logging_dir; its completion markers of repaired ranks are removed",
    )
    fixer.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")


def _add_checkpoint_command(commands: Any, name: str, what: str, epilog: str, handler: str) -> argparse.ArgumentParser:
    parser = _add(commands, name, what, epilog, handler)
    parser.add_argument("checkpoints", metavar="CHECKPOINTS", type=Path, help="the folder checkpoints_local_dir names")
    if name != "repair":
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _add(commands: Any, name: str, what: str, epilog: str, handler: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler)
    return parser


def split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments into plain ones and overrides.

    ``--executor.tasks=4`` and ``--executor.tasks 4`` are overrides; the second list has them as ``path=value``.
    """
    rest: list[str] = []
    overrides: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if not re.match(r"--(executor|pipeline)\.", argument):
            rest.append(argument)
        else:
            overrides.append(argument if "=" in argument else f"{argument}={next(remaining, '')}")
    return rest, overrides


def parse_time(text: str) -> float:
    """Seconds, from a number with its unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)", text)
    if not found or not float(found[1]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; give a number with s, m, h or d, such as 6h")
    return float(found[1]) * _UNITS[found[2]]
