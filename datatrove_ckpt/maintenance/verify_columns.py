"""Whether the Parquet files of a run load as one dataset: no rank can see the columns of another one while it runs.

Loaders take the columns of the first file of a folder, by name, and convert those of the others. Only footers are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from posixpath import dirname

from datatrove_ckpt.formatting import plural
from datatrove_ckpt.maintenance.findings import CommittedChunk, Report
from datatrove_ckpt.output.column_fit import Misfit, misfits
from datatrove_ckpt.output.column_types import Schema, read_schema


@dataclass
class _Found:
    """The first file that does not fit the first file of all by a column, and how many more there are."""

    chunk: CommittedChunk
    path: str
    first: str
    why: Misfit
    more: int = -1


def check_columns(report: Report) -> None:
    """Adds a problem for each column by which files of one folder do not load together, or not as what they are."""
    broken = {problem.path for problem in report.problems}
    files = {file.path: chunk for chunk in report.chunks for file in chunk.files if file.path.endswith(".parquet")}
    firsts: dict[str, tuple[str, Schema]] = {}
    found: dict[tuple[str, str], _Found] = {}
    for path, chunk in sorted(files.items()):
        if path in broken or (schema := _schema(report, path)) is None:
            continue
        first, expected = firsts.setdefault(dirname(path), (path, schema))
        for why in misfits(expected, schema):
            one = found.setdefault((first, why.column), _Found(chunk, path, first, why))
            one.more += 1
            if one.why.as_text and not why.as_text:  # the worse of both
                one.chunk, one.path, one.why = chunk, path, why
    for one in found.values():
        report.add_problem("columns", _message(one), one.chunk.rank, one.chunk.index, one.path)


def _message(one: _Found) -> str:
    loads = "loads as text" if one.why.as_text else "does not load"
    more = f" So {plural(one.more, 'more file')}." if one.more else ""
    return (
        f"{one.path} {loads} after {one.first}: column {one.why.column!r} is {one.why.later} there, and "
        f"{one.why.first} in the first file, whose types loaders take.{more} Give the loader a schema, or start over "
        "with one for ParquetWriter."
    )


def _schema(report: Report, path: str) -> Schema | None:
    try:
        return read_schema(report.folder, path)
    except ImportError:
        return None
