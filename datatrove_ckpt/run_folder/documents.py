"""Reads a run's documents from its output files, in input order: for display, as one file or in a
repository on the hub (``export``), and as the result of ``datatrove_ckpt.run()``.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path, PosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import orjson
from datatrove.data import Document
from datatrove.io import DataFolder, get_datafolder

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.checksummed_lines import Json
from datatrove_ckpt.checkpoint.commits import CommitsDamaged, OutputFile, read_commits
from datatrove_ckpt.checkpoint.rank_summary import Include, read_ranks
from datatrove_ckpt.common.counts import DocumentCounts
from datatrove_ckpt.common.formatting import missing_package
from datatrove_ckpt.common.lazy_pyarrow import pa, pq
from datatrove_ckpt.common.redaction import redact
from datatrove_ckpt.common.retrying import failure_line, file_system_call
from datatrove_ckpt.errors import CkptError, ConfigError, OutputFailed, OutputMismatch
from datatrove_ckpt.output.arrow_types import (
    DataType,
    Schema,
    Table,
    TypeConflict,
    to_arrow,
    types_of,
    unify_types,
)
from datatrove_ckpt.output.chunk_writing import raw_type, writable
from datatrove_ckpt.output.csv_writer import line
from datatrove_ckpt.output.document_codec import document_of, for_orjson, number_column
from datatrove_ckpt.output.formats import JSONL, PARQUET, format_of_file, from_cell
from datatrove_ckpt.run_folder import queries
from datatrove_ckpt.run_folder.report.page import shortened
from datatrove_ckpt.run_folder.run_location import RunLocation, open_location
from datatrove_ckpt.run_folder.run_state import read_run_state
from datatrove_ckpt.run_folder.steps import StepFolder
from datatrove_ckpt.run_folder.verify import REDO_KINDS, VerifyReport, find_output, verify

if TYPE_CHECKING:
    import datasets
    import pandas

_USUAL = ("text", "finish_reason", "usage", "reasoning", "logprobs")
_VECTOR = 3
Committed = tuple[DataFolder, OutputFile, Json]
"""An output folder, a file in it, and the ``run.json`` of its rank."""


class ShownDocument(NamedTuple):
    """One document.

    Attributes:
        id: "" for a row of a query without a column of that name.
        location: the output file below the output folder, or the rank of a dead letter.
        answer: the answers of its rollouts, one after the other, or the cause of a dead letter.
    """

    id: str
    text: str
    answer: str
    location: str = ""
    is_dead: bool = False
    columns: Sequence[str] = ()

    def safe(self, max_length: int | None) -> "ShownDocument":
        """Returns the document without secrets and control characters, each text cut to
        ``max_length``.
        """
        id_, text, answer = (redact(part) for part in (self.id, self.text, self.answer))
        if max_length is not None:
            text = shortened(text, max_length)
            answer = shortened(answer, 2 * max_length)
        return self._replace(id=shortened(id_, 200), text=text, answer=answer)


def read_documents(location: RunLocation) -> "Iterator[ShownDocument]":
    """Raises as ``committed_files``, and OutputFailed if a file cannot be read."""
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
                "" if name is None else str(name),
                str(row.get("text", "")),
                answer_of(row, run),
                file.path,
                columns=columns,
            )


def committed_files(location: RunLocation) -> Iterator[Committed]:
    """Yields each file that is committed now, also of a rank with other damage than to its commits.

    Raises:
        ConfigError: there is no checkpoint, or nothing names the output folder.
        CheckpointError: the commits of a rank cannot be read.
    """
    kept = queries.kept_rows(location.folder / "output")
    if kept is not None:
        for path in kept.paths:
            yield get_datafolder(str(kept.folder)), OutputFile(Path(path).name, 0, ""), {}
        return
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


def read_dead_letters(location: RunLocation) -> "Iterator[ShownDocument]":
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


def rows_of(step: StepFolder) -> list[str]:
    """Returns the Parquet files with the rows of a step, if there are any.

    A column without a value is text in its file, and DuckDB would make text of the numbers in other
    files: where types differ, the rows are copied with types that hold them all.

    Raises OutputFailed if there are no such types.
    """
    if step.rows is None and not step.has_begun:
        return []
    with open_location(str(step.folder)) as location:
        committed = [*committed_files(location)]
        types = dict[str, DataType]()
        columns = chain.from_iterable(_schemas(committed))
        if any(types.setdefault(column.name, column.type) != column.type for column in columns):
            copy = step.folder / ".rows" / f"{step.digest()}.parquet"
            if not copy.exists():
                files.disk.make_dirs(copy.parent)
                with TemporaryDirectory(dir=copy.parent) as folder:
                    _write_parquet(location, Path(folder, copy.name))
                    files.disk.rename(Path(folder, copy.name), copy)
            return [str(copy)]
    return [folder.resolve_paths(file.path) for folder, file, _ in committed]


def read_rows(folder: DataFolder, path: str, with_media: bool = False) -> Iterator[Json]:
    """Raises OutputFailed if the file cannot be read."""
    full_path = folder.resolve_paths(path)
    file_format = format_of_file(path)
    if file_format is None:
        raise OutputFailed(f"{full_path} cannot be shown: its ending is of no known format.")
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
        name: fields[name] for name in names[names.index(counter) + 1 :] if fields[name] is not None
    }
    if [*item] == [column]:
        return _text(item[column])
    return _json(item)


def _answer(row: Json, run: Json) -> str:
    column = "answer" if run.get("rollout_results") is False else "metadata_key"
    key = str(run.get(column))
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
    if isinstance(result, str):
        return result
    if not isinstance(result, dict):
        return _json(result)
    choices = result.get("choices") or [{}]
    if isinstance(choices, list) and all(
        isinstance(choice, dict) and "text" in choice for choice in choices
    ):
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


_HUB = "hf://datasets/"
_BLOCK = 1 << 20
_ROWS = 1000  # at once in memory
_GROUP = 1 << 26  # bytes of them in a row group
_OTHER_DOCUMENTS = (*REDO_KINDS, "duplicate", "overlap", "lost", "commits")


def dataset(location: RunLocation) -> "datasets.Dataset":
    """Returns a dataset of the committed files, which may be larger than the memory.

    Raises as ``committed_files``, and OutputFailed if no column can hold the values of JSON lines.
    """
    import datasets

    files = list(committed_files(location))
    if not files:
        return datasets.Dataset.from_dict({})
    folder = files[0][0]
    if format_of_file(files[0][1].path) is PARQUET:
        return PARQUET.dataset([folder.resolve_paths(file.path) for _, file, _ in files])
    # The loader of JSON lines takes the types of the first file, and makes times of texts; the
    # loader of CSV makes numbers and nulls of texts.
    schema = _united(_columns_of_rows(location))
    if not len(schema):
        return datasets.Dataset.from_dict({})
    return datasets.Dataset.from_generator(
        _whole_rows,
        datasets.Features.from_arrow_schema(schema),
        gen_kwargs={
            "output": folder.resolve_paths(""),
            "files": tuple((file.path, file.xxh128) for _, file, _ in files),
            "columns": tuple(schema.names),
        },
    )


def _whole_rows(
    output: str, files: Sequence[tuple[str, str]], columns: Sequence[str]
) -> Iterator[Json]:
    """Yields rows with all columns. By the hashes in ``files``, ``datasets`` finds them in its
    cache.
    """
    folder = get_datafolder(output)
    for path, _ in files:
        for row in read_rows(folder, path):
            yield {name: row.get(name) for name in columns}


def _columns_of_rows(location: RunLocation) -> Iterator[tuple[str, DataType]]:
    for rows in _batches(location):
        yield from types_of(rows)


def _united(columns: Iterable[tuple[str, DataType]]) -> Schema:
    types = dict[str, DataType]()
    try:
        for name, kind in columns:
            types[name] = unify_types(types.get(name), kind, name)
    except (TypeConflict, ValueError, TypeError) as error:
        raise OutputFailed(
            f"Nothing was exported: {error}. A .jsonl or .csv file takes them."
        ) from error
    return pa.schema(types.items())


def export(location: RunLocation, target: str) -> tuple[int, VerifyReport]:
    """Writes all committed documents, task by task in the order of the input.

    A CSV file has each column that any document has; lists and dictionaries are JSON there.

    Args:
        target: a path that ends with .csv, .jsonl or .parquet, or ``hf://datasets/ORG/NAME``.

    Returns:
        The number of documents, and the report of ``verify``.

    Raises:
        ConfigError: ``target`` is neither, its file is there already, or its folder is missing.
        OutputMismatch: the output holds other documents than the commits name.
        CkptError: the output cannot be read.
    """
    if target.startswith(_HUB):
        report = _refuse_changes(location)
        with _named(target):
            whole = dataset(location)
            whole.push_to_hub(target.removeprefix(_HUB), private=True)
        return len(whole), report
    path = Path(target)
    writers = {".csv": _write_csv, ".jsonl": _write_lines, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise ConfigError(
            f"{target}: ends with none of {', '.join(writers)}, and is no {_HUB}ORG/NAME."
        )
    is_there = f"{target}: is there already. Remove it, or choose another name."
    if path.exists():
        raise ConfigError(is_there)
    if not path.parent.is_dir():
        raise ConfigError(f"{target}: the folder {path.parent} does not exist. Make it first.")
    report = _refuse_changes(location)
    with _named(target), TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
        new = Path(folder, path.name)
        count = writers[path.suffix](location, new)
        if not files.disk.put_new(new, path):
            raise ConfigError(is_there)
    return count, report


def _refuse_changes(location: RunLocation) -> VerifyReport:
    if queries.kept_rows(location.folder / "output") is not None:
        return VerifyReport(location, False)
    report = verify(location)
    wrong = [problem for problem in report.problems if problem.kind in _OTHER_DOCUMENTS]
    if wrong:
        more = f" ({len(wrong)} such problems; datatrove-ckpt verify lists them)"
        raise OutputMismatch(f"Nothing was exported. {wrong[0]}{more if wrong[1:] else ''}")
    return report


@contextmanager
def _named(target: str) -> Iterator[None]:
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        missing = isinstance(error, ImportError) and missing_package(str(error))
        raise OutputFailed(f"{target} was not written: {missing or failure_line(error)}") from error


def _write_lines(location: RunLocation, path: Path) -> int:
    count = 0
    with path.open("wb") as target:
        for folder, committed, _ in committed_files(location):
            name = committed.path
            file_format = format_of_file(name)
            if file_format is not JSONL:
                for row in read_rows(folder, name, with_media=True):
                    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
                    target.write(orjson.dumps(for_orjson(row), default=str, option=options))
                    count += 1
                continue
            with file_format.open(folder, name) as file:
                for block in iter(partial(file.read, _BLOCK), b""):
                    target.write(block)
                    count += block.count(b"\n")
    return count


def _write_parquet(location: RunLocation, path: Path) -> int:
    files = [*committed_files(location)]  # a run may commit more of them meanwhile
    if files and format_of_file(files[0][1].path) is PARQUET:
        columns = chain.from_iterable(_schemas(files))
        united = _united((column.name, raw_type(column)) for column in columns)
        schema = pa.schema(map(writable, united))
        tables = _tables(files, schema)
    else:
        schema = _united(_columns_of_rows(location))
        tables = (_table(rows, schema) for rows in _batches(location))
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        for table in tables:
            writer.write_table(table)
            count += table.num_rows
    return count


def _schemas(files: Iterable[Committed]) -> Iterator[Schema]:
    for folder, committed, _ in files:
        with PARQUET.open(folder, committed.path) as file:
            yield pq.read_schema(file)


def _tables(files: Sequence[Committed], schema: Schema) -> Iterator[Table]:
    """Yields the rows as row groups of a usual size, also where files are small or have media."""
    group: list[Table] = []
    for folder, committed, _ in files:
        with PARQUET.open(folder, committed.path) as file, pq.ParquetFile(file) as parquet:
            size = 10 if "media" in parquet.schema_arrow.names else _ROWS
            for batch in parquet.iter_batches(size):
                group.append(_with_schema(batch, schema))
                if sum(table.num_rows for table in group) >= _ROWS or (
                    sum(table.nbytes for table in group) >= _GROUP
                ):
                    yield pa.concat_tables(group)
                    group = []
    if group:
        yield pa.concat_tables(group)


def _with_schema(batch: Table, schema: Schema) -> Table:
    columns = []
    for field in schema:
        if field.name not in batch.schema.names:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(field.name)
        if not column.type.equals(field.type):
            try:
                column = column.cast(field.type)
            except pa.ArrowException:
                column = to_arrow(field.type, column.to_pylist())
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def _table(rows: Sequence[Json], schema: Schema) -> Table:
    columns = [to_arrow(field.type, [row.get(field.name) for row in rows]) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _write_csv(location: RunLocation, path: Path) -> int:
    files = [*committed_files(location)]
    columns = dict[str, None]()
    for row in _rows(files):
        columns |= dict.fromkeys(row)
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(line([*columns]))
        for row in _rows(files):
            file.write(line([row.get(name) for name in columns]))
            count += 1
    return count


def _rows(files: Iterable[Committed], with_media: bool = True) -> Iterator[Json]:
    for folder, committed, _ in files:
        yield from read_rows(folder, committed.path, with_media)


def _batches(location: RunLocation) -> Iterator[list[Json]]:
    rows = _rows(committed_files(location))
    while batch := list(islice(rows, _ROWS)):
        yield batch


class RunOutput:
    """The documents in the files that are committed, in the order of the input. Each use reads
    them.

    Raises, in all methods:
        CkptError: the checkpoint or a file cannot be read.
    """

    def __iter__(self) -> Iterator[Document]:
        return map(document_of, self._rows())

    def to_pandas(self) -> "pandas.DataFrame":
        """Returns a row for each document. No value changes its type, as in ``read_json``."""
        import pandas

        return pandas.DataFrame(self._rows())

    def to_dataset(self) -> "datasets.Dataset":
        """Returns a dataset of the files, which may be larger than the memory."""
        with open_location(self._run_folder) as location:
            return dataset(location)

    def push_to_hub(self, repository: str, **options: object) -> None:
        """Uploads the dataset, with ``options`` of its ``push_to_hub``, such as ``private``."""
        self.to_dataset().push_to_hub(repository, **options)

    @property
    def counts(self) -> DocumentCounts:
        """Documents, requests and tokens over all attempts."""
        with open_location(self._run_folder) as location:
            return read_run_state(location).delivered

    @property
    def _run_folder(self) -> str:
        return str(self).rpartition("/")[0] or "."

    def _rows(self) -> Iterator[Json]:
        with open_location(self._run_folder) as location:
            yield from _rows(committed_files(location), with_media=False)


class OutputPath(RunOutput, PosixPath):
    """The output folder on this machine."""


class OutputUrl(RunOutput, str):
    """The output folder elsewhere."""
