"""Files of Arrow and Parquet, opened; and rows of what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from datatrove.io import DataFolder

from datatrove_ckpt import retrying
from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.hub_messages import naming_hub_input

if TYPE_CHECKING:
    import pyarrow as pa

Numbers: TypeAlias = npt.NDArray[np.int64]


def opened(folder: DataFolder, name: str) -> IO[bytes]:
    """The file, whose reads are repeated if it is a remote one."""
    with naming_hub_input(folder, name):
        if folder.is_local():
            return cast("IO[bytes]", folder.open(name, "rb"))
        file: Any = retrying.READING.run(lambda: folder.open(name, "rb"), name)
        return cast("IO[bytes]", RetryingFile(file, name))


_FILE_MARK, _STREAM_MARK = b"ARROW1", b"\xff\xff\xff\xff"


def map_or_open(folder: DataFolder, name: str) -> Any:
    """A local file as memory, or a remote one whose reads are repeated."""
    import pyarrow as pa

    return pa.memory_map(folder.resolve_paths(name)) if folder.is_local() else opened(folder, name)


def is_stream(file: IO[bytes], name: str, stream: bool) -> bool:
    """Whether an opened file is an Arrow stream, as ``datasets`` writes it, and not a file with a table of contents.

    Args:
        stream: what the reader was told. It decides for the streams of old releases of Arrow, which have no mark.

    Raises:
        InputError: the file is neither.
    """
    begin = file.read(len(_FILE_MARK))
    file.seek(0)
    if begin[:4] == _STREAM_MARK or (stream and begin != _FILE_MARK):
        return True
    if begin and not _FILE_MARK.startswith(begin):
        raise InputError(
            f"The input file {name!r} is no Arrow file: it begins with {begin!r}. If it was one, replace it by a "
            'complete copy; else move it out of the input, or start with glob_pattern="*.arrow". Then run the same '
            "command again."
        )
    return False


_Rows = TypeVar("_Rows", "pa.Table", "pa.RecordBatch")


def take_rows(table: _Rows, rows: Sequence[int] | Numbers) -> _Rows:
    """The rows with these numbers. pyarrow does not take values of each type, as string views; this does."""
    import pyarrow as pa

    numbers = np.asarray(rows, dtype=np.int64)
    try:
        return table.take(pa.array(numbers))
    except pa.ArrowNotImplementedError:
        columns = [one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one for one in table.columns]
        return type(table).from_arrays([take_values(column, numbers) for column in columns], schema=table.schema)


def take_values(chunk: Any, rows: Numbers) -> Any:
    import pyarrow as pa

    try:
        return chunk.take(pa.array(rows))
    except pa.ArrowNotImplementedError:  # string views, run-end encoding
        return pa.array([chunk[row].as_py() for row in rows.tolist()], chunk.type)


class RetryingFile:
    """A remote file opened for reading, whose reads are repeated."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def read(self, size: int = -1) -> bytes:
        return bytes(retrying.READING.run(lambda: self._file.read(size), self._name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
