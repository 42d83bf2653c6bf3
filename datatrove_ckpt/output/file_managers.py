"""StagedFiles replaces datatrove's file manager in a writer, and decides when files appear.

Unlike datatrove's manager, it can abandon incomplete files. Bytes depend on the documents only:
the gzip header has no time.
"""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import fsspec.compression
import fsspec.utils
from datatrove.io import OutputFileManager

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.common.formatting import missing_package
from datatrove_ckpt.errors import OutputFailed


def missing_codec(compression: str | None, filename: str) -> str | None:
    if compression == "infer" and filename.endswith(".zst"):
        compression = "zstd"
    elif compression == "infer":
        compression = fsspec.utils.infer_compression(filename)
    if compression in fsspec.compression.compr:
        return None
    if compression == "zstd":
        return missing_package("zstandard")
    return f"{compression!r} is not available here."


class StagedFiles(OutputFileManager):  # type: ignore[misc]
    """Writes files below a staging folder, and hashes them.

    Attributes:
        last: the file that a writer requested last, to write a row.
    """

    last: OutputStream

    def __init__(self, folder: Path, original: OutputFileManager) -> None:
        super().__init__(original.fs, original.mode, original.compression)
        self.finished: dict[str, files.HashedFile] = {}
        self.folder = folder

    def get_file(self, filename: str) -> OutputStream:
        if filename not in self._output_files:
            self._output_files[filename] = self._create(filename)
        self.last = self._output_files[filename]
        return self.last

    def _create(self, filename: str) -> OutputStream:
        if filename in self.finished:
            raise OutputFailed(
                f"{filename} was closed: writing to it again would lose its content."
            )
        path = self.folder / filename
        files.disk.make_dirs(path.parent)
        if path.exists():
            raise OutputFailed(
                f"{filename} and another name of this chunk are one file here, as the file "
                "system ignores case or Unicode's forms. Give other names, or choose another "
                "output_filename or file system."
            )
        return OutputStream(path, filename, self)

    def abandon(self) -> None:
        for stream in self._output_files.values():
            stream.abandon()
        self._output_files.clear()

    def discard(self) -> None:
        self.abandon()
        self.finished.clear()
        files.disk.remove_tree(self.folder)


class OutputStream:
    """An open file for a writer: binary or text, compressed or not."""

    def __init__(self, path: Path, filename: str, manager: StagedFiles) -> None:
        self._file = files.HashedFile(path)
        self._filename = filename
        self._manager = manager
        self._buffered = io.BufferedWriter(self._file, 1 << 20)
        compressed = _compressed(self._buffered, filename, manager.compression)
        # Any: binary or text, depending on the writer's mode.
        self._stream: Any = compressed
        if "b" not in manager.mode:
            self._stream = io.TextIOWrapper(compressed, encoding="utf-8", newline="\n")

    def write(self, data: object) -> None:
        self._stream.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def count_row(self) -> None:
        self._file.rows += 1

    def close(self) -> None:
        if self._filename in self._manager.finished:
            return
        self._stream.close()
        if not self._buffered.closed:  # gzip and zstd do not close the stream below them
            self._buffered.close()
        files.disk.sync(self._file.path)
        self._manager.finished[self._filename] = self._file

    def abandon(self) -> None:
        """The descriptor is closed first, so that no buffered bytes reach it."""
        self._file.close()
        self._stream = io.BytesIO()  # for pyarrow's writer, which ends when it is collected


def _compressed(
    file: io.BufferedIOBase, filename: str, compression: str | None
) -> io.BufferedIOBase:
    if compression == "infer":
        compression = fsspec.utils.infer_compression(filename)
    if compression is None:
        return file
    if compression == "gzip":
        return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
    stream: io.BufferedIOBase = fsspec.compression.compr[compression](file, mode="wb")
    return stream
