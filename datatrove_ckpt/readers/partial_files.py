"""Finds input files of which earlier releases read only the beginning: an xz file up to the padding
between its streams, the first file of a zip, the first page of a TIFF.

The rest of such a file would move all later documents, so a run that began with an earlier release
is refused. States and records of runs that began later have the option ``whole``.
"""

import zipfile
from collections.abc import Iterable
from contextlib import suppress
from typing import IO

from datatrove.io import DataFolder, DataFolderLike, get_datafolder

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.pictures import tiff_pages
from datatrove_ckpt.errors import CheckpointMismatch
from datatrove_ckpt.readers.compressed import codec_of, files_in

WHOLE = "whole"
_PADDED_STREAM = b"\0\0\0\0\xfd7zXZ\0"


def whole_option(names: Iterable[str], compression: str | None) -> JsonObject:
    """Returns the option of a reader's state or record, if a file may be of these kinds."""
    if any(_kind(name, compression) for name in names):
        return {WHOLE: True}
    return {}


def refuse_partial_files(
    folder: DataFolderLike, names: Iterable[str], compression: str | None, options: JsonObject
) -> None:
    """Raises CheckpointMismatch if an earlier release read only the beginning of one of the files.

    Args:
        options: the reader's options in the state or record.
    """
    if WHOLE in options:
        return
    for name in names:
        kind = _kind(name, compression)
        # A new run cannot read it either.
        with suppress(FileNotFoundError, ValueError, zipfile.BadZipFile):
            if kind and _has_more(get_datafolder(folder), name, kind):
                raise CheckpointMismatch(
                    f"The input file {name!r} was read by an earlier release only up to the "
                    "padding after its first stream, or only its first file or page. The rest is "
                    "not in the output.",
                    starts_over="anew" if kind == "tiff" else "with old results",
                )


def _kind(name: str, compression: str | None) -> str:
    """Returns the kind of a file that earlier releases may have read in part; "" for others."""
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
    """Whether padding, which is zeros, comes before the first bytes of a stream of an xz file."""
    end = b""
    while block := file.read(2**20):
        searched = end + block
        if _PADDED_STREAM in searched:
            return True
        end = searched[-len(_PADDED_STREAM) :]
    return False
