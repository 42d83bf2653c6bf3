"""The last line of ``run``: what all ranks and all attempts have done, and the next step."""

import shlex
from pathlib import Path

from datatrove_ckpt.checkpoint.rank_summary import JobTotals, find_ranks
from datatrove_ckpt.common.counts import DocumentCounts
from datatrove_ckpt.common.formatting import plural, plural_is
from datatrove_ckpt.generation.final_stats import lines_with_error
from datatrove_ckpt.generation.finished_from import EarlierRuns
from datatrove_ckpt.run_folder.run_plan import RunnerPlan


def summary_line(
    runner: RunnerPlan, checkpoints: Path, job: JobTotals, started: float, command: str
) -> str:
    """Returns the closing line.

    Args:
        checkpoints: folder of the runner's checkpoints.
        job: the sums of its checkpoint.
        started: start of the command, in Unix seconds. Retries since then are named.
        command: the command as it was typed.
    """
    if not job.ranks:
        find_ranks(checkpoints)  # raises, and names the reason
    counts = job.counts
    folder = runner.step.output_writer.output_folder.resolve_paths("")
    if not counts.read:
        return f"There are no documents in the input, so there is no output in {folder}."
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
    work += EarlierRuns(runner.step.changed(accept_changes=True), runner.identity).unchecked
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
    if not counts.dead and "--retry-dead-letters" in retry.split():
        return f"No dead letter is left. To check the files: {_verify(checkpoints)}"
    if not counts.dead:
        return f"To check the files: {_verify(checkpoints)}"
    seen = shlex.join(["datatrove-ckpt", "show", checkpoints, "--dead"])
    if runner.plan.incomplete(skip_completed=True):  # a limit has ended the run
        return f"To see the dead letters: {seen}"
    if "--retry-dead-letters" not in retry.split():
        retry += " --retry-dead-letters"
    return f"To see the dead letters: {seen}. To retry them: {retry}"


def _attempts(job: JobTotals) -> str:
    """Returns what all attempts sent, with a space before it; "" if nothing was repeated."""
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
    unused = sent.completion_tokens - job.counts.completion_tokens
    if unused > 0:
        tokens = plural(unused, "completion token")
        return f"{text}, and {at_least}{tokens} paid that no finished chunk has."
    return f"{text}."


def _verify(checkpoints: Path | str) -> str:
    return f"{shlex.join(['datatrove-ckpt', 'verify', str(checkpoints)])} --full"
