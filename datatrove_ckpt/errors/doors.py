"""The door through which a job came, the names of settings there, and what helps against an error.

A door is the Python API, the command line, or ``run()``; the short form has other names for some
settings. So a message marks a setting (``f"Correct {written.data_folder}."``), and an error has
remedies among its arguments: ``CheckpointMismatch("Restore it, or start with ", StartOver(),
".")``.

The door belongs to the process: threads of a rank share it. A step carries it into worker processes
and jobs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

_SHORT = {
    "checkpoints_local_dir": "run_folder",
    "output_folder": "run_folder",
    "logging_dir": "run_folder",
    "data_folder": "input",
    "glob_pattern": "input",
    "model_name_or_path": "model",
    "endpoint_url": "endpoint",
    "rollout_fn": "rollout",
}
"""The settings that have another name in the short form."""
_INSIDE = ("default_generation_params.", "InferenceConfig.", "rollout_fn.")
"""Where the long form has settings that the short form has beside the others."""
_PHRASES = {
    # one setting of the short form
    "folders": ("checkpoints_local_dir, output_folder and logging_dir", "run_folder"),
    "finished_folders": ("output_folder and checkpoints_local_dir", "run_folder"),
    "old_results": (
        ", and set finished_from to the old output_folder and checkpoints_local_dir: finished "
        "documents keep their results",
        ", and set finished_from to the old run_folder: finished documents keep their results",
    ),
    "own_folders": (
        "a checkpoints_local_dir, an output_folder and a logging_dir of its own",
        "a run_folder of its own",
    ),
    "input": ("data_folder, glob_pattern", "input"),
    # what the short form does not have
    "one_type": (
        "Give ParquetWriter a schema that fits, or an adapter that sets one type (a new adapter "
        "needs accept_changes=True)",
        "Go on with output_format: jsonl, which takes values of any types, and accept_changes: "
        "what is committed stays as it is",
    ),
    "or_adapter": (", or write an adapter", ""),
    "and_adapter": (" and the adapter of the reader", ""),
    "run_here": ("use class_path: LocalPipelineExecutor", "leave slurm out"),
    "local_tasks": ("class_path: LocalPipelineExecutor", "a job without slurm and jobs"),
    "may_hold_variables": (" (checkpoints_local_dir may contain variables.)", ""),
}
_ACTS = {
    "as_run": ("by run()", "without --worker"),
    "as_worker": ("by run_worker()", "with --worker"),
    "cancel": ("call cancel() of the executor", "add --cancel to the command"),
    "retry_dead_letters": ("retry_dead_letters=True", "--retry-dead-letters"),
}
"""What is done in Python, and what is done on the command line for it."""


@dataclass(frozen=True)
class Door:
    """How a job was started. Without arguments: in Python.

    Attributes:
        form: what has the settings of the short form: a file, "the command line" or "run()"; "":
            the long form.
        runner: the place of the ``InferenceRunner`` in the pipeline.
    """

    form: str = ""
    is_command: bool = False
    runner: int = 1

    def name(self, setting: str) -> str:
        """Returns a setting, a phrase about several, or an act, as it is written here."""
        if setting in _ACTS:
            return _ACTS[setting][self.is_command]
        if setting == "executor" and self.form:
            return self.form
        long, short = _PHRASES.get(setting, (setting, _SHORT.get(setting, setting)))
        if not self.form:
            return long
        for outer in _INSIDE:
            short = short.removeprefix(outer)
        return _SHORT.get(short, short)


_door = Door()
_words: Sequence[str] = ()
"""The command line. It stays in this process: it may hold what no file may."""


def current() -> Door:
    return _door


def use(door: Door) -> None:
    """Sets the door for all messages from now on."""
    global _door
    _door = door


@contextmanager
def entered(door: Door, words: Sequence[str] = ()) -> Iterator[None]:
    """``use`` for a block. ``words``: the command line."""
    global _words
    before = _door, _words
    use(door)
    _words = words
    try:
        yield
    finally:
        use(before[0])
        _words = before[1]


def command() -> str:
    return shlex.join(_words)


def _command_of_all() -> list[str]:
    """Returns the command without ``--worker``, because a run of all tasks can do more."""
    return [word for word in _words if word != "--worker"]


def without_flag(command: Sequence[str], setting: str) -> str:
    """Returns a command without a setting's flags: ``--tasks=2``, ``--executor.tasks 2``."""
    kept: list[str] = []
    words = iter(command)
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag not in (f"--{setting}", f"--executor.{setting}"):
            kept.append(word)
        elif not equals:
            next(words, None)
    return shlex.join(kept)


def step_name(index: int, step: object) -> str:
    name = type(step).__name__
    if _door.form:
        return name
    return f"pipeline[{index}] {name}"


def step_place(index: int, step: object) -> str:
    """Returns a step before a colon: in the short form, what has its settings."""
    return _door.form or step_name(index, step)


def setting_of(setting: str, place: str) -> str:
    """Returns a setting of a step. The short form has it once."""
    if _door.form:
        return _door.name(setting)
    return f"{setting} of {place}"


class _Names:
    def __getattr__(self, name: str) -> str:
        if name != "executor" and name not in {**_SHORT, **_PHRASES, **_ACTS}:
            raise AttributeError(name)
        return _door.name(name)

    def __call__(self, setting: str) -> str:
        return _door.name(setting)


written = _Names()


@dataclass(frozen=True)
class Remedy:
    """What helps against an error. ``str()`` gives its words within the message."""

    door: Door = field(default_factory=current, kw_only=True)


@dataclass(frozen=True)
class ChangeSetting(Remedy):
    """Start again with another value of a setting of the ``InferenceRunner``."""

    name: str
    value: bool | str = True

    def __str__(self) -> str:
        if self.door.is_command:
            return f"add {self.setting} to the command"
        return f"pass {self.setting} to {self.door.form or 'InferenceRunner'}"

    @property
    def setting(self) -> str:
        if self.door.is_command:
            return self.flag
        return f"{self.name}={self.value!r}"

    @property
    def command(self) -> str:
        if not _words:
            return ""
        return f"{shlex.join(_command_of_all())} {self.flag}"

    @property
    def flag(self) -> str:
        value = shlex.quote(str(self.value))
        if isinstance(self.value, bool):
            value = value.lower()
        if self.door.form:
            return f"--{self.name.replace('_', '-')} {value}"
        return f"--pipeline.{self.door.runner}.{self.name}={value}"


@dataclass(frozen=True)
class SetTasks(Remedy):
    number: int

    def __str__(self) -> str:
        if not _words:
            return f"tasks={self.number}"
        without = without_flag(_command_of_all(), "tasks")
        if self.door.form:
            return f"{without} --tasks {self.number}"
        return f"{without} --executor.tasks={self.number}"


@dataclass(frozen=True)
class LowerMaxTokens(Remedy):
    """Continue with a smaller ``max_tokens``, which is a change of the run."""

    number: int

    def __str__(self) -> str:
        accept = ChangeSetting("accept_changes", door=self.door)
        if not (_words and self.door.form):
            return f"lower it, to {self.number} for example, and {accept}"
        command = without_flag(_command_of_all(), "max-tokens")
        return f"{command} --max-tokens {self.number} {accept.flag}"


@dataclass(frozen=True)
class Repair(Remedy):
    """Repair the checkpoint, and start again.

    Attributes:
        retry: the start is a retry of dead letters: "now", "later" (once the run is complete), or
            "" (it is none).
    """

    what: str
    logging_dir: str | None = None
    output: str | None = None
    retry: str = ""

    def __str__(self) -> str:
        again = ", then run the same command again"
        if self.retry == "now":
            again += f", with {self.door.name('retry_dead_letters')}"
        elif self.retry == "later":
            again += f", and with {self.door.name('retry_dead_letters')} when it is done"
        return (
            f"{repair_command(self.what, logging_dir=self.logging_dir, output=self.output)}{again}"
        )


@dataclass(frozen=True)
class StartOver(Remedy):
    """Start from the beginning in other folders.

    ``before``, ``after``: the rest of the sentence.
    """

    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        return f"{self.before}another {self.door.name('folders')}{self.after}"


def repair_command(*what: str, logging_dir: str | None = None, output: str | None = None) -> str:
    command = ["datatrove-ckpt", "repair", *what]
    if output is not None:
        command += ["--output", output]
    if logging_dir is not None:
        command += ["--logging-dir", logging_dir]
    return shlex.join(command)
