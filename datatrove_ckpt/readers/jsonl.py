r"""Reads JSONL: seeks in plain files by byte offset, in compressed files by decompressing to it.

Files are read as bytes, 1 MiB and the rest of its last line at a time. ``bytes.splitlines`` splits
as datatrove's text mode does: at ``\n``, ``\r\n`` or a lone ``\r``. All lines are counted, also
blank and damaged ones, because the number is the default id.

A ``FilePosition`` is (offset after the line, lines so far, offset of the line, hash, 1). The hash
covers the last line and the file's first 64 kB as far as they come before the position, so later
lines may be corrected.

There is no index for gzip or zstd, because skipping takes seconds, while the server starts.
"""

from __future__ import annotations

import base64
import codecs
import copy
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from itertools import islice
from typing import IO, Any, Self

import numpy as np
import orjson
from datatrove.data import Document
from datatrove.io import DataFolderLike
from datatrove.pipeline.readers import jsonl as datatrove_jsonl
from loguru import logger
from xxhash import xxh3_64, xxh3_64_intdigest

from datatrove_ckpt.common.exact_json import loads, loads_all
from datatrove_ckpt.errors import ConfigError, DocumentNotSerializable
from datatrove_ckpt.readers.base import DamagedLine, TextFilesReader
from datatrove_ckpt.readers.block_file import BlockFile, FileIndex, Group, changed_error
from datatrove_ckpt.readers.compressed import DecompressedFile, likely_encoding, naming_damage
from datatrove_ckpt.readers.empty_input import MAX_LINE_BYTES, read_line, refuse_array
from datatrove_ckpt.readers.inputs import (
    PLAIN_INTEGER,
    BadRow,
    FilePosition,
    FileProgress,
    PositionedDocument,
    ReadRow,
    Row,
    RowBlock,
    file_error,
    list_input,
    position_mismatch,
    refuse_pointer,
)

PART_BYTES = 2**20
"""The size of a part, up to the rest of its last line. Counts depend on it."""
_SKIP_BYTES = 2**20
_HEAD = 2**16


class JsonlReader(TextFilesReader, datatrove_jsonl.JsonlReader):  # type: ignore[misc, unused-ignore]
    """datatrove's ``JsonlReader``, with its arguments and a position on each document.

    Args:
        shuffle_seed: shuffles the files by this number; ``shuffle_files`` is refused.
        path_columns: folders such as ``lang=en`` are columns.
        max_skipped: how many lines of a task may be left out because they cannot be read. One more
            stops the task (``DamagedLine``). None: any number.
        encoding: encoding of the files, if it is not UTF-8, such as windows-1252.
        types: types of columns, by Arrow's names, such as ``{score: float64, day: date32}``: values
            are converted, and Parquet output has these types. A line with a value that cannot be
            converted counts as a line that cannot be read.
        stop_on_bad_line: true for a training, which else leaves such lines out. False is
            deprecated: write ``max_skipped: null``.
    """

    format = "jsonl"
    suffixes = ".jsonl .json .ndjson"
    grows = True

    def __new__(cls, *arguments: object, **options: object) -> Self:
        # datatrove reads the metadata of all installed packages to find orjson, which takes time.
        return object.__new__(cls)

    def __init__(
        self,
        data_folder: DataFolderLike,
        *arguments: object,
        stop_on_bad_line: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(data_folder, *arguments, **options)
        self.stop_on_bad_line = stop_on_bad_line
        if stop_on_bad_line is False:
            logger.warning("stop_on_bad_line: false is deprecated. Write max_skipped: null.")
            self.max_skipped = None

    def blocks(self, name: str, file_position: FilePosition) -> Iterator[RowBlock]:
        return self.open_file(name).blocks(file_position, self._file_extent)

    def parse_row(self, line: bytes, name: str) -> Row | BadRow | None:
        try:
            data = loads(line)
            if type(data) is dict and "media" not in data:
                return data
        except orjson.JSONDecodeError as error:
            if not line.strip():
                return None
            if line.startswith(codecs.BOM_UTF8):  # of the file, or of an appended file
                return self.parse_row(line.removeprefix(codecs.BOM_UTF8), name)
            refuse_pointer(line, name)
            if _opens_array(line.strip()):  # else each line except the last would be damaged
                refuse_array(self, name)
            problem = str(error)
            if line.strip() == b"{":
                problem = _SPREAD
            elif "UTF-8" in problem:
                problem += f". Set encoding: {likely_encoding(line)} or another"
            return BadRow(problem, line[:60].decode(errors="replace").rstrip())
        if not isinstance(data, dict):
            if _holds_objects(data):  # else a whole file would be one damaged line
                refuse_array(self, name)
            return BadRow(f"{type(data).__name__}, not an object")
        try:
            if isinstance(data.get("media"), list):
                _decode_media(data["media"])
        except DocumentNotSerializable as error:
            return BadRow(error)
        return data

    def open_file(self, name: str) -> LineBlocks:
        return LineBlocks(self, name)

    def _check_read_part(self, name: str, file_position: FilePosition) -> None:
        self.open_file(name).check(file_position)


_SPREAD = "write each object on one line (jq -c . FILE)"


def _decode_media(media: Any) -> None:
    """Decodes base64, and leaves other values to the adapter."""
    for entry in media:
        if isinstance(entry, dict) and isinstance(entry.get("media_bytes"), str):
            try:
                entry["media_bytes"] = base64.decodebytes(entry["media_bytes"].encode("ascii"))
            except ValueError as error:
                raise DocumentNotSerializable(f"media_bytes is no base64: {error}") from None


def _holds_objects(data: object) -> bool:
    return isinstance(data, list) and any(isinstance(element, dict) for element in data)


def _opens_array(line: bytes) -> bool:
    """Whether a line begins an array. The rest of a torn line does not: it may be skipped."""
    if not line.startswith(b"["):
        return False
    try:
        return line == b"[" or _holds_objects(orjson.loads(line.removesuffix(b",") + b"]"))
    except orjson.JSONDecodeError:
        return False


def _read_exactly(file: IO[bytes], count: int, name: str) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise position_mismatch(f"The input file {name!r} ends before the saved position.")
    return data


def _read_parts(file: IO[bytes], name: str) -> Iterator[bytes]:
    """Yields parts that end with a line, or the file."""
    while part := file.read(PART_BYTES):
        if not part.endswith(b"\n"):
            line_end = read_line(file)
            if len(line_end) >= MAX_LINE_BYTES:
                problem = f"has a line of more than {MAX_LINE_BYTES} bytes"
                advice = "Replace it by a complete copy, or move it away"
                raise file_error(name, problem, advice)
            part += line_end
        yield part


def _line_blocks(file: IO[bytes], name: str) -> Iterator[tuple[list[bytes], int]]:
    unfinished = b""
    for part in _read_parts(file, name):
        data = unfinished + part
        lines = _with_ends(data)
        unfinished = b""
        if not part.endswith(b"\n"):  # another process may be writing the line
            unfinished = lines.pop()
        yield lines, len(data) - len(unfinished)
    if unfinished:
        yield [unfinished], len(unfinished)


def _with_ends(data: bytes) -> list[bytes]:
    if data.find(b"\r") < 0:
        return io.BytesIO(data).readlines()  # ten times as fast, but only for line feeds
    return data.splitlines(keepends=True)


def _read_late_line_end(file: IO[bytes], offset: int) -> bytes:
    """Reads the rest of a line end that was written late."""
    file.seek(offset - 1)
    late = re.match(rb"[^\n](\n)|[^\r\n](\r\n?)", file.read(3))
    line_end = b""
    if late:
        line_end = late[0][1:]
    file.seek(offset + len(line_end))
    return line_end


class LineBlocks(BlockFile):
    """Parts of about 1 MiB of whole lines. The lines are counted once, and read again from the
    recorded offsets. A row is a line that is not blank, even if it is damaged, which only parsing
    shows. A compressed file stays open, so parts in order are decompressed once.
    """

    def __init__(self, reader: JsonlReader, name: str) -> None:
        self.name = name
        self._reader = reader
        self._open = partial(reader.open, name)
        self._is_plain = reader._may_grow(name)
        self._stack = ExitStack()
        self._file: IO[bytes] | None = None
        self._offset = 0
        self._loaded: tuple[int, list[bytes]] = (-1, [])
        self._loaded_bytes = b""

    def blocks(self, file_position: FilePosition, extent: FileProgress) -> Iterator[RowBlock]:
        offset, number = file_position[:2] or (0, 0)
        if self._is_plain:
            extent.per = 1.0
        with self._open() as file:
            head = xxh3_64(self._skip(file, offset))
            if offset and self._is_plain:
                late_line_end = _read_late_line_end(file, offset)
                head.update(late_line_end[: max(0, _HEAD - offset)])
                offset += len(late_line_end)
            for lines, size in _line_blocks(file, self.name):
                if isinstance(file, DecompressedFile):
                    extent.per = file.stored.tell() / max(1, offset + size)
                yield RowBlock("line {}", self._read_rows(lines, offset, number, head))
                offset += size
                number += len(lines)
        if self._is_plain:
            extent.end = offset

    def _read_rows(
        self, lines: list[bytes], offset: int, number: int, head: xxh3_64
    ) -> Iterator[ReadRow]:
        parse_row = self._reader.parse_row
        name = self.name
        head_hash = head.intdigest()
        for line in lines:
            start = offset
            offset += len(line)
            number += 1
            if start < _HEAD:
                head.update(line[: _HEAD - start])
                head_hash = head.intdigest()
            row = parse_row(line, name)
            if row is not None:
                after = (offset, number, start, xxh3_64_intdigest(line, head_hash), 1)
                yield row, number - 1, after, number

    def check(self, file_position: FilePosition) -> None:
        offset, _, start, line_hash, _ = file_position
        with self._open() as file:
            head = self._skip(file, start)
            line = _read_exactly(file, offset - start, self.name)
            head += line[: max(0, _HEAD - start)]
            following = b""
            if not line.endswith((b"\n", b"\r")):
                following = file.read(1)
        if xxh3_64_intdigest(line, xxh3_64_intdigest(head)) & PLAIN_INTEGER != line_hash:
            raise position_mismatch(
                f"The input file {self.name!r} has changed before byte {offset}, the saved "
                "position."
            )
        if following and not (self._is_plain and following in b"\n\r"):
            raise position_mismatch(
                f"The line of the input file {self.name!r} at byte {start}, the last one when it "
                "was read, has grown."
            )

    def _skip(self, file: IO[bytes], offset: int) -> bytes:
        """Skips the content before ``offset``, and returns at most its first 64 kB."""
        folder = self._reader.data_folder
        if self._is_plain and offset > _HEAD and not folder.is_local():
            # A remote file would download a block at its beginning, 50 MB on S3.
            file.seek(offset)
            return bytes(folder.cat_file(self.name, start=0, end=_HEAD))
        head = _read_exactly(file, min(offset, _HEAD), self.name)
        if self._is_plain:
            file.seek(offset)
            return head
        remaining = offset - len(head)
        while remaining > 0:
            remaining -= len(_read_exactly(file, min(remaining, _SKIP_BYTES), self.name))
        return head

    def index(self) -> FileIndex:
        groups = []
        start = 0
        with self._open() as file:
            for part in _read_parts(file, self.name):
                groups.append(Group(_count_lines(part), len(part), start))
                start += len(part)
        return FileIndex(tuple(groups), sequential=not self._is_plain)

    def read(self, first: int, rows: int, columns: Sequence[str] | None = None) -> list[Row | None]:
        number, start = self.part_of(first)
        if self._loaded[0] != number:
            with nullcontext() if self._is_plain else naming_damage(self.name):
                self._loaded = (number, self._load(number))
        lines = self._loaded[1][start : start + rows]
        read: list[Any] = [None] * len(lines)
        with suppress(orjson.JSONDecodeError):
            read = loads_all(lines)
        return [
            row if type(row) is dict and "media" not in row else self._row(line, number)
            for row, line in zip(read, lines, strict=True)
        ]

    def close(self) -> None:
        self._stack.close()
        self._file = None
        self._loaded = (-1, [])
        self._loaded_bytes = b""

    def _load(self, number: int) -> list[bytes]:
        group = self.groups[number]
        if self._file is None or (group.start < self._offset and not self._is_plain):
            self.close()
            self._file = self._stack.enter_context(self._open())
            self._offset = 0
        if self._is_plain:
            self._file.seek(group.start)
        else:
            while self._offset < group.start:
                skipped = len(self._file.read(min(_SKIP_BYTES, group.start - self._offset)))
                if not skipped:
                    raise changed_error(self.name)
                self._offset += skipped
        part = self._file.read(group.bytes)
        self._offset = group.start + len(part)
        self._loaded_bytes = part
        lines = _split(part)
        # A line end that has moved across the end of the part is also a change.
        is_whole = part.endswith(b"\n") or number == len(self.groups) - 1
        if len(part) != group.bytes or len(lines) != group.rows or not is_whole:
            raise changed_error(self.name)
        return lines

    def _row(self, line: bytes, number: int) -> Row | None:
        parsed = self._reader.parse_row(line, self.name)
        if not isinstance(parsed, BadRow):
            return parsed
        offset = self.groups[number].start + self._loaded_bytes.find(line)
        self._reader.skip_damaged(self.name, f"the line at byte {offset}", parsed, in_training=True)
        return None


def _count_lines(part: bytes) -> int:
    """Splits only the few parts with blank lines or carriage returns."""
    data = np.frombuffer(part, dtype=np.uint8)
    firsts = data[np.flatnonzero(data[:-1] == ord("\n")) + 1]
    if b"\r" in part or data[0] <= ord(" ") or (firsts <= ord(" ")).any():
        return len(_split(part))
    return len(firsts) + 1


def _split(part: bytes) -> list[bytes]:
    return [line for line in part.splitlines() if line and not line.isspace()]


# batch files of OpenAI's form: each line is a request ---------------------------------------------
# {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}


_URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    *(f"{prefix}/{name}" for name in ("classify", "rerank", "score") for prefix in ("", "/v1")),
    "/v2/rerank",
)
# Checking so many lines takes a second and 10 MB; OpenAI accepts 50,000 in a file.
_CHECKED_LINES = 100_000


class BatchReader(JsonlReader):
    """Reads a request from each line, as a document: its id is the ``custom_id``, its text the
    ``body``, and its metadata has the ``url``.

    A line that is no request becomes a document with a ``problem`` in its metadata, and appears in
    the output.
    """

    format = JsonlReader.format
    suffixes = ""

    def __init__(
        self,
        data_folder: DataFolderLike,
        *arguments: object,
        max_skipped: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(data_folder, *arguments, max_skipped=max_skipped, **options)

    def check(self) -> None:
        """Checks the first 100,000 lines of all files together.

        Raises:
            ConfigError: a line is no request, or has the ``custom_id`` of an earlier line.
        """
        strict = copy.deepcopy(self)
        strict.max_skipped = 0
        remaining = _CHECKED_LINES
        earlier = set[str]()
        for name in list_input(self).names:
            try:
                requests = strict.documents_of(name, strict.blocks(name, ()))
                for request, position in islice(requests, remaining):
                    remaining -= 1
                    custom_id = getattr(request, "id", "")
                    if custom_id in earlier:
                        raise ConfigError(
                            f"`{name}`, line {position[1]}: an earlier line also has the "
                            f"custom_id {custom_id!r}. Correct or remove one."
                        )
                    earlier.add(custom_id)
            except DamagedLine as error:
                raise ConfigError(f"The input seems to be a batch file: {error}") from None

    def get_document_from_dict(
        self, data: Row, source_file: str, id_in_file: int | str
    ) -> Document:
        name = data.get("custom_id")
        text = ""
        problem = _problem(data)
        if not problem:
            try:
                text = orjson.dumps(data["body"]).decode()
            except TypeError as error:
                problem = f"its body cannot be sent: {error}"
        if problem:
            line = f"line {int(id_in_file) + 1}"
            document = self.skip_damaged(source_file, line, BadRow(problem))
            document.metadata["custom_id"] = name
            return document
        return PositionedDocument(text, name, metadata={"url": _url_of(data)})

    def skip_damaged(
        self, file: str, where: str, bad: BadRow, in_training: bool = False
    ) -> Document:
        super().skip_damaged(file, where, bad, in_training)
        problem = f"`{file}`, {where}: {bad.error}"
        return PositionedDocument(
            problem, problem, metadata={"problem": problem, "custom_id": None}
        )


def _url_of(data: Row) -> object:
    """Azure's batch files omit /v1."""
    url = data.get("url")
    if url not in _URLS and f"/v1{url}" in _URLS:
        return f"/v1{url}"
    return url


def _problem(data: Row) -> str:
    body = data.get("body")
    if not isinstance(data.get("custom_id"), str) or not data["custom_id"]:
        return "it has no custom_id that is a text"
    if data.get("method", "POST") != "POST":
        return f"its method is {data['method']!r}, not POST"
    if "params" in data:
        return "it has Anthropic's params: write OpenAI's url and body"
    if _url_of(data) not in _URLS:
        return f"its url is {data.get('url')!r}, and not one of {', '.join(_URLS)}"
    if not isinstance(body, dict) or not body:
        return "its body is no object with keys"
    if extras := {"extra_body", "extra_headers", "extra_query"} & body.keys():
        return (
            f"its body has {min(extras)}, for OpenAI's client: write the keys of extra_body into "
            "the body, and remove the others"
        )
    if body.get("stream"):
        return "its body requests a stream: remove stream"
    return ""
