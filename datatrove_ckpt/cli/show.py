"""``datatrove-ckpt show``, ``export``, ``run --sample`` and ``report``."""

import argparse
import shutil
import tempfile
from itertools import islice
from pathlib import Path

from datatrove.executor.base import PipelineExecutor

from datatrove_ckpt.cli.open_run import open_run
from datatrove_ckpt.cli.printing import say, wrapped, write_page
from datatrove_ckpt.common.formatting import plural, plural_is
from datatrove_ckpt.errors import printable
from datatrove_ckpt.process.task_errors import log_disabled
from datatrove_ckpt.run_folder.documents import ShownDocument, read_dead_letters, read_documents
from datatrove_ckpt.run_folder.export import export as write_export
from datatrove_ckpt.run_folder.report.page import report_page
from datatrove_ckpt.run_folder.run_location import RunLocation
from datatrove_ckpt.run_folder.run_state import read_run_state, wanted_files

_MOST = 600  # characters of a text; an answer may have twice as many


def show(arguments: argparse.Namespace) -> int:
    """Prints each document as soon as it is found. Returns the exit code."""
    shown = 0
    is_all = not (arguments.dead or arguments.grep) and arguments.id is None
    most = _MOST if arguments.id is None else None
    with open_run(arguments, output=arguments.output) as place:
        if arguments.dead:
            found = read_dead_letters(place)
        else:
            found = read_documents(place)
        wanted = (arguments.grep or "").casefold()
        found = (
            one for one in found if wanted in one.text.casefold() or wanted in one.answer.casefold()
        )
        found = (one for one in found if arguments.id in (None, one.id))
        for shown, one in enumerate(islice(found, arguments.n), 1):
            say(_described(shown, one, "text", most))
        if shown and not arguments.dead:
            say(f"Columns: {', '.join(map(printable, one.columns))}.")
        if arguments.dead and next(found, None) is not None:
            say(f"There are more; --n {2 * arguments.n} prints them.")
        if is_all:
            state = read_run_state(place)
            counts = state.together.done
            rows = state.together.rows
            number = rows or state.delivered.written
            noun = "row" if rows else "document"
            if not shown:
                say(
                    f"No document is in the output files, so far: "
                    f"{plural_is(counts.read, 'document')} done ({counts.dropped} dropped, "
                    f"{plural(counts.dead, 'dead letter')}). A file appears when a chunk of "
                    f"{state.identity.get('records_per_chunk')} is complete."
                )
            elif number > shown:
                say(f"{shown} of {plural(number, noun)}; --n {2 * arguments.n} prints more.")
    if arguments.dead and not shown:
        say("There is no such dead letter.")
    elif not (shown or is_all):
        say("There is no such document in the output files, so far.")
    return int(not shown)


def export(arguments: argparse.Namespace) -> int:
    with open_run(arguments, output=arguments.output) as place:
        count, report = write_export(place, arguments.target)
    left = ""
    if report.unfinished or {"corrupt", "rank"} & {problem.kind for problem in report.problems}:
        left = ". The run is not finished: these are the documents of its complete chunks"
    noun = "row" if report.sums.numbers.rows else "document"
    say(f"{plural(count, noun)} in {arguments.target}{left}.")
    return 0


def sample(executor: PipelineExecutor, number: int) -> int:
    """Prints the answers to the first documents, or why there is none. Returns the exit code."""
    from datatrove_ckpt.process import signals
    from datatrove_ckpt.run_folder.prefix_cache_check import check_prompts
    from datatrove_ckpt.run_folder.run_plan import RunPlan
    from datatrove_ckpt.run_folder.sample import estimate_lines, take_sample

    # The run's own lines would promise a resume.
    quiet = log_disabled("datatrove_ckpt.generation.rank")
    plan = RunPlan(executor)
    with (
        signals.Interruption(signals.STOP_SIGNALS),
        quiet,
        tempfile.TemporaryDirectory(prefix="datatrove-ckpt-") as folder,
    ):
        taken = take_sample(plan, number, Path(folder))
        asked = taken.documents
        place = RunLocation(folder, taken.checkpoints, [folder])
        found = []
        odd = ""
        if asked:
            odd = read_run_state(place).totals.done.odd_answers
            found = [*read_documents(place), *read_dead_letters(place)]
    failed = 0
    dropped = 0
    for index, (document, requests) in enumerate(asked, 1):
        name = str(document.id)
        text = document.text
        one = min(
            (one for one in found if one.id == name), key=lambda one: one.text != text, default=None
        )
        if one is None:
            dropped += 1
            question = requests[-1].question
            answers = "\n\n".join(one.answer_text for one in requests if one.question == question)
            say(
                _described(
                    index, ShownDocument(name, question, answers), "question", _MOST, "dropped"
                )
            )
            continue
        found = [other for other in found if other is not one]  # ids may repeat
        failed += one.is_dead
        say(_described(index, one._replace(text=requests[0].question, where=""), "question", _MOST))
    prompts = [requests[0].prompt for _, requests in asked]
    for finding in check_prompts(prompts, plan.runners[0].step.model.servers):
        say(f"{finding.what}: {finding.message}")
    for line in estimate_lines(taken, plan.runners[0].step):
        say(line)
    if odd:
        say(odd.strip())
    counted = f"{len(asked) - failed} of {plural(len(asked), 'document')} processed"
    if dropped:
        counted = f"{counted}, {dropped} of them dropped"
    kept = "Nothing of this is kept"
    if taken.is_kept:
        kept = "The run takes these answers where it sends the same requests"
    say(f"{counted}. {kept}, and no other document was sent.")
    return int(failed == len(asked))


def _described(
    number: int, one: ShownDocument, title: str, most: int | None, outcome: str = "answer"
) -> str:
    one = one.safe(most)
    head = f"{number}. {one.id}"
    if one.where:
        head = f"{head}  ({one.where})"
    if one.is_dead:
        outcome = "failed"
    width = shutil.get_terminal_size().columns - 2
    texts = wrapped([f"{title}: {one.text}", f"{outcome}: {one.answer}"], width)
    return "\n".join([head, *(f"  {line}".rstrip() for line in texts), ""])


def report(arguments: argparse.Namespace) -> int:
    with open_run(arguments, wanted_files) as place:
        state = read_run_state(place)
        page = report_page(state)
        return write_page(arguments.output, place.folder, page, plural(len(state.ranks), "task"))
