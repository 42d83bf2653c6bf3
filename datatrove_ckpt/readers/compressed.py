"""Opens compressed files as streams of bytes, with errors that name a damaged or cut-off file.

The libraries' files for zstd, bz2 and xz end without an error at a stream that they cannot read,
and xz at the padding between two streams. So their streams are decompressed here.

Of some files, earlier releases read only the beginning: an xz file up to the padding between its
streams, the first file of a zip, the first page of a TIFF. The rest of such a file would move all
later documents, so a run that began with an earlier release is refused. States and records of runs
that began later have the option ``whole``.
"""

import bz2
import codecs
import gzip
import io
import lzma
import shlex
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import PurePosixPath
from typing import IO, Any, cast

from datatrove.io import DataFolder, DataFolderLike, get_datafolder
from fsspec.compression import compr
from fsspec.utils import infer_compression

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.pictures import tiff_pages
from datatrove_ckpt.errors import CheckpointMismatch, ConfigError
from datatrove_ckpt.readers.inputs import file_error, naming_hub_input

# Without the library, fsspec would read such a file as text.
_CODECS_BY_SUFFIX = {".zst": "zstd", ".lz4": "lz4"}
_PACKAGES = {"zstd": "'datatrove-ckpt[zstd]'", "lz4": "lz4", "snappy": "python-snappy"}
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile)
_LIBRARIES = {"zstandard", "igzip_lib", "backports", "compression", "lz4", "snappy", "pyarrow"}
WHOLE = "whole"
_PADDED_STREAM = b"\0\0\0\0\xfd7zXZ\0"


def codec_of(name: str, compression: str | None) -> str | None:
    if compression != "infer":
        return compression
    codec = infer_compression(name)
    return codec or _CODECS_BY_SUFFIX.get(PurePosixPath(name).suffix)


def uncompressed(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if codec_of(name, "infer"):
        return path.with_suffix("")
    return path


def _decompressed(file: IO[bytes], codec: str, name: str) -> io.RawIOBase:
    if codec == "zip":
        return _only_file(file, name)
    if codec == "bz2":
        return _StreamFile(file, bz2.BZ2Decompressor)
    if codec in ("xz", "lzma"):
        return _StreamFile(file, lzma.LZMADecompressor, padding=b"\0")
    if codec == "zstd":
        try:
            import zstandard
        except ImportError:
            pass
        else:
            # As `zstd --long=31` writes.
            decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
            return _StreamFile(file, decompressor.decompressobj)
    if codec not in compr:
        install = "install its library"
        if codec in _PACKAGES:
            install = f"pip install {_PACKAGES[codec]}"
        raise ConfigError(
            f"The input file {name!r} is compressed with {codec}, which this Python cannot read: "
            f"{install}."
        )
    return cast("io.RawIOBase", compr[codec](file, mode="r"))


@contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Turns errors of a decompressor or pyarrow into an error that names the file."""
    try:
        yield
    except Exception as error:
        # pyarrow also raises a plain OSError. An OSError of the operating system has an errno.
        is_plain = type(error) is OSError and error.errno is None
        library = type(error).__module__.partition(".")[0]
        if not (is_plain or isinstance(error, _DAMAGE) or library in _LIBRARIES):
            raise
        if "crypt" in str(error):
            raise file_error(name, f"is encrypted: {error}", "Write it decrypted") from error
        advice = "Replace it by a complete copy, or correct its suffix"
        raise file_error(name, f"is damaged or cut off: {error}", advice) from error


class DecompressedFile(io.BufferedReader):
    def __init__(self, content: io.RawIOBase, stored: IO[bytes]) -> None:
        super().__init__(content, 2**16)  # bytes that are read ahead count as read
        self.stored = stored


def likely_encoding(begin: bytes) -> str:
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    return "windows-1252"


@contextmanager
def open_content(
    folder: DataFolder, name: str, compression: str | None, encoding: str | None = None
) -> Iterator[IO[bytes]]:
    """Opens an input file, decompressed, and as UTF-8 if it has another ``encoding``.

    Raises:
        InputError: the file is damaged, or has another encoding.
    """
    codec = codec_of(name, compression)
    with ExitStack() as stack:
        stack.enter_context(naming_hub_input(folder, name, missing=False))
        file = stack.enter_context(folder.open(name, "rb", compression=None))
        if codec is not None and file.read(1):
            file.seek(0)
            stack.enter_context(naming_damage(name))
            # Decompressors may return less than requested, and may lack readline().
            file = stack.enter_context(DecompressedFile(_decompressed(file, codec, name), file))
        if encoding is not None:
            recoded = _RecodedFile(file, encoding)
            file = stack.enter_context(DecompressedFile(recoded, getattr(file, "stored", file)))
        try:
            yield file  # a file of 0 bytes is empty, although its compression would need a header
        except UnicodeError as error:
            likely = "utf-16-le"  # of a text that lacks its byte order mark
            if isinstance(error, UnicodeDecodeError):
                likely = likely_encoding(error.object)
            raise file_error(
                name,
                f"is not {encoding or 'utf-8'}: {error}",
                f"Set encoding: {likely} or another, or convert it (iconv -f {likely} -t utf-8)",
            ) from error


class _ConvertedFile(io.RawIOBase):
    """A subclass implements ``_fill``."""

    _waiting = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        while not self._waiting and self._fill():
            pass
        size = min(len(target), len(self._waiting))
        target[:size] = self._waiting[:size]
        self._waiting = self._waiting[size:]
        return size

    def _fill(self) -> bool:
        """Converts the next bytes, perhaps to nothing. Returns False at the end of the file."""
        raise NotImplementedError


class _RecodedFile(_ConvertedFile):
    """Reads a text as UTF-8."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        self._text = io.TextIOWrapper(file, encoding, newline="")

    def _fill(self) -> bool:
        self._waiting = memoryview(self._text.read(2**14).encode())
        return bool(self._waiting)


class _StreamFile(_ConvertedFile):
    """Decompresses all streams of a file.

    Args:
        padding: the byte that may be repeated after a stream; b"": none.
    """

    def __init__(
        self, file: IO[bytes], new_stream: Callable[[], Any], padding: bytes = b""
    ) -> None:
        self._file = file
        self._new_stream = new_stream
        self._padding = padding
        self._stream = new_stream()
        self._start = 0
        self._started = False

    def _fill(self) -> bool:
        data = b""
        if self._stream.eof:
            data = self._stream.unused_data
            self._stream = self._new_stream()
            self._started = False
        data = data or self._file.read(2**12)  # a block of 4 bytes may become 128 kB
        if not data:
            if self._started:
                raise EOFError(f"the stream that begins at byte {self._start} is incomplete")
            return False
        if not self._started:
            end = self._file.tell()
            if end > len(data):
                data = data.lstrip(self._padding)
            self._start = end - len(data)
            self._started = bool(data)
        try:
            self._waiting = memoryview(self._stream.decompress(data))
        except Exception as error:
            raise EOFError(f"{error} in the stream that begins at byte {self._start}") from error
        return True


def files_in(archive: zipfile.ZipFile) -> list[str]:
    names = archive.namelist()
    return [name for name in names if not name.endswith("/") and not name.startswith("__MACOSX/")]


def _only_file(file: IO[bytes], name: str) -> io.RawIOBase:
    archive = zipfile.ZipFile(file)
    names = files_in(archive)
    if len(names) != 1:
        raise file_error(
            name,
            f"holds {plural(len(names), 'file')}: {', '.join(names[:3])}",
            f"Unpack it (unzip {shlex.quote(name)} -d FOLDER), give the folder as the input",
        )
    try:
        return cast("io.RawIOBase", archive.open(names[0]))
    except RuntimeError as error:
        raise zipfile.BadZipFile(str(error)) from error


def whole_option(names: Iterable[str], compression: str | None) -> JsonObject:
    """Returns the option of a reader's state or record, if a file may be of these kinds."""
    if any(_kind(name, compression) for name in names):
        return {WHOLE: True}
    return {}


def refuse_partial_files(
    folder: DataFolderLike, names: Iterable[str], compression: str | None, options: JsonObject
) -> None:
    """Raises CheckpointMismatch if an earlier release read only a part of one of the files."""
    if WHOLE in options:
        return
    for name in names:
        kind = _kind(name, compression)
        # A new run cannot read it either.
        with suppress(FileNotFoundError, ValueError, zipfile.BadZipFile):
            if kind and _has_more(get_datafolder(folder), name, kind):
                raise CheckpointMismatch(
                    f"The input file {name!r} was read by an earlier release only up to padding, "
                    "or only its first file or page: the rest is not in the output.",
                    starts_over="anew" if kind == "tiff" else "with old results",
                )


def _kind(name: str, compression: str | None) -> str:
    if name.lower().endswith((".tif", ".tiff")):
        return "tiff"
    codec = codec_of(name, compression)
    if codec in ("xz", "zip"):
        return codec
    return ""


def _has_more(folder: DataFolder, name: str, kind: str) -> bool:
    with folder.open(name, "rb", compression=None) as file:
        if kind == "xz":
            return _has_padded_stream(file)
        if kind == "tiff":
            with suppress(Exception):  # Pillow's plugins raise anything
                from PIL import Image

                return len(tiff_pages(Image.open(file))) > 1
            return False
        archive = zipfile.ZipFile(file)
        return files_in(archive) != archive.namelist()[:1]


def _has_padded_stream(file: IO[bytes]) -> bool:
    end = b""
    while block := file.read(2**20):
        searched = end + block
        if _PADDED_STREAM in searched:
            return True
        end = searched[-len(_PADDED_STREAM) :]
    return False
