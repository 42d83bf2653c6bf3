"""The program ``datatrove-ckpt``: defines every command with its options and its help, parses the
command line, and calls the command.

A command is a function below ``_command``: its docstring is its ``--help``. The module that
``_command`` names carries it out, and is imported only then: ``--help`` and ``status`` start
without datatrove.

No traceback of an error of this package reaches the terminal.
"""

import argparse
import errno
import functools
import inspect
import re
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from datatrove_ckpt import __version__
from datatrove_ckpt.cli.printing import fail
from datatrove_ckpt.common import JsonObject, formatting
from datatrove_ckpt.common.setting_types import docstring, meanings
from datatrove_ckpt.errors import CkptError, ConfigError, written_in
from datatrove_ckpt.process.gc_tuning import gc_paused

_Argument = tuple[tuple[str, ...], JsonObject]

OVERRIDES_HELP = """\
a job, or changes of one, in the short form:
  --input documents/ --prompt "Summarise: {text}" --endpoint http://127.0.0.1:8000 --model m
  --run-folder runs/x --max-tokens 60
in the long form (without init_args, steps from 0):
  --executor.tasks=4
  --pipeline.1.config.max_concurrent_generations=8
  --pipeline.1.rollout_fn.prompt="Summarise: {text}"
"""
_WHAT_HELP = """\
WHAT is a run_folder, a checkpoints_local_dir, its mirror (checkpoints_remote_dir), or the run's
YAML file with its overrides:
  --pipeline.1.checkpoints_local_dir=other/checkpoints
"""
_EPILOG = """
exit codes:
  0  done; for doctor, verify, repair: no problem
  1  an error, or problems; after run, the same command resumes
  2  a mistake in a file or on the command line; nothing was started
  3  verify: something is not finished
  4  run: max_cost or max_total_tokens is reached; a higher limit resumes
  128 + n  ended by signal n; after run, the same command resumes

datatrove-ckpt COMMAND --help explains each command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    typed = list(sys.argv[1:] if argv is None else argv)
    plain, overrides = split_overrides(typed)
    parser = make_parser()
    arguments = parser.parse_args(plain)
    # Not for --help, because loguru is slow to import.
    from datatrove_ckpt.checkpoint.checksummed_lines import explained
    from datatrove_ckpt.process.task_errors import safe_log
    from datatrove_ckpt.torch.step_folder import is_training

    safe_log()
    takes_overrides = "config" in arguments
    if overrides and "what" in arguments:
        from datatrove_ckpt.run_folder.run_location import is_config

        takes_overrides = is_config(arguments.what)
    for override in overrides:
        flag, equals, _ = override.partition("=")
        hint = formatting.did_you_mean(flag.lower(), _own_flags(typed) - {"--"}, 0.75)
        is_setting = takes_overrides and _is_setting(flag)
        if not is_setting and (hint or not equals or not takes_overrides):
            if flag.removeprefix("--") in _own_flags(typed):
                hint = "; give its value alone."
            parser.error(f"{flag}: there is no such flag{hint or '.'}{_INSTEAD.get(flag, '')}")
        if not equals:
            parser.error(f"{flag}: its value is missing")
    if not overrides and getattr(arguments, "config", "") is None:
        parser.error(
            "CONFIG is missing, or flags: --input ... --prompt ... --model ... --run-folder ..."
        )
    arguments.overrides = overrides
    arguments.command = ["datatrove-ckpt", *typed]
    name = arguments.module
    with written_in(""):
        try:
            try:
                if is_training(getattr(arguments, "what", None)):
                    if arguments.name not in _OF_TRAININGS:
                        raise ConfigError(
                            f"{arguments.what} is a training's folder: use status, show or verify."
                        )
                    name = "training"
                with gc_paused():
                    module = import_module(f"datatrove_ckpt.cli.{name}")
                code: int = getattr(module, arguments.name)(arguments)
            except OSError as error:
                is_refused = isinstance(error, PermissionError) or error.errno == errno.EROFS
                if error.filename is None or not is_refused:
                    raise
                with explained("use", error.filename):  # mostly a checkpoint of another user
                    raise
        except ConfigError as error:
            return fail(error, 2)
        except (CkptError, OSError) as error:
            return fail(error, 1)
        return code


_INSTEAD = {
    "--force": " Choose another run_folder.",
    "--resume": " The same command resumes.",
    "--wandb": " Use --mlflow.",
}
"""Advice about flags of other tools, and of earlier releases."""


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        if "(SETTINGS)\n" in str(self.epilog):
            from datatrove_ckpt.cli.job_settings import ShortJob

            text = "settings of a job, in CONFIG or as flags (all others: docs/settings.md):\n"
            wrapper = textwrap.TextWrapper(80, subsequent_indent=" " * 18)
            for name, (_, meaning) in meanings(ShortJob).items():
                wrapper.initial_indent = f"  --{name.replace('_', '-'):14}"
                text += f"{wrapper.fill(meaning)}\n"
            self.epilog = str(self.epilog).replace("(SETTINGS)\n", text)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized"):
            hint = ". Flags have two dashes; patterns, and values with spaces, need quotes."
        if re.search(r"argument COMMAND: .* '\S+\.ya?ml'", message):
            hint = ". Write run before the file."
        super().error(f"{message}{hint}")


@functools.cache
def make_parser() -> argparse.ArgumentParser:
    """Returns the parser. Parsed arguments have the ``name`` of the command and its ``module``."""
    as_written = argparse.RawDescriptionHelpFormatter
    summary = "Crash-proof LLM inference for datatrove."
    parser = _Parser(prog="datatrove-ckpt", description=summary, formatter_class=as_written)
    parser.add_argument("--version", action="version", version=f"datatrove-ckpt {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    examples = ["examples:\n"]
    for name, module, text, arguments in _COMMANDS:
        description, _, epilog = text.partition("\n\n")
        summary = f"{description[0].lower()}{description[1:-1]}"
        end = f"{epilog}\n".replace("(WHAT)\n", _WHAT_HELP).replace("(OVERRIDES)\n", OVERRIDES_HELP)
        command = commands.add_parser(
            name, help=summary, description=description, epilog=end, formatter_class=as_written
        )
        command.set_defaults(name=name, module=module)
        for names, options in arguments:
            command.add_argument(*names, **options)
        examples += epilog.splitlines(keepends=True)[1:2]
    parser.epilog = "".join(examples) + _EPILOG
    return parser


def _is_setting(flag: str) -> bool:
    from datatrove_ckpt.cli.short_form import settings
    from datatrove_ckpt.cli.yaml_config import OTHER_NAMES

    name = flag.removeprefix("--").replace("-", "_")
    return "." in flag or name in OTHER_NAMES or name in settings()


def split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments into plain arguments and overrides, which are unknown flags.

    ``--model=m`` and ``--model m`` are overrides; the second list has them as ``path=value``, those
    without a value as they are.
    """
    command_flags = _own_flags(arguments)
    plain = list[str]()
    overrides = list[str]()
    remaining = deque(arguments)
    while remaining:
        argument = remaining.popleft()
        if not argument.startswith("--") or argument.partition("=")[0] in command_flags:
            plain.append(argument)
        elif "=" in argument or not remaining or re.match("--[a-z]", remaining[0]):
            overrides.append(argument)
        else:
            overrides.append(f"{argument}={remaining.popleft()}")
    return plain, overrides


def _own_flags(arguments: list[str]) -> set[str]:
    options = {name: flags for name, _, _, flags in _COMMANDS}.get(next(iter(arguments), ""), ())
    return {"-h", "--help", "--version", "--", *(name for names, _ in options for name in names)}


def _count(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 10**7:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of documents, such as 8")


def _argument(metavar: str, help: str, *names: str, **options: object) -> _Argument:
    return names or (metavar.lower(),), {"metavar": metavar, "help": help, **options}


def _flag(name: str, help: str) -> _Argument:
    return (name,), {"action": "store_true", "help": help}


_CONFIG = _argument("CONFIG", "YAML file; without it, flags are the job", nargs="?")
_WHAT = _argument("WHAT", "run folder, checkpoint folder, mirror's URL, or YAML file")
_JSON = _flag("--json", "print JSON")
_OUTPUT = _argument("FOLDER", "the output folder, if job.json names another", "--output")
_FULL = _flag("--full", "also compare the content of all output")
_STEP = _argument("NAME", "which step; default: the last", "--step")


_COMMANDS: list[tuple[str, str, str, tuple[_Argument, ...]]] = []
_OF_TRAININGS = ("status", "show", "verify")
"""Commands that also take the folder of a training's checkpoints."""


def _command(module: str, *arguments: _Argument) -> Callable[[Callable[[], None]], None]:
    """The tests run the command lines below "examples:" in a command's docstring.

    Args:
        module: the module of ``cli`` whose function of this name takes the parsed arguments and
            returns the exit code.
    """
    return lambda described: _COMMANDS.append(
        (described.__name__, module, inspect.cleandoc(docstring(described)), arguments)
    )


@_command(
    "run",
    _CONFIG,
    _flag("--dry-run", "print the long form and Slurm's script, run nothing"),
    _flag("--print-config", "print the long form of the job, run nothing"),
    _flag(
        "--retry-dead-letters",
        "process a finished run's dead letters, into output files of their own",
    ),
    _argument(
        "N",
        "send N documents, print the answers, write no output",
        "--sample",
        type=_count,
    ),
    _flag(
        "--worker",
        "run free tasks until there is none; start any number of workers",
    ),
    _flag("--cancel", "cancel this run's Hugging Face Jobs"),
    _flag(
        "--no-wait",
        "exit code 75 while provider_batches are open",
    ),
    _flag("--fail-on-dead-letters", "exit code 1 if dead letters are left"),
    _argument(
        "STEP",
        "run a step, and what depends on it, anew; unchanged rows keep their answers",
        "--redo",
        action="append",
    ),
)
def run() -> None:
    """Run the pipeline of a YAML file; run it again to resume.

    examples:
      datatrove-ckpt run configs/quickstart.yaml
      datatrove-ckpt run configs/quickstart.yaml --dry-run --pipeline.0.limit=5

    (OVERRIDES)

    (SETTINGS)

    exit codes:
      0  done, or submitted; with --worker: no task is free or given up, others may still run
      1  stopped by an error or a time limit; the same command resumes
         with --fail-on-dead-letters also: dead letters are left
      2  a mistake in CONFIG or on the command line; nothing was started
         with --worker also: the checkpoint or the input is another run's, so no task can continue
      3  with --worker: no task is free, but some were given up; they are named
      4  max_cost or max_total_tokens is reached; a higher limit resumes
      75  with --no-wait: batches are at the provider; the same command collects their answers
      128 + n  ended by signal n, so 130 for Ctrl-C; the same command resumes
         with --worker also 143: stopped early without a signal, by a time limit or a notice
    """


@_command(
    "tune",
    _CONFIG,
    _argument(
        "N",
        "rows that each candidate answers; more than the servers take at once (default: 200)",
        "--sample",
        type=_count,
        default=200,
    ),
    _argument(
        "SETTINGS",
        "of the model, as YAML, to try instead; repeatable",
        "--try",
        action="append",
        default=[],
        dest="tried",
    ),
    _argument(
        "PRICE",
        "of a GPU hour, for the cost of a million rows",
        "--gpu-hour",
        type=float,
    ),
)
def tune() -> None:
    """Measure a few settings of the model's servers with rows of the job.

    examples:
      datatrove-ckpt tune configs/quickstart.yaml --try '{model_kwargs: {threads: 2}}'

    It tries, one after the other, the ways to divide the node's GPUs, and then flags of the engine
    on top of the best so far. A candidate that is clearly slower ends early. What was measured is
    kept beside the checkpoints: the same command goes on, and the run takes the answers that its
    own settings would give. No run may be active on the same GPUs.

    exit codes:
      0  the best settings are printed
      1  stopped by an error; the same command goes on
      2  a mistake in CONFIG or on the command line; nothing was started

    (OVERRIDES)
    """


@_command("kubernetes", _CONFIG)
def k8s() -> None:
    """Print the job for Kubernetes: a ConfigMap and an Indexed Job.

    examples:
      datatrove-ckpt k8s configs/kubernetes.yaml

    Pipe it into `kubectl apply -f -`. The section kubernetes of CONFIG names image, resources,
    volumes and the number of pods, which share the tasks. What a pod would lose is refused. It
    contacts no cluster.

    exit codes:
      0  the manifests are printed
      2  a mistake in CONFIG or on the command line, or work that would be lost with a pod

    (OVERRIDES)
    """


@_command("run", _CONFIG, _JSON, _flag("--all", "also print the checks that are ok"))
def doctor() -> None:
    """Check folders, input, servers and limits before a job starts.

    examples:
      datatrove-ckpt doctor configs/quickstart.yaml

    Run it where the job will run: on the same node, as the same user, in the same container. Each
    line is one check and what to do: warning (continue if this is what you want) or problem (the
    run would fail, or could lose work). Problems come last; --all also prints the checks that are
    ok. The checks write, lock, upload and delete probes of their own, named
    .datatrove-ckpt-probe-..., and leave nothing behind. A run may be active meanwhile. The first
    documents of the input are read.

    exit codes:
      0  no problem
      1  a problem
      2  a mistake in CONFIG or on the command line

    (OVERRIDES)
    """


@_command(
    "status",
    _WHAT,
    _JSON,
    _flag("--all", "also print each task"),
)
def status() -> None:
    """Show how far a run is, and which tasks need attention; also during the run.

    examples:
      datatrove-ckpt status quickstart/checkpoints

    (WHAT)

    WHAT may also be the folder of TrainingCheckpoints: its steps, the loss curve, and the step that
    a restore takes.

    It only reads; a run may be active meanwhile. The sums come first, then the tasks that need
    attention: damaged, failed, lost (killed, or its node is gone), silent, stuck, slow,
    interrupted. docs/status.md explains each.

    exit codes:
      0  no task is damaged; of a training: a step is whole
      1  a task is damaged; of a training: no step is whole
      2  WHAT is no checkpoint, or a mistake on the command line
    """


@_command(
    "status",
    _argument("ACTION", "list, or cancel", choices=("list", "cancel")),
    _WHAT,
)
def batches() -> None:
    """List or cancel the batches that a run has at a provider.

    examples:
      datatrove-ckpt batches list quickstart/checkpoints

    (WHAT)

    Stop the run before you cancel its batches. Their key is read from the variable that api_key_env
    of the run names. Answers that they have are kept: the next run collects them, and sends the
    rest, as a batch or one by one, as provider_batches says. A batch that the provider has
    forgotten, as a run has seen, is given up: the next run sends, and pays for, its requests again.

    exit codes:
      0  the batches are listed, are being canceled, or are given up
      1  a batch could not be canceled
      2  WHAT is no checkpoint, or a mistake on the command line
    """


@_command(
    "output_commands",
    _WHAT,
    _argument("FILE", "default: report.html in the run folder; - prints it", "-o", "--output"),
)
def report() -> None:
    """Write one HTML page about a run: sums, rates, interruptions.

    examples:
      datatrove-ckpt report quickstart/checkpoints -o quickstart/report.html

    (WHAT)

    The page has its style and its drawings inside. It loads nothing, so it can be sent as it is. A
    run may be active meanwhile.

    exit codes:
      0  the page is written
      1  it could not be read or written
      2  WHAT is no checkpoint, or a mistake on the command line
    """


@_command(
    "output_commands",
    _WHAT,
    _argument("N", "how many; default: 5", "--n", type=_count, default=5),
    _argument("ID", "those with this id", "--id"),
    _argument("TEXT", "those with this in their text or answer, in any case", "--grep"),
    _flag("--dead", "dead letters that no retry has taken, with causes"),
    _argument("SELECT", "first rows of a query over steps", "--sql"),
    _STEP,
    _OUTPUT,
)
def show() -> None:
    """Print documents with their answers.

    examples:
      datatrove-ckpt show quickstart/checkpoints --n 2

    (WHAT)

    Of the folder of TrainingCheckpoints it prints a line for each step, with sizes and metrics.

    Documents come from the output files, in the order of the input; long texts are shortened in
    their middle, but for those of --id. Secrets and control characters are not printed. A run may
    be active meanwhile: a file appears when its chunk is finished.

    exit codes:
      0  at least one document is printed
      1  there is none, or the output cannot be read
      2  WHAT is no checkpoint, or a mistake on the command line
    """


@_command(
    "output_commands",
    _WHAT,
    _argument("TARGET", "file.csv, file.jsonl, file.parquet, or hf://datasets/ORG/NAME"),
    _STEP,
    _OUTPUT,
)
def export() -> None:
    """Write the output as one file, or to a dataset repository.

    examples:
      datatrove-ckpt export quickstart/checkpoints quickstart/answers.csv

    (WHAT)

    Documents come task by task in input order, those of retries last. A CSV has a column for each
    that any document has; lists and dictionaries are JSON there. Parquet needs pip install
    'datatrove-ckpt[parquet]', and the hub [hub]. A run may be active meanwhile: its complete chunks
    are written.

    exit codes:
      0  the file is written
      1  the output cannot be read, or differs from the commits, or the file cannot be written
      2  WHAT is no checkpoint, the file is there already, or a mistake on the command line
    """


@_command(
    "track",
    _WHAT,
    _argument(
        "URI", 'MLflow\'s server, "databricks", a folder, a database', "--mlflow", required=True
    ),
    _argument(
        "NAME",
        "MLflow's experiment, made if missing",
        "--experiment",
        default="datatrove-ckpt",
    ),
    _argument("NAME", "the run's name there; default: its folder's", "--name", dest="name_of_run"),
)
def track() -> None:
    """Send what a run does to MLflow, until no task is at work.

    examples:
      datatrove-ckpt track quickstart/checkpoints --mlflow http://127.0.0.1:5000

    (WHAT)

    Start it beside the run, once that has begun, on any machine that sees the folder or the mirror.
    It sends the sums of `status --json` each minute. Started again, it continues the same run
    there. Keys come from the environment.

    exit codes:
      0  all is sent, and no task is at work
      1  the checkpoint cannot be read
      2  WHAT is no checkpoint, or a mistake on the command line
    """


@_command("output_commands", _WHAT, _JSON, _OUTPUT, _FULL)
def verify() -> None:
    """Check the output against the checkpoint.

    examples:
      datatrove-ckpt verify quickstart/checkpoints --full

    (WHAT)

    Of the folder of TrainingCheckpoints it reads each file of each step.

    It only reads; a run may be active meanwhile. Each line names a file or a chunk, what is wrong
    with it, and what to do.

    exit codes:
      0  no problem found, and everything is finished
      1  there are problems
      2  WHAT is no checkpoint, or a mistake on the command line
      3  no problem found, but something is not finished
    """


@_command(
    "output_commands",
    _WHAT,
    _OUTPUT,
    _FULL,
    _argument(
        "DIR",
        "the executor's logging_dir, to remove the markers of repaired tasks",
        "--logging-dir",
    ),
    _flag("--dry-run", "print what would be done"),
)
def repair() -> None:
    """Let the next run process damaged chunks again.

    examples:
      datatrove-ckpt repair quickstart/checkpoints --logging-dir quickstart/logs --dry-run

    (WHAT)

    It takes back the commits of chunks whose output is missing, truncated, grown or (with --full)
    altered, and removes what is left of that output. Then run the pipeline again: exactly these
    chunks are processed again, from journals and cached answers where they still exist. No task may
    run during the repair. What it cannot repair, it names and leaves alone.

    datatrove's executors skip a task that has a marker in LOGGING_DIR/completions. With
    --logging-dir, repair also removes the markers of the repaired tasks.

    exit codes:
      0  all problems are repaired (with --dry-run: would be)
      1  some problems are left, or a task is running
      2  WHAT is no checkpoint, or a mistake on the command line
    """
