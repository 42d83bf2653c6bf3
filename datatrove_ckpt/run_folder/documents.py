"""Reads a run's documents and answers from its output files, in input order, for display."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import orjson
from datatrove.io import DataFolder, get_datafolder

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.checksummed_lines import Json
from datatrove_ckpt.checkpoint.commits import CommitsDamaged, OutputFile, read_commits
from datatrove_ckpt.checkpoint.rank_summary import Include, read_ranks
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.common.retrying import failure_line, file_system_call
from datatrove_ckpt.errors import OutputFailed
from datatrove_ckpt.output.document_codec import number_column
from datatrove_ckpt.output.formats import format_of_file, from_cell
from datatrove_ckpt.run_folder.report.page import shortened
from datatrove_ckpt.run_folder.run_location import RunLocation
from datatrove_ckpt.run_folder.verify import find_output

_USUAL = ("text", "finish_reason", "usage", "reasoning", "logprobs")  # of any result
_VECTOR = 3  # numbers of a vector that are shown
Committed = tuple[DataFolder, OutputFile, Json]
"""An output folder, a file in it, and the ``run.json`` of its rank."""


class ShownDocument(NamedTuple):
    """One document.

    Attributes:
        location: the output file below the output folder, or the rank of a dead letter.
        answer: the answers of its rollouts, one after the other, or the cause of a dead letter.
        columns: the names of the row's columns.
    """

    id: str
    text: str
    answer: str
    location: str = ""
    is_dead: bool = False
    columns: Sequence[str] = ()

    def safe(self, max_length: int | None) -> ShownDocument:
        """Returns the document without secrets and control characters, each text cut to
        ``max_length``.
        """
        id_, text, answer = (redact(part) for part in (self.id, self.text, self.answer))
        if max_length is not None:
            text = shortened(text, max_length)
            answer = shortened(answer, 2 * max_length)
        return self._replace(id=shortened(id_, 200), text=text, answer=answer)


def read_documents(location: RunLocation) -> Iterator[ShownDocument]:
    """Reads the documents of the output files.

    Raises as ``committed_files``, and OutputFailed if a file cannot be read.
    """
    for folder, file, run in committed_files(location):
        answer_of = _item if run.get("explode") else _answer
        for row in read_rows(folder, file.path):
            name = row.get("id")
            if "text" not in row:  # a line of a batch file's output
                name = row.get("custom_id", name)
            columns = []
            for column, value in row.items():
                if column == "metadata" and isinstance(value, dict):
                    columns += [f"metadata.{key}" for key in value]
                else:
                    columns.append(column)
            yield ShownDocument(
                str(name),
                str(row.get("text", "")),
                answer_of(row, run),
                file.path,
                columns=columns,
            )


def committed_files(location: RunLocation) -> Iterator[Committed]:
    """Yields each file that is committed now, also of a rank with other damage than to its commits.

    Raises:
        ConfigError: there is no checkpoint, or nothing names the output folder.
        CheckpointError: the commits of a rank cannot be read. The files of all other ranks were
            yielded before.
    """
    folder = get_datafolder(find_output(location))
    damage = None
    for rank in read_ranks(location.folder, Include.SETTINGS | Include.COMMITS):
        commits = rank.commits
        if isinstance(rank.damage, CommitsDamaged):
            damage = rank.damage
        elif rank.damage is not None:
            commits = read_commits(rank.commits_file)
        for _, commit in sorted(commits.items()):
            for file in commit.files:
                yield folder, file, rank.run
    if damage is not None:
        raise damage


def read_dead_letters(location: RunLocation) -> Iterator[ShownDocument]:
    """Reads the dead letters that no finished retry has taken.

    Raises ConfigError if there is no checkpoint.
    """
    retries = layout.retry_folders(location.folder)
    for rank in read_ranks(location.folder, Include.SETTINGS):
        folders = [layout.rank_folder(retry, rank.number) for retry in retries]
        retried = {
            (dead_letter["ordinal"], dead_letter["attempts"])
            for folder in folders
            if layout.is_finished(folder)
            for dead_letter in _dead_letters(folder / layout.RETRY_INPUT)
        }
        for dead_letter in _dead_letters(rank.dead_letters_file):
            if (dead_letter["ordinal"], dead_letter["attempts"]) not in retried:
                text = str(dead_letter.get("document", {}).get("text", ""))
                yield ShownDocument(
                    str(dead_letter["id"]),
                    text,
                    str(dead_letter["error"]),
                    rank.place,
                    is_dead=True,
                )


def _dead_letters(path: Path) -> Iterator[Json]:
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                with suppress(ValueError):  # blank after a repair; or torn, and not committed
                    yield orjson.loads(line)


def read_rows(folder: DataFolder, path: str, with_media: bool = False) -> Iterator[Json]:
    """Yields the rows of an output file. Raises OutputFailed if the file cannot be read."""
    full_path = folder.resolve_paths(path)
    file_format = format_of_file(path)
    if file_format is None:
        raise OutputFailed(
            f"{full_path} cannot be shown: no format is known of files with this ending."
        )
    try:
        with file_system_call(), file_format.open(folder, path) as file:
            for row, _ in file_format.rows(file, with_media):
                if row is not None:
                    yield row
    except (OSError, EOFError) as error:
        raise OutputFailed(
            f"{full_path} cannot be read: {failure_line(error)}. Was it moved? See --output."
        ) from error


def _item(row: Json, run: Json) -> str:
    """Returns the item of a row from a run with ``explode``: the item's columns, or its text. A row
    without an item is shown as by ``_answer``.
    """
    fields = row.get("metadata")
    if not isinstance(fields, dict):
        fields = row
    column = str(run.get("answer") or "item")
    number = str(row.get("id")).rpartition("/")[2]
    counter = number_column(fields, number, column, str(run.get("metadata_key")))
    if counter is None:
        return _answer(row, run)
    names = [*fields]
    item = {
        name: fields[name]
        for name in names[names.index(counter) + 1 :]
        if fields[name] is not None  # in a table, a column of other items
    }
    if [*item] == [column]:
        return _text(item[column])
    return _json(item)


def _answer(row: Json, run: Json) -> str:
    """Returns the results as text; the whole row if it has none."""
    key = str(run.get("metadata_key"))
    metadata = row.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    results = from_cell(metadata.get(key, row.get(key)))
    if results is None:
        return _text({name: value for name, value in row.items() if name not in ("id", "text")})
    if not isinstance(results, list):
        results = [results]
    return "\n\n".join(map(_text, results))


def _text(result: object) -> str:
    """Returns a result's text, or those of its choices, then its other fields on a new line."""
    if isinstance(result, str):
        return result
    if not isinstance(result, dict):
        return _json(result)
    choices = result.get("choices") or [{}]
    if isinstance(choices, list) and all(
        isinstance(choice, dict) and "text" in choice for choice in choices
    ):  # the first choice is the result itself
        texts = "\n\n".join(map(_text, choices))
        result = {**result, "text": texts, "choices": None, "tool_calls": None}
    text = result.get("text")
    if not isinstance(text, str):
        return _json(result)
    beside = {
        name: value
        for name, value in result.items()
        if name not in _USUAL and value not in (None, [], {})
    }
    if not beside:
        return text
    return f"{text}\n{_json(beside)}".lstrip("\n")


def _json(value: object) -> str:
    return orjson.dumps(_short(value), default=str).decode()


def _short(value: object) -> object:
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > _VECTOR and all(isinstance(each, float) for each in value):
        return [*(round(each, 4) for each in value[:_VECTOR]), f"... {len(value)} numbers"]
    return [_short(each) for each in value]
