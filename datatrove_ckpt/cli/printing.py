"""Prints the results, notes and errors of commands. No foreign text controls the terminal."""

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import orjson

from datatrove_ckpt import errors
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import byte_size
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.errors import with_originals
from datatrove_ckpt.process.streams import drop_rest

_INDENT = re.compile(r"(?: +\w* +)?")


def wrapped(lines: Iterable[str], width: int) -> Iterator[str]:
    for line in (part for text in lines for part in text.split("\n")):
        indent = " " * len(_INDENT.match(line)[0])  # type: ignore[index]  # it always matches
        yield from textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [
            ""
        ]


def say(text: str) -> None:
    write_out(with_originals(text))
    write_out("\n", raw=True)  # not added to the text, which may be large


def say_result(is_json: bool, fields: JsonObject, lines: Iterable[str]) -> None:
    if is_json:
        option = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
        say(orjson.dumps(fields, option=option).decode())
    else:
        say("\n".join(lines))


def note(text: str) -> None:
    """Prints a text beside the command's result, on standard error."""
    with suppress(OSError):  # the exit code is the result where nobody reads
        print(redact(text), file=sys.stderr)


def write_out(text: str, raw: bool = False) -> None:
    """Prints the text, without secrets and control characters unless it is ``raw``.

    Escapes characters that the terminal's encoding lacks. Drops the rest of the text if the reader
    has gone (``status | head``).
    """
    from datatrove_ckpt.checkpoint.checksummed_lines import explained

    masked = text if raw else redact(text)
    with explained("write to", "standard output"):
        try:
            try:
                sys.stdout.write(masked)
            except UnicodeEncodeError as error:
                escaped = masked.encode(error.encoding, "backslashreplace")
                sys.stdout.write(escaped.decode(error.encoding))
            sys.stdout.flush()
        except BrokenPipeError:
            drop_rest(sys.stdout)


def write_page(output: str | None, checkpoints: Path, page: str, of: str) -> int:
    """Writes a report into the run folder of the checkpoints, or else here; "-" prints it."""
    beside = Path()
    if checkpoints.name == "checkpoints":
        beside = checkpoints.parent
    target = output or str(beside / "report.html")
    if target == "-":
        write_out(page, raw=True)
        return 0
    if Path(target).is_dir():
        raise errors.ConfigError(
            f"--output: {target} is a folder. Name a file, such as {target}/report.html."
        )
    text = page.encode()
    try:
        Path(target).write_bytes(text)
    except OSError as error:
        raise errors.StorageFailed(
            f"--output: {target} cannot be written: {error.strerror}. Give another file with -o."
        ) from error
    write_out(f"{target}: the report of {of} ({byte_size(len(text))}). Open it in a browser.\n")
    return 0


def fail(error: BaseException, code: int) -> int:
    """Prints an error as one message, with notes of one line, and returns the exit code."""
    from datatrove_ckpt.common.retrying import hub_refusal

    text = str(error)
    if not isinstance(error, errors.CkptError):
        text = hub_refusal(error) or text
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    if not isinstance(error, errors.LimitReached | errors.WaitsForBatches):
        text = f"error: {text}"
    note("\n".join([text, *notes]))
    return code
