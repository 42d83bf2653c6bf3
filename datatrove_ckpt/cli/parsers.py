"""All commands of ``datatrove-ckpt``, their options and their help texts. Imports nothing slow.

Each command names its handler as "module:function". ``main`` imports that module when the command is called, so
``--help`` and ``status`` start without datatrove.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from datatrove_ckpt import __version__
from datatrove_ckpt.cli.help_texts import (
    COMPLETION_EPILOG,
    EPILOG,
    EXAMPLES,
    FORK_EPILOG,
    MIGRATE_EPILOG,
    RELOCATE_EPILOG,
    RESHARD_EPILOG,
    SCHEMA_EPILOG,
    WHAT,
)

OVERRIDES_HELP = """\
any argument in the file can be set on the command line; init_args is left out, steps count from 0:
  --executor.tasks=4
  --pipeline.1.config.max_concurrent_generations=8
  --pipeline.1.rollout_fn.prompt="Summarise: {text}"
"""

_RUN_EPILOG = f"""\
{OVERRIDES_HELP}
exit codes:
  0  done, or submitted
  1  stopped by an error; the same command resumes
  2  a mistake in CONFIG or on the command line; nothing was started
  128 + n  ended by signal n, so 130 for Ctrl-C; the same command resumes
"""

_STATUS_EPILOG = f"""\
{WHAT}
It only reads; a run may be active meanwhile. The sums come first, then the ranks that need attention: damaged, failed,
lost (ended without a word), silent, stuck, slow, interrupted. docs/status.md says what each of them means.

exit codes:
  0  no rank is damaged
  1  a rank is damaged
  2  WHAT is no checkpoint, or a mistake on the command line
"""

_REPORT_EPILOG = f"""\
{WHAT}
The page has its style and its drawings inside. It loads nothing, so it can be sent as it is. A run may be active
meanwhile. Prices are in any currency. A rank uses the GPUs that the YAML file says, or --gpus-per-rank, or one.

exit codes:
  0  the page is written
  1  it could not be read or written
  2  WHAT is no checkpoint, or a mistake on the command line
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

_TRACK_EPILOG = f"""\
{WHAT}
A run with monitoring.mlflow_uri or monitoring.wandb_project does this itself. By hand, it sends what an outage left
behind. Each point is sent once, whoever sends it; keys come from the environment.

exit codes:
  0  all is sent, and no task is at work
  1  another process sends it, or the checkpoint cannot be read
  2  WHAT is no checkpoint of a run that is tracked, or a mistake on the command line
"""

_VERIFY_EPILOG = f"""\
{WHAT}
It only reads; a run may be active meanwhile. Each line names a file or a chunk, what is wrong with it, and what to do.

exit codes:
  0  no problem found, and everything is finished
  1  there are problems
  2  WHAT is no checkpoint, or a mistake on the command line
  3  no problem found, but something is not finished
"""

_REPAIR_EPILOG = f"""\
{WHAT}
It takes back the commits of chunks whose output is missing, truncated, grown or (with --full) altered, and removes what
is left of that output. Then run the pipeline again: exactly these chunks are processed again, from journals and cached
answers where they still exist. No rank may run during the repair. What it cannot repair, it names and leaves alone.

datatrove's executors skip a rank that has a marker in LOGGING_DIR/completions. With --logging-dir, the markers of the
repaired ranks are removed, too.

exit codes:
  0  all problems are repaired (with --dry-run: would be)
  1  some problems are left, or a rank is running
  2  WHAT is no checkpoint, or a mistake on the command line
"""

_SHELLS = ("bash", "zsh", "fish", "tcsh")
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``datatrove-ckpt``. Parsed arguments have a ``handler``, as "module:function"."""
    parser = argparse.ArgumentParser(
        prog="datatrove-ckpt",
        description="Crash-proof LLM inference for datatrove.",
        epilog=f"{_examples([lines[0] for lines in EXAMPLES.values()])}\n{EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"datatrove-ckpt {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_preflight(commands)
    _add_migrate(commands)
    _add_maintenance(commands)
    _add_editing(commands)
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
    parser = _add_config_command(commands, "doctor", doctor, _DOCTOR_EPILOG)
    what = "of one task, to compare what piles up while the hub refuses commits with the room for it"
    parser.add_argument("--documents-per-second", type=_parse_rate, metavar="RATE", help=what)
    parser = _add_config_command(commands, "plan", plan, _PLAN_EPILOG)
    parser.add_argument("--mtbf", required=True, type=parse_time, metavar="TIME", help="such as 90m, 6h or 2d")


def _add_migrate(commands: Any) -> None:
    what = "take over an interrupted run of datatrove's own InferenceRunner"
    parser = _add_config_command(commands, "migrate", what, MIGRATE_EPILOG, "migrate:migrate")
    parser.add_argument(
        "--from", dest="folder", required=True, metavar="FOLDER", help="checkpoints_local_dir of datatrove's run"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, document by document, only")
    parser.add_argument(
        "--logging-dir", metavar="DIR", help="of datatrove's run: its log files show whether it is still on"
    )
    lacking = "documents that files of finished chunks lack were dropped by their rollouts: do not process them again"
    parser.add_argument("--lacking-are-dropped", action="store_true", help=lacking)
    parser.add_argument("--any-text", action="store_true", help="the rollout changes texts: an id alone is enough")


def _add_config_command(commands: Any, name: str, what: str, epilog: str, handler: str = "") -> argparse.ArgumentParser:
    """A command that takes a YAML file and overrides."""
    parser = _add(commands, name, what, f"{epilog}\n{OVERRIDES_HELP}", handler or f"run:{name}")
    parser.add_argument("config", metavar="CONFIG", help="YAML file with one key, executor")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(overrides=[])
    return parser


def _add_maintenance(commands: Any) -> None:
    status = "show how far a run is, and which ranks need attention; also during the run"
    verify = "check the output against the checkpoint"
    repair = "let the next run process damaged chunks again"
    watcher = _add_checkpoint_command(commands, "status", status, _STATUS_EPILOG, "status:status")
    watcher.add_argument("--all", action="store_true", help="print a line for every rank, too")
    watcher.add_argument("--watch", action="store_true", help="show it again and again, until the run is finished")
    seconds = "seconds between two looks of --watch; 2 unless said otherwise"
    watcher.add_argument("--interval", type=_parse_interval, default=2.0, metavar="SECONDS", help=seconds)
    _add_report(commands)
    what = "send what a run did and does to MLflow and Weights & Biases, until it has ended"
    _add_checkpoint_command(commands, "track", what, _TRACK_EPILOG, "track:track")
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
    _add_relocate(commands)
    _add_fork(commands)
    _add_reshard(commands)


def _add_relocate(commands: Any) -> None:
    what = "let a copied checkpoint continue where its output was copied to"
    mover = _add_checkpoint_command(commands, "relocate", what, RELOCATE_EPILOG, "relocate:relocate")
    mover.add_argument("--output", metavar="FOLDER", help="folder or URL where the output files are now")
    mover.add_argument("--sizes-only", action="store_true", help="compare names and sizes, and read no output")
    mover.add_argument("--dry-run", action="store_true", help="compare, print what would be done, and do nothing")


def _add_fork(commands: Any) -> None:
    what = "start a new run with a changed prompt or model, keeping what is still valid"
    forker = _add_checkpoint_command(commands, "fork", what, FORK_EPILOG, "fork:fork")
    forker.add_argument("new", metavar="NEW", help="YAML file of the new run, or its checkpoint folder")
    forker.add_argument("--no-answers", action="store_true", help="keep no answers: other servers may answer otherwise")
    forker.add_argument("--dry-run", action="store_true", help="print what would be kept and paid, and do nothing")
    _add_token_price(forker)


def _add_reshard(commands: Any) -> None:
    what = "deal what is left of a run out to another number of tasks"
    parser = _add(commands, "reshard", what, RESHARD_EPILOG, "reshard:reshard_run")
    parser.add_argument("what", metavar="WHAT", help="YAML file of the run")
    parser.add_argument("--tasks", required=True, type=_parse_tasks, metavar="M", help="the new number of tasks")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and deal nothing out")
    parser.set_defaults(overrides=[])


def _add_report(commands: Any) -> None:
    what = "write one HTML page about a run: rates, ranks, chunks, interruptions, errors, cost"
    report = _add_checkpoint_command(commands, "report", what, _REPORT_EPILOG, "report:report")
    report.add_argument(
        "-o", "--output", metavar="FILE", default="report.html", help="report.html if not given; - prints it"
    )
    report.add_argument("--price-per-gpu-hour", type=_parse_price, metavar="PRICE", help="of one GPU for an hour")
    _add_token_price(report)
    report.add_argument("--gpus-per-rank", type=_parse_count, metavar="N", help="that the servers of a rank use")


def _add_token_price(parser: argparse.ArgumentParser) -> None:
    tokens = "of a million tokens, or of prompt and completion tokens: 0.15,0.60"
    parser.add_argument("--price-per-million-tokens", type=_parse_prices, metavar="PRICE", help=tokens)


def _add_editing(commands: Any) -> None:
    _add(commands, "schema", "print a JSON schema of CONFIG, for editors", SCHEMA_EPILOG, "schema:schema")
    what = "print a script that lets a shell complete this command"
    completion = _add(commands, "completion", what, COMPLETION_EPILOG, "completion:completion")
    completion.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=f"one of {', '.join(_SHELLS)}")


def _add_checkpoint_command(commands: Any, name: str, what: str, epilog: str, handler: str) -> argparse.ArgumentParser:
    parser = _add(commands, name, what, epilog, handler)
    what_is = "checkpoint folder, URL of its mirror, or YAML file of the run"
    parser.add_argument("what", metavar="WHAT", help=what_is)
    parser.set_defaults(overrides=[])
    if name not in ("repair", "report", "track", "relocate", "fork"):
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _add(commands: Any, name: str, what: str, epilog: str, handler: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=f"{_examples(EXAMPLES[name])}\n{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler)
    return parser


def _examples(lines: Iterable[str]) -> str:
    return "".join(["examples:\n", *(f"  {line}\n" for line in lines)])


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


def takes_overrides(arguments: argparse.Namespace) -> bool:
    """Whether the command looks at a YAML file."""
    if "what" not in arguments:
        return "overrides" in arguments
    from datatrove_ckpt.maintenance.where import is_config

    return is_config(arguments.what) or is_config(getattr(arguments, "new", ""))


def _parse_number(text: str, is_right: Callable[[float], bool], what: str) -> float:
    with suppress(ValueError):
        if is_right(number := float(text)):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no {what}")


def _parse_rate(text: str) -> float:
    return _parse_number(text, lambda rate: 0 < rate < math.inf, "number of documents per second, such as 26")


def _parse_interval(text: str) -> float:
    return _parse_number(text, lambda seconds: 0 < seconds <= 86400, "number of seconds, such as 2")


def _parse_price(text: str) -> float:
    return _parse_number(text, lambda price: 0 <= price < math.inf, "price, such as 2.50")


def _parse_prices(text: str) -> tuple[float, float]:
    """The prices of prompt and completion tokens. One price is that of both."""
    first, comma, second = text.partition(",")
    return _parse_price(first), _parse_price(second if comma else first)


def _parse_tasks(text: str) -> int:
    return _parse_count(text, "tasks")


def _parse_count(text: str, of: str = "GPUs") -> int:
    is_count = re.fullmatch("[1-9][0-9]{0,6}", text) is not None
    return int(_parse_number(text, lambda _: is_count, f"number of {of}, such as 8"))


def parse_time(text: str) -> float:
    """Seconds, from a number with its unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)", text)
    if not found or not float(found[1]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; give a number with s, m, h or d, such as 6h")
    return float(found[1]) * _UNITS[found[2]]
