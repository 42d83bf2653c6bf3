"""Makes parts of a message from pictures, sound and files of documents, in OpenAI's form.

The first bytes, never a name, decide a part's type. A part refers to the bytes, which become base64
during sending (``inference/client/body.py``), and a hash in the cache key.
"""

import asyncio
import base64
import io
import os
import posixpath
import re
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import orjson
import xxhash
from datatrove.data import Document, Media
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.formatting import error_text, missing_package
from datatrove_ckpt.common.memory import ByteBudget, media_bytes
from datatrove_ckpt.common.pictures import with_png_mode
from datatrove_ckpt.config.templates import lacks
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.rollouts.interface import Payload
from datatrove_ckpt.rollouts.settings import Messages

MEDIA = "media"
"""The value of ``images`` for a document's own media, instead of a column."""

_STARTS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
    (b"ID3", "audio/mp3"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"%PDF-", "application/pdf"),
)
_MAX_FILE_BYTES = 2**28
# All parsers see the same host in such a URL.
_URL = re.compile(r"https?://([\w.-]+|\[[0-9a-f:.]+\])(:\d+)?([/?#]|\Z)", re.ASCII | re.IGNORECASE)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}
# Decoding a picture of 10 MB may take 500 MB.
_DECODERS = threading.BoundedSemaphore(min(4, os.cpu_count() or 1))
_BUDGETS: WeakKeyDictionary[asyncio.AbstractEventLoop, ByteBudget] = WeakKeyDictionary()


class InvalidMedia(ValueError):
    """Reports a picture, sound or file of a document that is missing, damaged or of a type that
    cannot be sent.
    """


class MediaData:
    """Bytes in a payload, in the place of their base64.

    Attributes:
        prefix: text before the base64, such as "data:image/png;base64,".
        key: replacement of the bytes in the cache key.
    """

    __slots__ = ("data", "key", "prefix")

    def __init__(self, data: bytes, prefix: str, key: str) -> None:
        self.data = data
        self.prefix = prefix
        self.key = key

    def __repr__(self) -> str:
        return f"<media of {len(self.data)} bytes>"


def media_key(value: object) -> orjson.Fragment:
    """Encodes media for the hash of a payload, as orjson's ``default``.

    No text in JSON has a NUL.
    """
    if isinstance(value, MediaData):
        return orjson.Fragment(b'"\0%s"' % f"{value.prefix}{value.key}".encode())
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def split_media(payload: Payload, option: int) -> tuple[list[bytes], list[bytes]]:
    """Returns a payload's JSON before, between and after its media, and the media's bytes."""
    media = []

    def placeholder(value: object) -> orjson.Fragment:
        if not isinstance(value, MediaData):
            return media_key(value)
        media.append(value.data)
        return orjson.Fragment(b'"%s\0"' % value.prefix.encode())

    return orjson.dumps(payload, option=option, default=placeholder).split(b"\0"), media


def kind_of(data: bytes) -> str | None:
    """Returns the type by the first bytes, such as "image/png"; None if it cannot be sent."""
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12])
    if data[:2] == b"BM" and data[6:10] == bytes(4):
        return "image/bmp"
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2:  # MPEG audio, layer III
        return "audio/mp3"
    return next((kind for start, kind in _STARTS if data.startswith(start)), None)


def media_part(data: bytes, filename: str = "document.pdf", key: str = "") -> Payload:
    """Returns a part of a message: ``{"role": "user", "content": [{"type": "text", "text": ...},
    media_part(data)]}``.

    A request with the part takes the memory of ``data``, and not of its base64.

    Args:
        data: a picture (PNG, JPEG, GIF, WebP, BMP, TIFF), sound (WAV, MP3, FLAC, OGG) or PDF.
        filename: name of a PDF for the model.
        key: replacement of the data in the request's cache key; "": the data's hash.

    Raises:
        InvalidMedia: the data has another type.
    """
    try:
        return _made_part(data, filename, key)
    except InvalidMedia as error:
        raise InvalidMedia(f"media_part: the data {error}") from None


def _made_part(data: bytes, filename: str, key: str) -> Payload:
    if not data:
        raise InvalidMedia("is empty")
    kind = kind_of(data)
    if kind is None:
        raise InvalidMedia(
            "is of no type that can be sent (PNG, JPEG, GIF, WebP, BMP, TIFF, WAV, MP3, FLAC, OGG, "
            "PDF)"
        )
    group, _, ending = kind.partition("/")
    key = key or xxhash.xxh3_128_hexdigest(data)
    if group == "audio":
        return {
            "type": "input_audio",
            "input_audio": {"data": MediaData(data, "", key), "format": ending},
        }
    value = MediaData(data, f"data:{kind};base64,", key)
    if group == "image":
        return {"type": "image_url", "image_url": {"url": value}}
    return {"type": "file", "file": {"filename": filename, "file_data": value}}


def with_media(payload: Payload, parts: Sequence[Payload]) -> Payload:
    if not parts:
        return payload
    messages = list(payload["messages"])
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        users = [len(messages)]
        messages.append({"role": "user"})
    content = messages[users[-1]].get("content") or []
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    messages[users[-1]] = {**messages[users[-1]], "content": [*content, *parts]}
    return {**payload, "messages": messages}


class _Medium(NamedTuple):
    name: str = ""
    data: Any = None
    url: str | None = None
    path: str | None = None
    offset: int | None = None
    length: int | None = None


def values_of(document: Document, images: str) -> list[object]:
    """Returns the document's media, or the media in a metadata column.

    Raises:
        ConfigError: there is no such column.
        InvalidMedia: the column is empty.
    """
    if images == MEDIA:
        value = document.media
    elif images in document.metadata:
        value = document.metadata[images]
    else:
        raise lacks(document, "images", images)
    values = list(value) if isinstance(value, list | tuple) else [value]
    if all(value is None for value in values):
        raise InvalidMedia(
            f"images: the document has nothing in {images!r}. Filter such documents out"
        )
    return values


def _medium(value: object) -> _Medium:
    if isinstance(value, bytes | bytearray | memoryview):
        return _Medium(data=bytes(value))
    if isinstance(value, str):
        return _from_text(value)
    if hasattr(value, "getbands"):
        return _Medium(data=value)
    if isinstance(value, Media):
        value = {name: getattr(value, name) for name in Media.__slots__}
    if not isinstance(value, dict):
        raise InvalidMedia(f"is a {type(value).__name__}, and no bytes, path or URL")
    data = value.get("media_bytes", value.get("bytes"))
    path = value.get("path")
    url = value.get("url")
    if data is None and not path:
        if not url:
            raise InvalidMedia("has no bytes, no path and no URL")
        return _from_text(url, is_url=True)
    return _Medium(path or url or "", data, None, path, value.get("offset"), value.get("length"))


def _from_text(text: str, is_url: bool = False) -> _Medium:
    if text.startswith("data:"):
        head, _, encoded = text.partition(",")
        try:
            data = base64.b64decode(encoded, validate=True)
        except ValueError as error:
            raise InvalidMedia(f"({head},...) is damaged: {error}") from None
        return _Medium(name=head, data=data)
    if text.startswith(("http://", "https://")):
        return _Medium(name=text, url=text)
    if not text:
        raise InvalidMedia("is empty")
    if is_url:
        raise InvalidMedia(f"({text!r}) is no http(s) or data URL")
    return _Medium(name=text, path=text)


class MediaSettings(Protocol):
    """The settings of a rollout for media; ``PromptRollout`` documents them."""

    images: str | None
    max_image_side: int | None
    media_folder: str | None
    media_urls: list[str] | None


def check_media(settings: MediaSettings) -> None:
    """Raises ConfigError if Pillow or the folder is missing, because no document is at fault."""
    if settings.max_image_side is not None:
        check_pillow()
    folder = settings.media_folder
    if folder and get_protocol(folder) == "file" and not url_to_fs(folder)[0].isdir(folder):
        raise ConfigError(f"media_folder: {folder} is no folder on this machine.")


@asynccontextmanager
async def parts_of(document: Document, settings: MediaSettings) -> AsyncIterator[list[Payload]]:
    """Yields the parts for a document's media. The files' bytes count against a budget until the
    end.

    Raises:
        ConfigError: a document names a file, and no folder is set.
    """
    media = [
        _named(number, value)
        for number, value in enumerate(values_of(document, settings.images or MEDIA), 1)
    ]
    files = [medium for medium in media if medium.data is None and medium.path]
    if files and settings.media_folder is None:
        raise ConfigError(
            f"media_folder: document {document.id!r} names a file, {files[0].path!r}. Set "
            "media_folder to the folder whose files may be sent."
        )
    in_thread = (
        bool(files)
        or settings.max_image_side
        or any(not isinstance(medium.data, bytes) for medium in media)
    )
    if not in_thread:
        yield [_part(medium, settings) for medium in media]
        return
    budget = _BUDGETS.setdefault(asyncio.get_running_loop(), ByteBudget(media_bytes()))
    reserved = 0
    if files:
        reserved = await asyncio.to_thread(_sizes, files, settings)
    await budget.acquire(reserved)
    try:
        parts = await _made_in_thread(media, settings)
        if files:
            values = [value for part in parts for value in part[part["type"]].values()]
            needed = sum(len(value.data) for value in values if isinstance(value, MediaData))
            budget.release(reserved - needed)
            reserved = needed
        yield parts
    finally:
        budget.release(reserved)


async def _made_in_thread(media: list[_Medium], settings: MediaSettings) -> list[Payload]:
    # A thread that waits for an outage's end would delay a stop.
    attempts = retrying.FailureCounter(retrying.READING)
    while True:
        try:
            return await asyncio.to_thread(lambda: [_part(medium, settings) for medium in media])
        except (InvalidMedia, ConfigError):
            raise
        except Exception as error:
            seconds = attempts.failed("A file that a document names cannot be read", error)
        await asyncio.sleep(seconds)


def _named(number: int, value: object) -> _Medium:
    name = f"images: medium {number}"
    try:
        medium = _medium(value)
    except InvalidMedia as error:
        raise InvalidMedia(f"{name} {error}") from None
    if medium.name:
        name += f" ({medium.name[:200]})"
    return medium._replace(name=name)


def check_url(url: str, allowed: list[str] | None) -> None:
    """Raises InvalidMedia for a URL that a server may not fetch. ``allowed``: ``media_urls``."""
    host = url
    match = _URL.match(url)
    if match:
        host = match[1].lower()
    if not {host, "*"}.intersection(allowed or ()):
        raise InvalidMedia(
            f"names a URL, and media_urls does not allow {host[:200]!r}. Write media_urls: "
            "[HOST]; a run that has begun may need accept_changes"
        )


def check_message_urls(messages: Messages, allowed: list[str] | None) -> None:
    contents = (message.get("content") for message in messages)
    for part in [part for parts in contents if isinstance(parts, list) for part in parts]:
        for name in {"image_url", "audio_url", "video_url"}.intersection(part):
            url = part[name]
            if isinstance(url, dict):
                url = url.get("url")
            if url and not url.startswith("data:"):
                check_url(url, allowed)


def _part(medium: _Medium, settings: MediaSettings) -> Payload:
    data = medium.data
    side = settings.max_image_side
    try:
        if data is None and medium.url:
            check_url(medium.url, settings.media_urls)
            return {"type": "image_url", "image_url": {"url": medium.url}}
        if data is None:
            data = _read(medium, settings)
        elif hasattr(data, "getbands"):
            data = _as_png(data)
        data = bytes(data)
        if side is None or not (kind_of(data) or "").startswith("image/"):
            return _made_part(data, posixpath.basename(medium.path or "") or "document.pdf", "")
        # The key is the original's, because releases of Pillow scale differently.
        return _made_part(resized(data, side), "", f"{xxhash.xxh3_128_hexdigest(data)} {side}")
    except InvalidMedia as error:
        raise InvalidMedia(f"{medium.name} {error}") from error.__cause__


def _open_at(medium: _Medium, settings: MediaSettings) -> tuple[AbstractFileSystem, str]:
    """Returns file system and path of a document's file; documents are not trusted."""
    folder = str(settings.media_folder)
    filesystem, root = url_to_fs(folder)
    path = str(medium.path)
    for start in (root, folder):
        path = path.removeprefix(start.rstrip("/") + "/")
    inside = posixpath.normpath(path)
    full_path = f"{root.rstrip('/')}/{inside}"
    refused = inside.startswith(("/", "..")) or "://" in path
    if isinstance(filesystem, LocalFileSystem):  # other file systems have no symbolic links
        real = Path(os.path.realpath(full_path))
        refused |= not real.is_relative_to(os.path.realpath(root)) or (
            real.exists() and not real.is_file()
        )
    if refused:
        raise InvalidMedia(f"is outside of media_folder {folder}, or no regular file")
    return filesystem, full_path


def _sizes(files: Iterable[_Medium], settings: MediaSettings) -> int:
    """A missing file counts as 0, and fails when it is read."""
    total = 0
    for medium in files:
        with suppress(Exception):
            filesystem, path = _open_at(medium, settings)
            if medium.length is None:
                total += filesystem.size(path) or 0
            else:
                total += medium.length
    return total


def _read(medium: _Medium, settings: MediaSettings) -> bytes:
    filesystem, path = _open_at(medium, settings)
    size = _MAX_FILE_BYTES + 1
    if medium.length is not None and 0 <= medium.length < size:
        size = medium.length
    try:
        with filesystem.open(path, "rb") as file:
            if medium.offset:
                file.seek(medium.offset)
            data = bytes(file.read(size))
    except OSError as error:
        if retrying.READING.is_transient(error):  # an outage is not the document's fault
            raise
        raise InvalidMedia(f"cannot be read: {error_text(error)}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidMedia(f"is larger than {_MAX_FILE_BYTES} bytes")
    return data


def check_pillow() -> None:
    advice = missing_package("PIL")
    if advice is not None:
        raise ConfigError(f"max_image_side: {advice}")


def resized(data: bytes, side: int) -> bytes:
    """Returns the picture, with at most ``side`` pixels on its longest side.

    JPEG stays JPEG, all other types become PNG, with only the first frame. Equal pictures give
    equal bytes with one release of Pillow.

    Raises:
        InvalidMedia: the picture is damaged.
    """
    from PIL import Image, ImageOps

    with _DECODERS:
        try:
            with Image.open(io.BytesIO(data)) as image:
                image.load()
                if max(image.size) <= side:
                    return data
                # The new file has no Exif data.
                turned = with_png_mode(ImageOps.exif_transpose(image))
                scale = side / max(turned.size)
                size = (max(1, round(turned.width * scale)), max(1, round(turned.height * scale)))
                made = io.BytesIO()
                smaller = turned.resize(size, Image.Resampling.LANCZOS)
                if image.format in ("JPEG", "MPO"):
                    smaller.save(made, "JPEG", quality=90)
                else:
                    smaller.save(made, "PNG")
                return made.getvalue()
        except Exception as error:  # Pillow's plugins raise anything
            raise InvalidMedia(f"is damaged, or no whole picture: {error_text(error)}") from error


def _as_png(image: Any) -> bytes:
    made = io.BytesIO()
    with _DECODERS:
        try:
            image.save(made, "PNG")
        except Exception as error:
            raise InvalidMedia(f"is damaged, or cannot be PNG: {error_text(error)}") from error
    return made.getvalue()


def without_bytes(value: object) -> object:
    if isinstance(value, list | tuple):
        return [without_bytes(item) for item in value]
    if isinstance(value, dict):
        return {
            name: None if name in ("bytes", "media_bytes") else without_bytes(item)
            for name, item in value.items()
        }
    if isinstance(value, str | int | float) and not str(value).startswith("data:"):
        return value
    return None
