"""``card.md``: what made a run's output, what is in it, how to load it and how to go on."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.output.formats import format_of_file
from datatrove_ckpt.run_folder.read_state import read_run_state
from datatrove_ckpt.run_folder.run_plan import RunnerPlan
from datatrove_ckpt.run_folder.run_state import RunState
from datatrove_ckpt.run_folder.topics import topics
from datatrove_ckpt.run_folder.where import Place

CARD = "card.md"
_MOST = 400  # characters of a value
_MADE_BY = b"Made by datatrove-ckpt "
_OF_FILES = ("owner", "format", "written_by", "identity_version", "output_folder")


def write_card(runner: RunnerPlan, root: Path, command: str) -> None:
    """Writes the card of a finished run beside its checkpoints, or among them where that is a
    folder of other things.

    Args:
        command: that goes on, without secrets.

    Raises:
        FileExistsError: the user has such a file.
        CkptError: the folder cannot be read, or takes no file.
    """
    folder = root
    if root.name == "checkpoints" and (root.parent / "output").is_dir():
        folder = root.parent
    path = folder / CARD
    if path.exists() and _MADE_BY not in path.read_bytes():
        raise FileExistsError(errno.EEXIST, "It is not a card of ours", str(path))
    state = read_run_state(Place(str(root), root, [str(root)]))
    text = "\n".join(_lines(runner, folder.name, state, command))
    files.disk.replace(path, redact(text).encode(errors="replace"), files.PUBLIC_FILE)


def _lines(runner: RunnerPlan, name: str, state: RunState, command: str) -> Iterator[str]:
    writer = runner.step.output_writer
    output = writer.output_folder.resolve_paths("")
    newest = 0.0 if state.newest is None else state.newest
    made = datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d")
    yield f"# {name}\n"
    yield f"{_MADE_BY.decode()}{__version__}, finished on {made} (UTC). Output: `{output}`.\n"
    yield "## What made it\n"
    yield "| setting | value |\n|---|---|"
    for setting, value in state.identity.items():
        text = value if isinstance(value, str) else json.dumps(value)
        is_default = value is None or value is False or value == {}
        if setting not in _OF_FILES and not is_default:
            shown = text[:_MOST].replace("|", "\\|").replace("\n", " ")
            yield f"| {setting} | {shown} |"
    yield "\n## What is in it\n"
    for topic, text in topics(state):
        yield f"- {topic or 'also'}: {text}"
    kind = format_of_file(str(writer.output_filename.template))
    if kind is not None:
        yield "\n## How to load it\n"
        pattern = f"{output}/**/*{kind.suffix}*"
        yield "```python\nfrom datasets import load_dataset\n"
        options = f'data_files={pattern!r}, split="train"{kind.load_options}'
        yield f'dataset = load_dataset("{kind.loader}", {options})\n```'
    yield f"\n## How to go on\n\n```bash\n{command}\n```\n"
