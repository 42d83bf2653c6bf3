"""Names settings in errors as the user wrote them, else as datatrove does.

The short form of a job has other names for some settings of datatrove's. The form belongs to the
process, whose ranks share it; a step carries it into worker processes and jobs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

SHORT = {
    "checkpoints_local_dir": "run_folder",
    "output_folder": "run_folder",
    "output_writer": "run_folder",
    "logging_dir": "run_folder",
    "data_folder": "input",
    "glob_pattern": "input",
    "model_name_or_path": "model",
    "endpoint_url": "endpoint",
    "rollout_fn": "rollout",
}
"""The settings that have another name in the short form."""

_form = ""
_copies: dict[str, str] = {}


def form() -> str:
    """Returns the source of the settings in the short form: a file, "the command line" or "run()";
    "" if they are in the long form.
    """
    return _form


def use(form: str) -> None:
    global _form
    _form = form


@contextmanager
def written_in(form: str) -> Iterator[None]:
    """Does ``use`` for a block."""
    before = _form
    use(form)
    try:
        yield
    finally:
        use(before)


def name_copy(copy: object, original: str) -> None:
    """Makes messages name the original in place of its temporary copy."""
    _copies[str(copy)] = original


def with_originals(text: str) -> str:
    for copy, original in _copies.items():
        text = text.replace(copy, original)
    return text


def setting_name(setting: str) -> str:
    """Returns the name of a setting as the user wrote it."""
    if not _form:
        return setting
    if setting == "executor":
        return _form
    # The short form has these settings beside the others.
    for outer in ("default_generation_params.", "rollout_fn."):
        setting = setting.removeprefix(outer)
    return SHORT.get(setting, setting)


def start_over(keeps_results: bool) -> str:
    """Returns how to start from the beginning, as a sentence."""
    folders = "checkpoints_local_dir, output_folder and logging_dir"
    old = "output_folder and checkpoints_local_dir"
    if _form:
        folders = "run_folder"
        old = "run_folder"
    if keeps_results:
        return (
            f"To start over, choose another {folders}, and set finished_from to the old {old}: "
            "finished documents keep their results."
        )
    return f"To start over, choose another {folders}."


def step_name(index: int, step: object) -> str:
    name = type(step).__name__
    if _form:
        return name
    return f"pipeline[{index}] {name}"


def step_place(index: int, step: object) -> str:
    """Returns the name of a step before a colon; in the short form, the source of its settings."""
    return _form or step_name(index, step)


def setting_of(setting: str, place: str) -> str:
    """Returns the name of a step's setting. The short form has it once."""
    if _form:
        return setting_name(setting)
    return f"{setting} of {place}"
