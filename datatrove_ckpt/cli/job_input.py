"""The input of a job in the short form: which reader it needs, and how many tasks it makes.

Input that only this process has, standard input and objects of Python, is kept as a file of the
run folder, from which each start reads it.
"""

import filecmp
import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from glob import escape, has_magic
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from datatrove.data import Document
from datatrove.io import get_datafolder

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.cli.yaml_config import import_name
from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import safe_repr
from datatrove_ckpt.common.lazy_pyarrow import pa, pq
from datatrove_ckpt.common.redaction import HIDDEN
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import CkptError, ConfigError
from datatrove_ckpt.readers import READERS, JsonlReader, SeekingReader
from datatrove_ckpt.readers.compressed import uncompressed
from datatrove_ckpt.readers.inputs import InputFolder

if TYPE_CHECKING:
    from datatrove_ckpt.run_folder.queries import KeptRows, Query, Tables

_READERS = {reader.__name__: reader for reader in READERS}
_SUFFIXES = {suffix: reader.__name__ for reader in READERS for suffix in reader.suffixes.split()}
_FRAME = " (in Python: datatrove_ckpt.run(input=pandas."
_OTHER_FORMATS = {
    ".tsv": ' (rename it to .csv, and set delimiter: "\\t")',
    ".xlsx": f"{_FRAME}read_excel(FILE), ...))",
    ".sqlite": f"{_FRAME}read_sql('select * from TABLE', sqlite3.connect(FILE)), ...))",
    ".db": f"{_FRAME}read_sql('select * from TABLE', sqlite3.connect(FILE)), ...))",
    ".zip": " (unpack it: unzip FILE -d FOLDER, and give FOLDER)",
    ".warc": " (in the long form, its reader is class_path: WarcReader)",
}
"""Ways to read other formats, by suffix."""
_DATASET = re.compile(r"hf://datasets/([^/@*]+/[^/@*]+)/?")
_MOST_TASKS = 100
LEAST_BYTES = 1 << 22
"""Least size of a task on this machine, which takes far longer than its start."""
_MAX_LINES = 100


def class_of(reader: JsonObject) -> type[SeekingReader]:
    return _READERS.get(reader["class_path"], JsonlReader)


def node(class_path: str, **arguments: object) -> JsonObject:
    return {"class_path": class_path, "init_args": arguments}


class JobInput:
    """The input of a job.

    Args:
        inspect_only: the files may be gone, and are not read.
    """

    def __init__(self, source: str, inspect_only: bool) -> None:
        self.inspect_only = inspect_only
        self._is_here = "://" not in source
        if self._is_here:
            source = os.path.expanduser(source)  # noqa: PTH111 (keeps a / at its end)
        self._source = source
        self._folder, self._pattern = _split(source)

    def reader(self) -> JsonObject:
        """Lists the input only if its name does not show its format.

        Raises:
            ConfigError: there is no such input, or it needs no reader or several.
        """
        source = self._source
        folder = self._folder
        pattern = self._pattern
        dataset = _DATASET.fullmatch(source)
        if dataset is not None:
            options = {"split": "train"}
            return node(
                "HuggingFaceDatasetReader",
                dataset=dataset[1],
                dataset_options=options,
                streaming=True,
            )
        # Text before an "@" may be a password, which is refused below.
        kind = ""
        if pattern and "@" not in source:
            kind = reader_name(source)
        shows_format = kind and (has_magic(source) or not self._is_here or Path(source).is_file())
        if shows_format or self.inspect_only:
            return node(kind, data_folder=folder, glob_pattern=pattern)
        if self._is_here and pattern and not has_magic(source) and not Path(source).exists():
            raise _is_absent(source)
        if Path(source, "dataset_info.json").is_file():
            return node("HuggingFaceDatasetReader", dataset=source, load_from_disk=True)
        names = self._list(pattern or None)
        input_names = [name for name in names if pattern or PurePosixPath(name).stem != "README"]
        kinds = {
            uncompressed(name).suffix: reader_name(name)
            for name in input_names
            if reader_name(name)
        }
        suffixes = sorted(kinds)
        rows = [suffix for suffix in suffixes if _READERS[kinds[suffix]].has_rows]
        texts = [suffix for suffix in suffixes if kinds[suffix] == "TextReader"]
        if ".pdf" not in suffixes:  # texts may have pictures beside them
            suffixes = texts or suffixes
        suffixes = rows or suffixes
        problem = self._linked_folder() or self._problem(
            names, {suffix: kinds[suffix] for suffix in suffixes}
        )
        if problem:
            raise ConfigError(
                f"input: {source} holds {problem}. Name files of one kind, such as "
                "documents/*.jsonl."
            )
        if len(suffixes) == 1:
            pattern = pattern or f"**/*{suffixes[0]}*"
        return node(kinds[suffixes[0]], data_folder=folder, glob_pattern=pattern or "**/*")

    def _problem(self, names: list[str], kinds: dict[str, str]) -> str:
        suffixes = list(kinds)
        if Path(self._source, "dataset_dict.json").is_file():
            return f"several splits, such as {Path(self._source, 'train')}"
        if not names:
            return "no file"
        if not suffixes:
            name = f"{self._source}/{names[0]}".rstrip("/").lower().removesuffix(".gz")
            advice = (text for suffix, text in _OTHER_FORMATS.items() if name.endswith(suffix))
            return f"none of {', '.join(_SUFFIXES)}{next(advice, '')}"
        other_names = [name for name in names if uncompressed(name).suffix not in suffixes]
        is_of_rows = all(_READERS[kind].has_rows for kind in kinds.values())
        several = len(suffixes) > 1 and not self._pattern
        if len({*kinds.values()}) > 1 or (several and is_of_rows):
            return " and ".join(suffixes)
        if several and other_names:
            return f"{other_names[0]} beside {' and '.join(suffixes)}"
        like = re.compile("|".join(map(re.escape, suffixes)), re.IGNORECASE)
        odd = [
            other
            for other in other_names
            if self._pattern or like.search(posixpath.basename(other))
        ]
        if odd:
            return f"other files, such as {odd[0]}"
        twice = [name for name, times in Counter(map(uncompressed, names)).items() if times > 1]
        if twice:
            return f"{twice[0]} twice, compressed and not"
        return ""

    def _linked_folder(self) -> str:
        if self._pattern or not self._is_here:
            return ""
        for at, folders, _ in os.walk(self._folder):
            for name in folders:
                path = Path(at, name)
                inside = f"{at.removeprefix(self._folder)}/{name}"
                if path.is_symlink() and layout.is_input(inside, None):
                    return f"a link to a folder, {path}, which readers do not follow"
        return ""

    def first_document(self, reader: JsonObject, of_folder: bool = False) -> Document | None:
        path = Path(self._source)
        if path.parent.name == layout.KEPT_INPUT and self._pattern:
            path = next(iter(sorted(path.parent.glob(path.name))), path)
        is_file = path.is_file()
        if (is_file or of_folder) and not self.inspect_only:
            with suppress(Exception):  # the checks before a start name what is wrong
                settings = {"text_key": None, **reader["init_args"]}
                rows = import_name(reader["class_path"], "")(**settings)
                documents = rows.read_file(path.name) if is_file else rows.run()
                return next(iter(documents))
        return None

    def first_request(self, reader: JsonObject) -> JsonObject:
        """Returns the first request of a batch file; empty if the input is no batch file."""
        if reader["class_path"] == "JsonlReader":
            lines = import_name("JsonlReader", "")(**reader["init_args"])
            with suppress(CkptError, OSError):
                for name in self._list(lines.glob_pattern)[:1]:
                    for block in islice(lines.blocks(name, ()), 1):
                        for row, _, _, _ in islice(block.rows, _MAX_LINES):
                            if isinstance(row, dict) and _seems_request(row):
                                return row
        return {}

    def count_tasks(self, reader: JsonObject, is_elsewhere: bool) -> int:
        if self.inspect_only:
            return 1
        if "glob_pattern" not in reader["init_args"]:
            return _MOST_TASKS if is_elsewhere else 1
        try:
            names = self._list(reader["init_args"]["glob_pattern"])
            tasks = min(len(names), _MOST_TASKS)
            if self._is_here and not is_elsewhere:
                size = sum(Path(self._folder, name).stat().st_size for name in names)
                tasks = min(tasks, size // LEAST_BYTES)
        except (ConfigError, OSError):
            if is_elsewhere:
                raise
            tasks = 1
        return max(1, tasks)

    def _list(self, pattern: str | None) -> list[str]:
        try:
            listed = get_datafolder(self._folder)
            names: list[str] = InputFolder(listed.path, listed.fs).list_files(glob_pattern=pattern)
        except Exception as error:  # botocore's errors have no common base
            masked = re.sub(r"//[^/@]*@", f"//{HIDDEN}@", self._folder)
            raise ConfigError(f"input: {masked} cannot be listed: {failure_line(error)}.") from None
        if not names and self._is_here and not Path(self._folder).is_dir():
            raise _is_absent(self._folder)
        return names


def _seems_request(row: JsonObject) -> bool:
    if "custom_id" in row:
        return not row.keys().isdisjoint(("body", "params"))
    return "url" in row and isinstance(row.get("body"), dict)


def _is_absent(source: str) -> ConfigError:
    hint = ""
    if "," in source:
        hint = " Several files are a folder or a pattern, such as documents/*.jsonl."
    return ConfigError(f"input: {Path(source).absolute()} does not exist.{hint}")


def reader_name(name: str) -> str:
    return _SUFFIXES.get(uncompressed(name).suffix.lower(), "")


def _split(source: str) -> tuple[str, str]:
    top = "."
    if source.startswith("/"):
        top = "/"
    if has_magic(source) and not Path(source).exists():
        parts = source.split("/")
        for first, part in enumerate(parts):
            if has_magic(part) and not Path("/".join(parts[: first + 1])).is_dir():
                return "/".join(parts[:first]) or top, "/".join(parts[first:])
    folder, _, name = source.rstrip("/").rpartition("/")
    if not source.endswith("/") and reader_name(name) and not Path(source).is_dir():
        # The name itself would match all names with this end.
        exactly = f"{escape(name[:-1])}[{name[-1]}]"
        return folder or top, exactly
    return source, ""


# rows that are kept -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedInput:
    """The input that a run folder keeps.

    Attributes:
        has_begun: whether checkpoints or their mirror show that the run has begun.
    """

    folder: Path
    has_begun: bool
    mirror: object

    def save_lines(self, lines: Iterable[bytes], name: str) -> Path:
        """Writes JSON lines, unless the run has begun with them.

        Raises:
            ConfigError: the run has begun with other lines.
        """
        path = self.folder / f"{name}.jsonl"
        if not self._has_begun_with(path):
            files.disk.make_dirs(path.parent)
            files.disk.replace(path, lines)
            return path
        with path.open("rb") as file:  # a copy might not fit on the disk
            is_equal = all(file.read(len(line)) == line for line in lines) and not file.read(1)
        return _compared(path, is_equal)

    def save_rows(self, rows: object) -> Path:
        """Writes a table as Parquet, with its types, or else texts or dictionaries as JSON lines,
        unless the run has begun with them.

        Args:
            rows: a DataFrame of pandas or polars, a ``datasets.Dataset``, or another object that
                exports an Arrow stream; or an iterable of texts or dictionaries, which are not held
                in memory.

        Raises:
            ConfigError: ``rows`` is none of these, a row does not fit, or the run began with other
                rows.
        """
        is_series = hasattr(rows, "to_frame")
        if hasattr(rows, "to_parquet") or (hasattr(rows, "__arrow_c_stream__") and not is_series):
            return self._save_table(rows)
        if not isinstance(rows, Iterable) or isinstance(rows, Mapping | bytes):
            raise ConfigError(
                "input: takes a path, texts or dictionaries, a DataFrame, or a dataset (one "
                f"split); it is {type(rows).__name__}."
            )
        return self.save_lines(_lines(rows), "rows")

    def save_query(self, query: "Query", tables: "Tables", made_from: JsonObject) -> "KeptRows":
        """Computes a query, unless its rows are there. Raises as ``queries.keep``."""
        from datatrove_ckpt.run_folder import queries

        with queries.locked(self.folder.with_name("query.lock")):
            kept = queries.keep(query, tables, self.folder, made_from, self.has_begun)
            self.record_folder()
        return kept

    def record_folder(self) -> None:
        """Records where the rows are when the run begins. For a run of an earlier release, its
        origin has the path, unless that is a mirror.
        """
        folder = self.folder
        record = folder / layout.BEGAN_IN
        if self.has_begun:
            from datatrove_ckpt.output.output_folder import RunOrigin

            origin = RunOrigin(folder.with_name("checkpoints"), None).recorded
            if record.exists() or origin is None or self.mirror:
                return
            if Path(origin.home).name != "checkpoints":
                return
            folder = Path(origin.home).with_name(layout.KEPT_INPUT)
        files.disk.replace(record, os.fsencode(get_datafolder(str(folder)).resolve_paths("")))

    def _save_table(self, table: object) -> Path:
        path = self.folder / "rows.parquet"
        new = path.with_name(f"{path.name}.new")
        files.disk.make_dirs(path.parent)
        if hasattr(table, "reset_index"):
            table = self._with_index(table, path)
        if hasattr(table, "to_parquet"):
            table.to_parquet(new)
        else:
            batches = pa.RecordBatchReader.from_stream(table)
            with pq.ParquetWriter(new, batches.schema) as file:
                for batch in batches:
                    file.write_batch(batch)
        if not self._has_begun_with(path):
            files.disk.sync(new)
            files.disk.rename(new, path)
            files.disk.sync_dir(path.parent)
            return path
        is_equal = filecmp.cmp(new, path, shallow=False)
        files.disk.remove(new)
        return _compared(path, is_equal)

    def _with_index(self, frame: Any, path: Path) -> object:
        """Returns a DataFrame with its index as a column, unless the index only counts the rows, or
        the run has begun without that column.
        """
        rows = frame.reset_index(drop=True)
        if set(frame.index.names) == {None}:
            columns = len(rows.columns)
            begun_without = self._has_begun_with(path) and len(pq.read_schema(path)) == columns
            if begun_without or frame.index.equals(rows.index):
                return rows
        return frame.reset_index()

    def _has_begun_with(self, path: Path) -> bool:
        return self.has_begun and path.exists()


def _lines(rows: Iterable[object]) -> Iterator[bytes]:
    for number, row in enumerate(rows):
        if number == 0:
            _refuse_path(row)
        if isinstance(row, str):
            row = {"text": row}
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"input: row {number} is neither a text nor a dictionary: {safe_repr(row)}"
            )
        try:
            line = json.dumps(dict(row)).encode() + b"\n"
            _refuse_other_keys(dict(row))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"input: row {number} does not fit into JSON: {error}. A DataFrame, "
                "pyarrow.Table or Dataset keeps types."
            ) from None
        yield line


def _refuse_path(row: object) -> None:
    """Raises ConfigError for a path, or a text that is probably the path of an input."""
    is_path = isinstance(row, os.PathLike)
    if isinstance(row, str):
        is_file_name = reader_name(row) != "" and not re.search(r"\s", row)
        is_path = is_file_name or ("/" in row and os.path.exists(row))  # noqa: PTH110 (any text)
    if is_path:
        raise ConfigError(
            f"input: row 0 is {str(row)!r}, a path. Give files as a pattern or a folder, such as "
            'documents/*.jsonl; or texts as {"text": ...}.'
        )


def _refuse_other_keys(value: object) -> None:
    """Raises ValueError for a key that JSON would make a text, perhaps equal to another key."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {safe_repr(key)} is no text")
            _refuse_other_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_other_keys(item)


def _compared(path: Path, is_equal: bool) -> Path:
    if not is_equal:
        raise ConfigError(
            f"input: its rows differ from {path} of this run. Give the same rows, another "
            f"run_folder, or {path} as the input."
        )
    return path
