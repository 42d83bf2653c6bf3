"""``datatrove_ckpt.run``: a job in the short form as a call of Python."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from datatrove_ckpt.cli.execution import advise
from datatrove_ckpt.cli.job_settings import ShortJob
from datatrove_ckpt.cli.short_form import expand
from datatrove_ckpt.cli.yaml_config import build
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.errors.setting_names import written_in
from datatrove_ckpt.run_folder.documents import OutputPath, OutputUrl
from datatrove_ckpt.run_folder.run_plan import RunPlan


def run(
    *,
    run_folder: str | Path,
    input: object,
    prompt: str | None = None,
    rollout: Callable[..., Awaitable[object]] | None = None,
    model: str | None = None,
    endpoint: str | list[str] | None = None,
    **settings: object,
) -> OutputPath | OutputUrl:
    """Runs a job, or the rest of it. ``ShortJob`` explains the arguments; ``settings`` are further
    settings, by name.

    Args:
        input: the input, as in ``ShortJob``; or rows, which ``save_rows`` writes to the run folder.

    Returns:
        The output folder as a path, or as a URL if ``run_folder`` is a URL. Both read its
        documents: see ``RunOutput``.

    Raises:
        ConfigError: a mistake in the arguments; nothing was started.
        CkptError: see ``LocalPipelineExecutor.run``. The same call resumes.
    """
    rows = None
    if not isinstance(input, str | Path):
        rows = input
        input = "-"
    job = ShortJob(
        str(run_folder), str(input), prompt, rollout=rollout, model=model, endpoint=endpoint
    )
    short: JsonObject = {}
    given = {name: value for name, value in vars(job).items() if value is not None}
    for name, value in {**given, **settings}.items():
        if isinstance(value, Path):
            value = str(value)
        short[name] = value
    with written_in("run()"):
        executor = build(expand(short, rows=rows))
        try:
            executor.run()
        except CkptError as error:
            advise(error, RunPlan(executor))
            raise
    if job.is_remote:
        return OutputUrl(f"{job.below}/output")
    return OutputPath(job.below, "output")
