"""Checks whether a run's Parquet files load as one dataset, because ranks do not see each other's
columns.

Loaders take the columns of the first file of a folder, by name, and convert those of the others.
"""

from __future__ import annotations

from collections import defaultdict
from posixpath import dirname

from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.maintenance.findings import CommittedChunk, Report
from datatrove_ckpt.output.arrow_types import Schema
from datatrove_ckpt.output.chunk_writing import Misfit, misfits, read_schema


def check_columns(report: Report) -> None:
    broken = {problem.path for problem in report.problems}
    files = {
        file.path: chunk
        for chunk in report.chunks
        for file in chunk.files
        if file.path.endswith(".parquet") and file.path not in broken
    }
    firsts: dict[str, tuple[str, Schema]] = {}
    found: dict[tuple[str, str], list[tuple[CommittedChunk, str, Misfit]]] = defaultdict(list)
    for path, chunk in sorted(files.items()):
        schema = read_schema(report.folder, path)
        if schema is None:
            continue
        first, expected = firsts.setdefault(dirname(path), (path, schema))
        for why in misfits(expected, schema):
            found[first, why.column].append((chunk, path, why))
    for (first, column), misfitting in found.items():
        chunk, path, why = misfitting[0]
        message = (
            f"{path} does not load after {first}, or as text: column {column!r} is {why.later} "
            f"there, and {why.first} in the first file, whose types loaders take."
        )
        if len(misfitting) > 1:
            message += f" So {plural(len(misfitting) - 1, 'more file')}."
        message += " Give the loader a schema, or start over with one for ParquetWriter."
        report.add_problem("columns", message, chunk.rank, chunk.index, path)
