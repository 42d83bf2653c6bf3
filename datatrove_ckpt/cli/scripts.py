"""A Python script in place of CONFIG or WHAT: the executor that it runs.

The script is executed as ``python script.py`` would, with its own arguments and as ``__main__``: most make their
executor in ``main``, of their arguments, so importing them would find nothing. Only ``run`` of every executor, of
datatrove's, of ours and of subclasses, is replaced. The first executor with an ``InferenceRunner`` of ours ends the
script there, those in its ``depends`` come before it. ``run`` of an executor without one does nothing and returns None.
So nothing of a job runs, but what the script does before (downloads, prints, new repositories) happens. A script that
calls no ``run`` is asked for the executors among its globals.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, NoReturn

from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.cli.job_file import script_arguments
from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.formatting import error_text, plural
from datatrove_ckpt.preflight.run_plan import RunPlan, why_no_runner


def executor_of(script: str, words: Sequence[str]) -> PipelineExecutor:
    """The executor that a script runs, and does not run now.

    ``sys.argv``, ``sys.path`` and ``__main__`` stay the script's: its functions are of that module.

    Args:
        words: that stand behind the script on the command line: ``--executor=N``, the N-th that it runs, counted from
            1; then ``--`` and its own arguments.

    Raises:
        ConfigError: the script fails, or runs no such executor.
    """
    wanted = _Wanted(script, _number(script, words))
    file = Path(script).absolute()
    module = ModuleType("__main__")
    module.__file__ = str(file)
    sys.modules["__main__"], sys.argv = module, [script, *script_arguments(words)]
    sys.path.insert(0, str(file.parent))
    try:
        with _replaced_run(wanted.take), redirect_stdout(sys.stderr):
            exec(compile(file.read_bytes(), file, "exec"), vars(module))
    except _Reached:
        pass
    except (Exception, SystemExit) as error:
        if wanted.found is None:  # else it is about being stopped
            wanted.refuse_failed(error, file)
    with suppress(_Reached):
        for one in [] if wanted.seen else [*vars(module).values()]:
            if isinstance(one, PipelineExecutor):
                wanted.take(one)
    executor = wanted.found or wanted.refuse_all()
    kept = ", ".join(str(root) for _, root in RunPlan(executor).kept)
    print(
        f"{script}: executor {len(wanted.seen)}, {type(executor).__name__}: {kept or 'no checkpoint'}", file=sys.stderr
    )
    return executor


class _Reached(BaseException):
    """Ends the script. No Exception, because scripts catch those."""


@dataclass
class _Wanted:
    """The executor to find.

    Attributes:
        script: its name, for messages.
        number: of the executor, counted from 1; 0: the first with an InferenceRunner of ours.
        seen: in the order in which they would have run.
    """

    script: str
    number: int
    seen: list[PipelineExecutor] = field(default_factory=list)
    found: PipelineExecutor | None = None

    def take(self, executor: PipelineExecutor) -> None:
        """In place of ``run``.

        Raises:
            ConfigError: the executor runs datatrove's own InferenceRunner.
        """
        if (before := getattr(executor, "depends", None)) is not None:
            self.take(before)
        if self.found is None and not any(executor is one for one in self.seen):
            self.seen.append(executor)
            if len(self.seen) == self.number if self.number else RunPlan(executor).runners:
                self.found = executor
            elif not self.number and (why := why_no_runner(executor.pipeline)):
                raise ConfigError(f"executor {len(self.seen)} has no InferenceRunner of datatrove_ckpt.{why}")
        if self.found is not None:
            raise _Reached

    def refuse_failed(self, error: Exception | SystemExit, file: Path) -> NoReturn:
        """
        Raises:
            ConfigError: what the script raised, and where.
        """
        if isinstance(error, SystemExit):
            why = f"{self.script}: ended (exit code {error.code}) before it ran an executor with an InferenceRunner of "
            raise ConfigError(f"{why}datatrove_ckpt. Its own arguments stand behind --.") from None
        lines = [f", line {one.lineno}" for one in extract_tb(error.__traceback__) if one.filename == str(file)]
        text = str(error) if isinstance(error, CkptError) else error_text(error)
        raise ConfigError(f"{self.script}{''.join(lines[-1:])}: {text}") from error

    def refuse_all(self) -> NoReturn:
        """
        Raises:
            ConfigError: none of the executors is the one.
        """
        wanted = f"no --executor {self.number}" if self.number else "none with an InferenceRunner of datatrove_ckpt"
        raise ConfigError(f"{self.script}: runs {plural(len(self.seen), 'executor')} of datatrove, and {wanted}.")


def _number(script: str, words: Sequence[str]) -> int:
    number = 0
    for word in words[: words.index("--")] if "--" in words else words:
        name, _, value = word.partition("=")
        if name != "--executor" or not value.isdecimal() or not int(value):
            raise ConfigError(f"{script}: {word}: is no --executor N. The script's own arguments stand behind --.")
        number = int(value)
    return number


@contextmanager
def _replaced_run(run: Callable[[PipelineExecutor], None]) -> Iterator[None]:
    """Replaces ``run`` of all executors, those included whose classes are made meanwhile."""
    replaced: list[tuple[Any, object]] = []

    def replace(cls: Any, /, **_: object) -> None:
        if "run" in vars(cls):
            replaced.append((cls, cls.run))
            cls.run = lambda self, *_, **__: run(self)
        for below in cls.__subclasses__():
            replace(below)

    base: Any = PipelineExecutor
    replace(base)
    base.__init_subclass__ = classmethod(replace)
    try:
        yield
    finally:
        del base.__init_subclass__
        for cls, old in replaced:
            cls.run = old
