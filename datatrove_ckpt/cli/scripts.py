"""A Python script in place of CONFIG or WHAT: the executor that it makes.

The script is imported under the name ``__mp_main__``, as workers import it: its ``if __name__ == "__main__":`` does not
run. With ``--main="ITS ARGUMENTS"`` it does, as by ``python script.py``. No executor runs: ``run`` of those without an
``InferenceRunner`` does nothing, and the first one with one ends the script there. So nothing of a job runs, but what
the script does before (downloads, prints, new repositories) happens.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.formatting import error_text, plural
from datatrove_ckpt.preflight.run_plan import RunnerPlan, RunPlan, has_runner


def executor_of(script: str, words: Sequence[str]) -> PipelineExecutor:
    """The executor with an ``InferenceRunner`` that a script makes, and does not run now.

    ``sys.argv``, ``sys.path`` and ``__main__`` stay the script's: its functions are of that module.

    Args:
        words: that stand behind the script on the command line: ``--main=ARGUMENTS``; and ``--executor=N``, the N-th
            that it makes, counted from 1, after those that it ``depends`` on. The first one unless said otherwise.

    Raises:
        ConfigError: the script fails, or makes no such executor.
    """
    given = dict(word.removeprefix("--").split("=", 1) for word in words)
    main, number = given.pop("main", None), given.pop("executor", "1")
    if given or not re.fullmatch("[1-9][0-9]*", number):
        raise ConfigError(f'{script}: only --main="ITS ARGUMENTS" and --executor=N can stand behind a script.')
    file, name = Path(script).absolute(), "__mp_main__" if main is None else "__main__"
    module = sys.modules[name] = sys.modules["__main__"] = ModuleType(name)
    module.__file__ = str(file)
    try:
        sys.argv = [script, *shlex.split(main or "")]
    except ValueError as error:
        raise ConfigError(f"--main: {error}: {main}") from None
    sys.path.insert(0, str(file.parent))
    code: object = None
    with _not_run(int(number)) as made, redirect_stdout(sys.stderr):
        try:
            exec(compile(file.read_bytes(), file, "exec"), vars(module))
        except _Reached:
            pass
        except SystemExit as exit:
            code = exit.code
        except Exception as error:
            lines = [f", line {one.lineno}" for one in extract_tb(error.__traceback__) if one.filename == str(file)]
            raise ConfigError(f"{script}{''.join(lines[-1:])}: {error_text(error)}") from error
    found = [one for one in made if has_runner(one)]
    if len(found) < int(number):
        hint = ' If its main makes it, add --main="ITS ARGUMENTS": it then runs, up to executor.run().'
        what = f"makes {plural(len(found), 'executor')} with an InferenceRunner, not {number}."
        ended = f" It ended by itself: {code}." if code else ""
        raise ConfigError(f"{script}: {what}{ended}{hint if main is None else ''}")
    executor = found[int(number) - 1]
    if not (runners := RunPlan(executor).runners):
        raise ConfigError(f"{script}: its InferenceRunner is datatrove's own. Import it from datatrove_ckpt.")
    print(f"{script}: --executor={number}: {runners[0].step.checkpoints_local_dir}", file=sys.stderr)
    return executor


class _Reached(BaseException):
    """Ends the script. No Exception, because scripts catch those."""


@contextmanager
def _not_run(number: int) -> Iterator[list[PipelineExecutor]]:
    """The executors that are made meanwhile. Their ``run`` does nothing, but ends the script once it has the N-th."""
    made: list[PipelineExecutor] = []
    init = PipelineExecutor.__init__

    def run(executor: PipelineExecutor) -> None:
        if has_runner(executor) and sum(map(has_runner, made)) >= number:
            raise _Reached

    def init_not_run(self: PipelineExecutor, *args: object, **options: object) -> None:
        init(self, *args, **options)
        self.run = partial(run, self)
        made.append(self)

    PipelineExecutor.__init__ = init_not_run
    try:
        yield made
    finally:
        PipelineExecutor.__init__ = init
        for executor in made:
            del executor.run


def content_of(executor: PipelineExecutor) -> dict[str, Any]:
    """What a YAML file in the long form would say of the folders and the size of the job, for ``open_place``."""
    plan = RunPlan(executor)
    settings = {runner.index: _settings(runner) for runner in plan.runners}
    pipeline = [{"init_args": settings.get(index, {})} for index in range(len(plan.pipeline))]
    logging_dir = str(plan.logging_dir.resolve_paths(""))
    arguments = {"tasks": plan.tasks, "logging_dir": logging_dir, "pipeline": pipeline}
    return {"executor": {"class_path": plan.name, "init_args": arguments}}


def _settings(runner: RunnerPlan) -> dict[str, object]:
    step = runner.step
    writer = {"init_args": {"output_folder": str(step.output_writer.output_folder.resolve_paths(""))}}
    names = ("checkpoints_local_dir", "checkpoints_remote_dir", "records_per_chunk")
    return {"output_writer": writer, **{name: getattr(step, name) for name in names}}
