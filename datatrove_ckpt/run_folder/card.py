"""Cards of runs: what made the output, what is in it, how to load it and how to continue.

``card.md`` lies with the checkpoints. Where the output is a dataset repository of the hub, its
``README.md`` gets a card as a section between two marks, without commands and costs. The rest of a
README, its YAML header included, stays as it is.
"""

import errno
import json
import re
from collections.abc import Container, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.formatting import figure, plural
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.output.formats import Format, format_of_file
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.interruptible_calls import InterruptibleCalls
from datatrove_ckpt.run_folder.run_location import RunLocation
from datatrove_ckpt.run_folder.run_plan import RunnerPlan
from datatrove_ckpt.run_folder.run_state import RunState, read_run_state
from datatrove_ckpt.run_folder.status_text import status_lines

CARD = "card.md"
_README = "README.md"
_END = "<!-- end of datatrove-ckpt -->"
_MAX_CHARACTERS = 400  # characters of a value
_MADE_BY = b"Made by datatrove-ckpt "
_OF_FILES = ("owner", "format", "written_by", "identity_version", "output_folder")
_OF_OUTPUT = ("documents", "tokens", "answers", "skipped", "dead")


def write_card(runner: RunnerPlan, checkpoints: Path, command: str) -> None:
    """Writes the cards of a finished run: beside its checkpoints, or among them where that is a
    folder of other things; and on the hub.

    Args:
        command: command that resumes the run, without secrets.

    Raises:
        FileExistsError: the user has such a file.
        CkptError: the folder cannot be read, or takes no file; or the hub takes none.
    """
    state = read_run_state(RunLocation(str(checkpoints), checkpoints, [str(checkpoints)]))
    folder = checkpoints
    if checkpoints.name == "checkpoints" and (checkpoints.parent / "output").is_dir():
        folder = checkpoints.parent
    path = folder / CARD
    if path.exists() and _MADE_BY not in path.read_bytes():
        raise FileExistsError(errno.EEXIST, "It is not a card of ours", str(path))
    lines = [f"# {folder.name}\n", *_lines(runner, state)]
    lines += [f"\n## How to go on\n\n```bash\n{command}\n```\n"]
    text = redact("\n".join(lines))
    files.disk.replace(path, text.encode(errors="replace"), files.PUBLIC_FILE)
    hub = HubFolder.of(runner.step.output_writer.output_folder)
    if hub is not None and hub.kind == "dataset":
        from huggingface_hub import CommitOperationAdd

        section = redact("\n".join(_lines(runner, state, _OF_OUTPUT)))
        repository = replace(hub, path="")
        calls = InterruptibleCalls(repository.url, repository)
        # The YAML header of a README that is not there yet.
        header = "---\n"
        kind = _format(runner)
        if kind is not None:
            pattern = json.dumps(f"{hub.path}/**/*{kind.suffix}*".lstrip("/"))
            header += f"configs:\n- config_name: default\n  data_files: {pattern}\n"
        header += "tags:\n- synthetic\n- datatrove-ckpt\n---\n"

        def publish() -> None:
            head = repository.head()
            before = header
            listing = repository.look_up([_README], head)
            if listing:
                blocks = repository.blocks(_README, listing[_README].size + 1)
                before = b"".join(blocks).decode()
            start_mark = f"<!-- datatrove-ckpt: {hub.path or '/'} -->"
            start, _, following = before.partition(start_mark)
            _, has_end, after = following.partition(_END)
            if not has_end:
                start = f"{before.rstrip()}\n\n"
                after = "\n"
            readme = f"{start}{start_mark}\n\n{section}\n\n{_END}{after}"
            if readme != before:
                operation = CommitOperationAdd(_README, readme.encode(errors="replace"))
                repository.commit([operation], "Card of a finished run", head)

        calls.retry(f"{_README} cannot be changed", publish, retrying.HUB_PROBE)


def _format(runner: RunnerPlan) -> Format | None:
    return format_of_file(str(runner.step.output_writer.output_filename.template))


def _lines(
    runner: RunnerPlan, state: RunState, shown_topics: Container[str] | None = None
) -> Iterator[str]:
    """Yields the lines of a card. ``shown_topics``: the topics to include; None: all."""
    output = runner.step.output_writer.output_folder.resolve_paths("")
    newest = 0.0 if state.newest is None else state.newest
    made = datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d")
    yield f"{_MADE_BY.decode()}{__version__}, finished on {made} (UTC). Output: `{output}`.\n"
    yield "## What made it\n"
    yield "| setting | value |\n|---|---|"
    source = ""  # the files or the dataset that are read
    for step in runner.before[:1]:
        source = str(getattr(step, "dataset", ""))
        folder = getattr(step, "data_folder", None)
        if folder is not None:
            pattern = getattr(step, "glob_pattern", None) or ""
            # The short form writes the name of a file as a pattern: "a.json[l]".
            source = str(folder.resolve_paths(re.sub(r"\[(.)\]", r"\1", pattern)))
    yield _row("input", source)
    for setting, value in state.identity.items():
        text = value if isinstance(value, str) else json.dumps(value)
        is_default = value is None or value is False or value == {}
        if setting not in _OF_FILES and not is_default:
            yield _row(setting, text)
    yield "\n## What is in it\n"
    for topic, text in status_lines(state):
        if shown_topics is None or topic in shown_topics:
            yield f"- {topic or 'also'}: {text}"
    done = state.together.done
    if done.read:
        prompt = figure(done.prompt_tokens / done.read)
        completion = figure(done.completion_tokens / done.read)
        yield f"- tokens of a document: {prompt} prompt, {completion} completion on average"
    gpus = sum(
        config.gpus_each * config.replicas
        for config in runner.step.models.values()
        if config.server_type != "endpoint"
    )
    if gpus and shown_topics is None:  # tasks may share them
        hours = gpus * state.together.seconds / 3600
        yield f"- GPU hours: {figure(hours)} at most, with {plural(gpus, 'GPU')} for each task"
    kind = _format(runner)
    if kind is not None:
        yield "\n## How to load it\n"
        pattern = f"{output}/**/*{kind.suffix}*"
        yield "```python\nfrom datasets import load_dataset\n"
        options = f'data_files={pattern!r}, split="train"{kind.load_options}'
        yield f'dataset = load_dataset("{kind.loader}", {options})\n```'


def _row(setting: str, value: str) -> str:
    cell = value[:_MAX_CHARACTERS].replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
    return f"| {setting} | {cell} |"
