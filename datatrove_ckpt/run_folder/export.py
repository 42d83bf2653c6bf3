"""A run's output as one file, or as a repository on the hub."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson
from datatrove.io import DataFolder

from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import CkptError, ConfigError, OutputFailed
from datatrove_ckpt.output.documents import for_orjson
from datatrove_ckpt.output.formats import JSONL, format_of_file
from datatrove_ckpt.run_folder.documents import output_files, read_rows
from datatrove_ckpt.run_folder.where import Place

if TYPE_CHECKING:
    import datasets

_HUB = "hf://datasets/"
_BLOCK = 1 << 20  # bytes


def dataset(place: Place, output: str | None = None) -> datasets.Dataset:
    """Returns a dataset of the committed files, which may be larger than the memory. Args and
    raises: as ``output_files``.
    """
    import datasets

    files = [folder.resolve_paths(path) for folder, path, _ in output_files(place, output)]
    if not files:
        return datasets.Dataset.from_dict({})
    known = format_of_file(files[0])
    return (known or JSONL).dataset(files)


def export(place: Place, target: str, output: str | None = None) -> int:
    """Writes all committed documents, task by task in the order of the input.

    A column of a CSV file is one that any document has; lists and dictionaries are JSON there.

    Args:
        target: a path that ends with .csv, .jsonl or .parquet, or ``hf://datasets/ORG/NAME``.

    Returns:
        How many documents it wrote.

    Raises:
        ConfigError: ``target`` is neither, or its file is there already.
        CkptError: the output cannot be read.
    """
    if target.startswith(_HUB):
        with _named(target):
            whole = dataset(place, output)
            whole.push_to_hub(target.removeprefix(_HUB), private=True)  # unless it is there
        return len(whole)
    path = Path(target)
    if path.suffix not in (".csv", ".jsonl", ".parquet"):
        raise ConfigError(
            f"{target}: ends with none of .csv, .jsonl, .parquet, and is no {_HUB}ORG/NAME."
        )
    if path.exists():
        raise ConfigError(f"{target}: is there already. Remove it, or choose another name.")
    new = path.with_name(f"{path.name}.new")
    try:
        with _named(target):
            if path.suffix == ".csv":
                count = _write_csv(place, new, output)
            elif path.suffix == ".jsonl":
                count = _write_lines(place, new, output)
            else:
                whole = dataset(place, output)
                count = len(whole)
                whole.to_parquet(new)
            new.rename(path)
    finally:
        new.unlink(missing_ok=True)
    return count


@contextmanager
def _named(target: str) -> Iterator[None]:
    try:
        yield
    except CkptError:
        raise
    except Exception as error:  # of datasets, of the hub, of a disk
        raise OutputFailed(f"{target} was not written: {failure_line(error)}") from error


def _write_lines(place: Place, path: Path, output: str | None) -> int:
    count = 0
    with path.open("wb") as target:
        for folder, name, _ in output_files(place, output):
            known = format_of_file(name)
            if known is not JSONL:  # not by pandas, which rounds numbers
                for row in read_rows(folder, name, with_media=True):
                    target.write(_json(row) + b"\n")
                    count += 1
                continue
            with known.open(folder, name) as file:
                for block in iter(partial(file.read, _BLOCK), b""):
                    target.write(block)
                    count += block.count(b"\n")
    return count


def _write_csv(place: Place, path: Path, output: str | None) -> int:
    files = [*output_files(place, output)]  # a run may commit more of them meanwhile
    columns = dict[str, None]()
    for row in _rows(files):
        columns |= dict.fromkeys(row)
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*columns])
        writer.writeheader()
        for row in _rows(files):
            writer.writerow({name: _cell(value) for name, value in row.items()})
            count += 1
    return count


def _rows(files: Iterable[tuple[DataFolder, str, str]]) -> Iterator[Json]:
    for folder, path, _ in files:
        yield from read_rows(folder, path, with_media=True)


def _cell(value: object) -> object:
    if isinstance(value, dict | list | np.ndarray):
        return _json(value).decode()
    return value


def _json(value: object) -> bytes:
    return orjson.dumps(for_orjson(value), default=str, option=orjson.OPT_SERIALIZE_NUMPY)
