"""JSONL: plain files by byte offset, compressed ones by decompressing what was read without parsing it.

Files are read as bytes, 1 MiB and the rest of its last line at a time. Lines end as in datatrove's text mode, at
``\\n``, ``\\r\\n`` or a lone ``\\r``. ``bytes.splitlines`` knows these three, but not the Unicode line ends that
``str.splitlines`` knows. All lines are counted, also blank and damaged ones, because the number is the default id.

A ``FilePosition`` is (offset after the line, lines so far, offset of the line, hash of the line). Only the last line is
hashed, while it is in the processor's cache. Together with the file's beginning the hash shows whether a file that grew
is unchanged up to the position.

No index is used for gzip or zstd. A state is too small for one, and an index beside the input would have to be written,
found and trusted. Decompressing costs 9 s of CPU per million documents of 2 kB for gzip (3 s if ``isal`` is installed,
which fsspec then uses) and 1 s for zstd. It runs while the server starts, which takes longer.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import IO, ClassVar, Literal, cast

import orjson
from datatrove.data import Document
from datatrove.io import DataFileLike, DataFolderLike
from datatrove.pipeline.readers import jsonl as datatrove_jsonl
from fsspec.compression import compr
from fsspec.utils import infer_compression
from loguru import logger
from xxhash import xxh3_64_intdigest

from datatrove_ckpt.errors import CheckpointMismatch, DocumentError
from datatrove_ckpt.readers.base import Adapter, ReadResult, Row, RowShard, SeekingReader, permutation
from datatrove_ckpt.readers.inputs import REMEDY
from datatrove_ckpt.readers.positions import PLAIN_INTEGER, FilePosition

_BLOCK = 2**20


class DamagedLine(DocumentError):
    """A line of a JSONL file holds no document, and ``stop_on_bad_line`` is set."""


class JsonlReader(SeekingReader, datatrove_jsonl.JsonlReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``JsonlReader``, with a position on each document.

    Args:
        shuffle_seed: read files, blocks of about 1 MiB, and the lines in a block in an order that depends on this
            number. Blocks of compressed files keep their order.
        stop_on_bad_line: raise ``DamagedLine`` if a line cannot be parsed, instead of counting it (``damaged_lines``
            in the stats) with a warning.
        The others are datatrove's.
    """

    _format: ClassVar[str] = "jsonl"
    _order_options: ClassVar[tuple[str, ...]] = (*SeekingReader._order_options, "compression")

    def __init__(
        self,
        data_folder: DataFolderLike,
        paths_file: DataFileLike | None = None,
        compression: Literal["infer", "gzip", "zstd"] | None = "infer",
        limit: int = -1,
        skip: int = 0,
        file_progress: bool = False,
        doc_progress: bool = False,
        adapter: Adapter | None = None,
        text_key: str = "text",
        id_key: str = "id",
        default_metadata: Row | None = None,
        recursive: bool = True,
        glob_pattern: str | None = None,
        shuffle_files: bool = False,
        add_file_path: bool = True,
        shuffle_seed: int | None = None,
        stop_on_bad_line: bool = False,
    ) -> None:
        super().__init__(
            data_folder,
            paths_file,
            compression,
            limit,
            skip,
            file_progress,
            doc_progress,
            adapter,
            text_key,
            id_key,
            default_metadata,
            recursive,
            glob_pattern,
            shuffle_files,
            add_file_path,
        )
        self._set_shuffle(shuffle_files, shuffle_seed)
        self.stop_on_bad_line = stop_on_bad_line

    def _read(self, name: str, size: int, file_position: FilePosition, row_shard: RowShard) -> Iterator[ReadResult]:
        if self.shuffle_seed is None:
            return self._read_in_order(name, file_position, row_shard)
        if self._codec(name) is None:
            return self._read_shuffled(name, size, file_position, row_shard, self.shuffle_seed)
        return self._read_shuffled_compressed(name, file_position, row_shard, self.shuffle_seed)

    def _read_in_order(self, name: str, file_position: FilePosition, row_shard: RowShard) -> Iterator[ReadResult]:
        offset, number = file_position[:2] if file_position else (0, 0)
        index, count = row_shard
        with self._open(name, offset) as file:
            if offset and self._codec(name) is None:
                offset += _skip_late_line_end(file, offset)
            for lines in _line_blocks(file):
                for line in lines:
                    start = offset
                    offset += len(line)
                    number += 1
                    if count > 1 and (number - 1) % count != index:
                        continue
                    document = self._parse(line, name, number - 1)
                    if document is not None:
                        yield document, (offset, number, start, xxh3_64_intdigest(line))

    def _read_shuffled(
        self, name: str, size: int, file_position: FilePosition, row_shard: RowShard, seed: int
    ) -> Iterator[ReadResult]:
        """Plain files. A position is (blocks started, lines yielded of the last of them)."""
        blocks_started, lines_done = file_position or (1, 0)
        order = permutation(-(-size // _BLOCK), seed, name)
        with self._open(name, 0) as file:
            for turn in range(blocks_started - 1, len(order)):
                start, lines = _block(file, order[turn])
                key = (seed, order[turn])
                for document, after in self._shuffle_lines(lines, name, start, key, lines_done, row_shard):
                    yield document, (turn + 1, after)
                lines_done = 0

    def _read_shuffled_compressed(
        self, name: str, file_position: FilePosition, row_shard: RowShard, seed: int
    ) -> Iterator[ReadResult]:
        """Compressed files. A position is (offset of the block, lines yielded of it).

        Where a block starts alone decides which lines are in it, so resuming at its start finds the same lines.
        """
        offset, lines_done = file_position or (0, 0)
        with self._open(name, offset) as file:
            for lines in _line_blocks(file):
                key = (seed, offset)
                for document, after in self._shuffle_lines(lines, name, offset, key, lines_done, row_shard):
                    yield document, (offset, after)
                offset += sum(map(len, lines))
                lines_done = 0

    def _shuffle_lines(
        self, lines: list[bytes], name: str, start: int, key: tuple[int, int], lines_done: int, row_shard: RowShard
    ) -> Iterator[tuple[Document, int]]:
        """The block's documents in shuffled order, each with the number of lines that are done then."""
        offsets = list(accumulate(map(len, lines), initial=start))
        order = permutation(len(lines), key[0], name, key[1])
        index, count = row_shard
        for turn in range(lines_done, len(order)):
            line = order[turn]
            if count > 1 and (start + line) % count != index:
                continue
            document = self._parse(lines[line], name, f"@{offsets[line]}")
            if document is not None:
                yield document, turn + 1

    def _parse(self, line: bytes, name: str, id_in_file: int | str) -> Document | None:
        with self.track_time():
            try:
                data = orjson.loads(line)
                if not isinstance(data, dict):
                    self._damaged(name, id_in_file, f"{type(data).__name__} instead of an object")
                    return None
                for media in data.get("media", []):
                    if media["media_bytes"] is not None:
                        media["media_bytes"] = base64.decodebytes(media["media_bytes"].encode("ascii"))
                return self.get_document_from_dict(data, name, id_in_file)
            except (EOFError, orjson.JSONDecodeError) as error:
                if line.strip():
                    self._damaged(name, id_in_file, error)
                return None

    def _damaged(self, name: str, id_in_file: int | str, error: object) -> None:
        self.stat_update("damaged_lines")
        where = f"line {id_in_file + 1}" if isinstance(id_in_file, int) else f"the line at byte {id_in_file[1:]}"
        if self.stop_on_bad_line:
            raise DamagedLine(
                f"`{name}`, {where}: {error}. Fix or remove the line, or set stop_on_bad_line to false to count such "
                "lines and continue."
            )
        logger.warning(f"Error when reading `{name}`, {where}: {error}")

    # Files ---------------------------------------------------------------------------------------------------------

    def _codec(self, name: str) -> str | None:
        codec: str | None = infer_compression(name) if self.compression == "infer" else self.compression
        return codec

    @contextmanager
    def _open(self, name: str, offset: int) -> Iterator[IO[bytes]]:
        """The decompressed file, from ``offset`` on."""
        codec = self._codec(name)
        with ExitStack() as stack:
            file = stack.enter_context(self.data_folder.open(name, "rb", compression=None))
            if codec is None:
                file.seek(offset)
            else:
                # Decompressors may return less than requested, and not all have a readline().
                file = stack.enter_context(io.BufferedReader(_decompressed(file, codec), _BLOCK))
                while offset:
                    skipped = len(file.read(min(offset, _BLOCK)))
                    if not skipped:
                        raise CheckpointMismatch(f"The input file {name!r} ends before the saved position. {REMEDY}")
                    offset -= skipped
            yield file

    def _may_grow(self, name: str) -> bool:
        # Growth would reorder all shuffled blocks, and compressed data does not end at a line's end.
        return self.shuffle_seed is None and self._codec(name) is None

    def _check_grown(self, name: str, size: int, file_position: FilePosition) -> None:
        offset, _, start, line_hash = file_position
        if size < offset:
            raise CheckpointMismatch(f"The input file {name!r} had {offset} bytes or more, and has {size}. {REMEDY}")
        line = self.data_folder.cat_file(name, start=start, end=offset)
        if xxh3_64_intdigest(line) & PLAIN_INTEGER != line_hash:
            raise CheckpointMismatch(
                f"The input file {name!r} has changed before byte {offset}, the saved position. {REMEDY}"
            )
        continued = (
            b"" if line.endswith((b"\n", b"\r")) else self.data_folder.cat_file(name, start=offset, end=offset + 1)
        )
        if continued not in (b"", b"\n", b"\r"):
            raise CheckpointMismatch(
                f"The line of the input file {name!r} that starts at byte {start} was the last one when it was read, "
                f"and has grown. {REMEDY}"
            )


def _decompressed(file: IO[bytes], codec: str) -> io.RawIOBase:
    if codec == "zstd":
        try:
            from zstandard import ZstdDecompressor
        except ImportError:
            pass  # fsspec knows other packages
        else:
            # fsspec's own call would silently end after the first frame.
            return cast("io.RawIOBase", ZstdDecompressor().stream_reader(file, read_across_frames=True))
    if codec not in compr:
        raise ValueError(f"Compression type {codec} is not available: its library is not installed.")
    return cast("io.RawIOBase", compr[codec](file, mode="r"))


def _line_blocks(file: IO[bytes]) -> Iterator[list[bytes]]:
    while block := file.read(_BLOCK):
        if not block.endswith(b"\n"):
            block += file.readline()
        yield block.splitlines(keepends=True)


def _block(file: IO[bytes], number: int) -> tuple[int, list[bytes]]:
    """The lines that start in the ``number``-th block of the file, and the offset of the first one."""
    start = max(number * _BLOCK - 1, 0)  # one byte earlier, which shows whether a line starts with the block
    file.seek(start)
    block = file.read((number + 1) * _BLOCK - start)
    if number:
        head = block.find(b"\n") + 1
        start, block = start + head, block[head:] if head else b""
    if block and not block.endswith(b"\n"):
        block += file.readline()
    return start, block.splitlines(keepends=True)


def _skip_late_line_end(file: IO[bytes], offset: int) -> int:
    """Skips the end of a line that had none when it was read as the last one. Returns the length of the line end."""
    file.seek(offset - 1)
    last, following = file.read(1), file.read(2)
    length = 0
    if last != b"\n" and following[:1] == b"\n":
        length = 1
    elif last not in (b"\n", b"\r") and following[:1] == b"\r":
        length = 2 if following == b"\r\n" else 1
    file.seek(offset + length)
    return length
