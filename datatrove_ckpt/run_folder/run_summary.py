"""The last line of ``run``: what all ranks and all attempts have done, and the next step. Cards of
runs: what made the output, what is in it, how to load it and how to continue.

``card.md`` lies with the checkpoints. Where the output is a dataset repository of the hub, its
``README.md`` gets a card as a section between two marks, without commands and costs. The rest of a
README, its YAML header included, stays as it is.
"""

import errno
import json
import re
import shlex
from collections.abc import Container, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from datatrove_ckpt import __version__
from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.compare import mixed_settings
from datatrove_ckpt.checkpoint.job_file import recorded_runs
from datatrove_ckpt.checkpoint.rank_summary import JobTotals, find_ranks
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.counts import DocumentCounts
from datatrove_ckpt.common.formatting import figure, plural, plural_is
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.generation.final_stats import lines_with_error
from datatrove_ckpt.generation.finished_from import compare_earlier_runs
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
_MAX_CHARACTERS = 400
_MADE_BY = b"Made by datatrove-ckpt "
_OF_FILES = ("owner", "format", "written_by", "identity_version", "output_folder")
_OF_OUTPUT = ("documents", "tokens", "answers", "skipped", "dead")


def summary_line(
    runner: RunnerPlan, checkpoints: Path, job: JobTotals, started: float, command: str
) -> str:
    """Returns the closing line.

    Args:
        started: start of the command, in Unix seconds. Retries since then are named.
    """
    if not job.ranks:
        find_ranks(checkpoints)  # raises, and names the reason
    counts = job.counts
    folder = runner.step.output_writer.output_folder.resolve_paths("")
    if not counts.read:
        return f"The input has no documents, so {folder} has no output."
    retries = (commit.counts for commit in job.retried if commit.at >= started)
    again = sum(retries, DocumentCounts())
    idle = job.ranks - len(job.known)
    work = ""
    if again.read:
        work = (
            f" Retried {plural(again.read, 'dead letter')}: {again.read - again.dead} succeeded, "
            f"{again.dead} still dead."
        )
    elif runner.step.retry_dead_letters and not counts.dead:
        work = " There was no dead letter to retry."
    errors = lines_with_error(runner.step.rollout_fn, counts)
    if errors:
        work += f" Lines with an error in the output: {errors} of {counts.written}."
    work += str(job.numbers.skipped)
    if idle and not runner.plan.incomplete(skip_completed=True):
        work += f" {idle} of {plural(job.ranks, 'task')} had no documents."
    work += f"{counts.odd_answers}{_attempts(job)}"
    accepting = runner.step.changed(accept_changes=True)
    work += compare_earlier_runs(accepting, runner.identity)[1]
    if job.numbers.paid:
        work += f" Paid: {job.numbers.paid}."
    rows = ""
    if job.numbers.rows:
        rows = f", as {plural(job.numbers.rows, 'row')},"
    return (
        f"{counts.written} of {plural_is(counts.read, 'document')}{rows} in "
        f"{plural(job.numbers.files, 'file')} in {folder} ({counts.dropped} dropped, "
        f"{plural(counts.dead, 'dead letter')}), for {plural(counts.requests, 'request')} with "
        f"{counts.prompt_tokens} prompt and "
        f"{plural(counts.completion_tokens, 'completion token')}.{work} "
        f"{_next_step(runner, checkpoints, counts, command)}"
    )


def _next_step(runner: RunnerPlan, root: Path, counts: DocumentCounts, retry: str) -> str:
    checkpoints = str(runner.step.checkpoints_local_dir)
    if runner.copy is not None or checkpoints.startswith("~") or "$" in checkpoints:
        checkpoints = str(root)  # a shell would not expand it in quotes
    if not counts.dead:
        check = shlex.join(["datatrove-ckpt", "verify", checkpoints, "--full"])
        return f"To check the files: {check}"
    seen = shlex.join(["datatrove-ckpt", "show", checkpoints, "--dead"])
    if runner.plan.incomplete(skip_completed=True):  # a limit has ended the run
        return f"To see the dead letters: {seen}"
    if "--retry-dead-letters" not in retry.split():
        retry += " --retry-dead-letters"
    return f"To see the dead letters: {seen}. To retry them: {retry}"


def _attempts(job: JobTotals) -> str:
    sent = job.numbers.work
    attempts = max(job.parts, job.numbers.number_of_attempts)
    again = sent.retries + sent.resent
    if not sent.sent or (attempts == job.parts and not again):
        return ""
    at_least = job.numbers.at_least
    were = "were"
    if sent.sent == 1:
        were = "was"
    text = f" In {plural(attempts, 'attempt')} of {plural(job.ranks, 'task')}, {at_least}"
    text += f"{plural(sent.sent, 'request')} {were} sent"
    if again:
        text += f", {at_least}{again} of them again"
    if sent.continued:
        answers = plural(sent.continued, "half-written answer")
        kept = plural(sent.continued_tokens, "token")
        text += f", {at_least}{answers} went on ({at_least}{kept} kept)"
    unused = sent.completion_tokens - job.counts.completion_tokens
    if unused > 0:
        tokens = plural(unused, "completion token")
        return f"{text}, and {at_least}{tokens} paid outside finished chunks."
    return f"{text}."


def write_card(runner: RunnerPlan, checkpoints: Path, command: str) -> None:
    """Writes the cards of a finished run: beside its checkpoints, or among them where that is a
    folder of other things; and on the hub.

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
    lines = [f"# {folder.name}\n", *_lines(runner, state, checkpoints)]
    lines += [f"\n## How to go on\n\n```bash\n{command}\n```\n"]
    text = redact("\n".join(lines))
    files.disk.replace(path, text.encode(errors="replace"), files.PUBLIC_FILE)
    hub = HubFolder.of(runner.step.output_writer.output_folder)
    if hub is not None and hub.kind == "dataset":
        from huggingface_hub import CommitOperationAdd

        section = redact("\n".join(_lines(runner, state, checkpoints, _OF_OUTPUT)))
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
    runner: RunnerPlan,
    state: RunState,
    checkpoints: Path,
    shown_topics: Container[str] | None = None,
) -> Iterator[str]:
    output = runner.step.output_writer.output_folder.resolve_paths("")
    newest = 0.0 if state.newest is None else state.newest
    made = datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d")
    yield f"{_MADE_BY.decode()}{__version__}, finished on {made} (UTC). Output: `{output}`.\n"
    yield "## What made it\n"
    yield "| setting | value |\n|---|---|"
    source = ""
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
    job = next(recorded_runs(checkpoints), {})
    for name, old, new in mixed_settings(job.get("accepted_changes", ())):
        yield _row(f"{name}, changed in the middle", f"{old}, then {new}")
    yield "\n## What is in it\n"
    for topic, text in status_lines(state):
        if shown_topics is None or topic in shown_topics:
            yield f"- {topic or 'also'}: {text}"
    done = state.together.done
    if done.read:
        prompt = figure(done.prompt_tokens / done.read)
        completion = figure(done.completion_tokens / done.read)
        yield f"- tokens of a document: {prompt} prompt, {completion} completion on average"
    gpus = sum(config.gpus_of_task for config in runner.step.models.values())
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
