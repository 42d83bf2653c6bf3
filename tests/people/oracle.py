"""The oracle: exit code 0 means that every document is there, and that every number in the closing
line is true.

It reads the output, the dead letters and the terminal as a user would, and knows nothing of
checkpoints.
"""

import json
import re
from collections import Counter
from pathlib import Path

from tests.people.inputs import WORDS_OF_AN_ANSWER

_CLOSING = re.compile(
    r"(?P<written>\d+) of (?P<read>\d+) documents? (?:are|is) in (?P<files>\d+) files? in (?P<folder>\S+?) "
    r"\((?P<dropped>\d+) dropped, (?P<dead>\d+) dead letters?[^)]*\)"
    r".*?(?P<requests>\d+) requests? with (?P<prompt_tokens>\d+) prompt and (?P<completion_tokens>\d+) completion"
)
_VERDICT = re.compile(r"(\d+) documents? \((\d+) written, (\d+) dropped, (\d+) dead letter")
# What loguru prints if a log file cannot be written, on a full disk for example. It has no setting
# for that.
_LOGURU = re.compile(
    r"--- Logging error in Loguru Handler.*?--- End of logging error ---", re.DOTALL
)
_UNREAD = re.compile(r"(\d+) (?:[a-z]+ )*(?:lines?|rows?)\b")


class Failure(Exception):
    """The program broke a promise.

    Args:
        kind: a short name of the promise. Two failures of one kind probably have one cause.
        text: what was found.
    """

    def __init__(self, kind, text):
        super().__init__(text)
        self.kind = kind

    def __str__(self):
        return f"{self.kind}: {self.args[0]}"


def check_end(ended):
    """What holds for every command, whatever its exit code.

    Raises:
        Failure: it did not end, showed a traceback, or was ended by a signal of its own making.
    """
    if ended.code is None:
        raise Failure("hang", f"it was killed after {ended.seconds:.0f} s\n{_tail(ended.terminal)}")
    terminal = _LOGURU.sub("", ended.terminal)
    if "Traceback (most recent call last)" in terminal:
        raise Failure("traceback", _tail(terminal[terminal.index("Traceback (most") :]))


def check_success(expected, output, checkpoints, terminal, requests, exact_tokens):
    """What exit code 0 of a run promises.

    Args:
        exact_tokens: whether all answers had counts of tokens.
        requests: fewest and most requests that the closing line may say.

    Raises:
        Failure: the promise is broken.
    """
    if expected.impossible:
        raise Failure(
            "impossible", f"exit code 0, although {expected.impossible}\n{_last_line(terminal)}"
        )
    written = _documents(output)
    dead = _dead_letters(checkpoints)
    try:
        _check_documents(expected, written, dead)
        _check_numbers(expected, output, terminal, requests, exact_tokens)
    except Failure as failure:
        raise Failure(failure.kind, f"{failure.args[0]}\n{_last_line(terminal)}") from None


def check_verify(expected, ended):
    """What ``verify`` must say of a job that has just ended with exit code 0 and that nobody has
    touched.

    Raises:
        Failure: it finds a problem, or a number is not true.
    """
    if ended.code != 0:
        raise Failure(
            "verify", f"exit code {ended.code} for a finished job\n{_tail(ended.terminal)}"
        )
    said = _VERDICT.search(ended.terminal)
    true = (
        len(expected.rows),
        *(len(expected.ids(outcome)) for outcome in ("written", "dropped", "dead")),
    )
    if said is None or tuple(map(int, said.groups())) != true:
        raise Failure("verify", f"the truth is {true}\n{_tail(ended.terminal)}")


def _check_documents(expected, written, dead):
    times = Counter(str(document["id"]) for document in written)
    if strangers := sorted(times.keys() - expected.rows.keys()):
        raise Failure(
            "stranger", f"the output holds documents that are not in the input: {_few(strangers)}"
        )
    if twice := sorted(id for id, number in times.items() if number > 1):
        raise Failure("twice", f"documents are in the output more than once: {_few(twice)}")
    if blamed := sorted(dead.keys() - expected.ids("dead")):
        raise Failure(
            "blamed",
            f"{len(blamed)} dead letters of healthy documents; {blamed[0]}: {dead[blamed[0]]}",
        )
    if missing := sorted(expected.ids("written") - times.keys()):
        raise Failure("missing", f"documents are not in the output: {_few(missing)}")
    if silent := sorted(expected.ids("dead") - dead.keys()):
        raise Failure(
            "missing", f"documents are neither in the output nor dead letters: {_few(silent)}"
        )
    if kept := sorted(times.keys() - expected.ids("written")):
        raise Failure(
            "stranger", f"documents are in the output that were dropped or rejected: {_few(kept)}"
        )
    for document in written:
        answers = expected.answers[str(document["id"])]
        if document["text"] not in answers:
            raise Failure("wrong text", f"{document['id']}: {document['text']!r}")
        results = [
            result.get("text") for result in document["metadata"].get("rollout_results") or ()
        ]
        if results != [answers[document["text"]]] * expected.rollouts:
            raise Failure("wrong answer", f"{document['id']}: {results}")


def _check_numbers(expected, output, terminal, requests, exact_tokens):
    line, nothing = (
        _last_line(terminal),
        f"The input has no documents, so {output} has no output.",
    )
    if not expected.rows and line.startswith(nothing):
        return
    closing = _CLOSING.search(line)
    if closing is None:
        raise Failure("closing line", "there is none")
    answered = [id for id, row in expected.rows.items() if row.is_answered]
    true = {
        "written": len(expected.ids("written")),
        "read": len(expected.rows),
        "files": len(_files(output)),
        "dropped": len(expected.ids("dropped")),
        "dead": len(expected.ids("dead")),
    }
    if exact_tokens:
        true["prompt_tokens"] = (
            sum(len(expected.questions[id].split()) for id in answered) * expected.rollouts
        )
        true["completion_tokens"] = WORDS_OF_AN_ANSWER * len(answered) * expected.rollouts
    for name, number in true.items():
        if int(closing[name]) != number:
            raise Failure("closing line", f"{name}: it says {closing[name]}, the truth is {number}")
    if not requests[0] <= int(closing["requests"]) <= requests[1]:
        raise Failure(
            "closing line",
            f"it says {closing['requests']} requests, the truth is {requests[0]} to {requests[1]}",
        )
    if Path(closing["folder"]).resolve() != output.resolve():
        raise Failure("closing line", f"it names the folder {closing['folder']}")
    unread = [int(number) for number in _UNREAD.findall(terminal[_last_line_at(terminal) :])]
    if expected.unread_lines and expected.unread_lines not in unread:
        raise Failure(
            "unread lines",
            f"{expected.unread_lines} lines hold no document; the closing line does not say",
        )


def _documents(output):
    found = []
    for path in _files(output):
        for line in path.read_bytes().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                raise Failure(
                    "unreadable output", f"{path.name} has a line that is no JSON"
                ) from None
    return found


def _files(output):
    """The files that a user sees: staged ones are hidden."""
    return sorted(
        path
        for path in output.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(output).parts)
    )


def _dead_letters(checkpoints):
    letters = {}
    for path in checkpoints.glob("[0-9]*/dead_letters.jsonl"):
        for line in path.read_bytes().splitlines():
            letter = json.loads(line)
            letters[str(letter["id"])] = str(letter["error"])
    return letters


def _last_line_at(terminal):
    found = list(re.finditer(r"^\d+ of \d+ documents?\b", terminal, re.MULTILINE))
    return (
        found[-1].start()
        if found
        else len(terminal.rstrip()) - len(terminal.rstrip().rpartition("\n")[2])
    )


def _last_line(terminal):
    return terminal[_last_line_at(terminal) :].strip()


def _tail(text):
    return "\n".join(text.strip().splitlines()[-25:])


def _few(ids):
    return f"{', '.join(ids[:4])}{', ...' if len(ids) > 4 else ''} ({len(ids)})"
