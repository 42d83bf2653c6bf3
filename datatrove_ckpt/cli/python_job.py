"""``datatrove_ckpt.run``: a job in the short form as a call of Python."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.cli.execution import advise
from datatrove_ckpt.cli.short_form import expand
from datatrove_ckpt.cli.yaml_config import build
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.errors import CkptError, ConfigError, written_in
from datatrove_ckpt.run_folder.documents import OutputPath, OutputUrl
from datatrove_ckpt.run_folder.run_plan import RunPlan


def run(
    *,
    run_folder: str | Path,
    input: object = None,
    prompt: str | None = None,
    rollout: Callable[..., Awaitable[object]] | None = None,
    model: str | None = None,
    endpoint: str | list[str] | None = None,
    steps: JsonObject | None = None,
    redo: Sequence[str] = (),
    **settings: object,
) -> OutputPath | OutputUrl | dict[str, OutputPath]:
    """Runs a job, or the rest of it. ``ShortJob`` explains the arguments; ``settings`` are further
    settings, by name.

    Args:
        input: the input, as in ``ShortJob``; or rows, which ``save_rows`` writes to the run folder.
        steps: steps by name; the other settings hold for each.
        redo: steps that run anew, with those that depend on them, as ``run --redo`` does.

    Returns:
        The output folder as a path, or as a URL if ``run_folder`` is a URL. Both read its
        documents: see ``RunOutput``. With steps: the output folders by name.

    Raises:
        ConfigError: a mistake in the arguments; nothing was started.
        CkptError: see ``LocalPipelineExecutor.run``. The same call resumes.
    """
    rows = None
    if not (steps or isinstance(input, str | Path)):
        rows = input
        input = "-"
    given = {
        "run_folder": run_folder,
        "input": input,
        "prompt": prompt,
        "rollout": rollout,
        "model": model,
        "endpoint": endpoint,
        "steps": steps,
        **settings,
    }
    short: JsonObject = {}
    for name, value in given.items():
        if isinstance(value, Path):
            value = str(value)
        if value is not None or name in settings:
            short[name] = value
    if steps:
        return _run_steps(short, redo)
    if redo or "dead_letters" in settings:
        raise ConfigError("run(): redo, dead_letters: are for a job with steps.")
    with written_in("run()"):
        _run(build(expand(short, rows=rows)))
    folder = str(short["run_folder"])
    if "://" in folder:
        return OutputUrl(f"{folder.rstrip('/')}/output")
    return OutputPath(Path(folder).expanduser(), "output")


def _run_steps(short: JsonObject, redo: Sequence[str]) -> dict[str, OutputPath]:
    from datatrove_ckpt.cli.steps import read_steps, runs

    steps = read_steps(short, "run()")
    for step in runs(steps, redo):
        with written_in(step.label):
            _run(step.executor()[1])
    return {step.name: OutputPath(step.folder, "output") for step in steps}


def _run(executor: PipelineExecutor) -> None:
    try:
        executor.run()
    except CkptError as error:
        advise(error, RunPlan(executor))
        raise
