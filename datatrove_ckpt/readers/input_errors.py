"""Explains an input that has content but no document: what its first row looks like, and which setting to change.

Used when nothing was found, so the file is opened once more and as little as possible is assumed about it.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import orjson
from datatrove.io import DataFolder
from datatrove.pipeline.readers import CSVReader, IpcReader, ParquetReader
from fsspec.spec import AbstractBufferedFile

from datatrove_ckpt.doors import written
from datatrove_ckpt.errors import CkptError, InputError
from datatrove_ckpt.readers.compressed import codec_of, decompressed
from datatrove_ckpt.retrying import http_status, hub_refusal, library_line

if TYPE_CHECKING:
    from datatrove.pipeline.readers.base import BaseDiskReader


MAX_LINE_BYTES = 2**28
"""Of a line of JSONL, or a field of CSV. A file of zeros that was compressed is one line, a thousand times as large."""
# Python's own limit, which holds for the whole process, is 128 kB.
csv.field_size_limit(MAX_LINE_BYTES)
_BLOCK = 2**16
_SHOWN_CHARACTERS = 60
_SHOWN_KEYS = 20
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
_SUFFIXES = {"gzip": ".gz", "zstd": ".zst", "bz2": ".bz2", "xz": ".xz", "zip": ".zip"}
_ARRAY_ADVICE = "Write one object per line (jq -c '.[]' FILE), or move the file out of the folder."
_RUN_AGAIN = "Correct that, and run the same command again."


class NoDocument(InputError):
    """No row of a file is a document, and its content tells why."""


def refuse_file_without_documents(reader: BaseDiskReader, name: str, damaged: bool) -> None:
    """For a reader that found no document at all, and a file of its input that is not empty.

    A file without rows is accepted, and so is one whose rows have an empty text: nothing is wrong with the settings.

    Args:
        damaged: one of its lines was no JSON object.

    Raises:
        NoDocument: always, but for such a file.
    """
    folder = reader.data_folder.path
    if text := explain(reader, name, damaged):
        raise NoDocument(f"This task's input holds no document, although {name!r} in {folder} is not empty. {text}")


def read_line(file: Any, size: int = MAX_LINE_BYTES) -> bytes:
    """The next line of a file, or its first ``size`` bytes."""
    at_most = () if isinstance(file, AbstractBufferedFile) else (size,)  # fsspec's readline takes no size
    return bytes(file.readline(*at_most))


def refuse_array(reader: BaseDiskReader, name: str) -> NoReturn:
    """For a file with a line that is, or begins, a JSON array of objects.

    Raises:
        InputError: always.
    """
    raise InputError(f"The input file {name!r} in {reader.data_folder.path} holds a JSON array. {_ARRAY_ADVICE}")


def explain(reader: BaseDiskReader, name: str, damaged: bool = False) -> str:
    """What a file that gave no document looks like, and what to do; "" if its rows have no text, or if it has none.

    Args:
        damaged: one of its lines was no JSON object.
    """
    folder: DataFolder = reader.data_folder
    with folder.open(name, "rb", compression=None) as file:
        magic = file.read(6)
        file.seek(0)
        if magic.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):  # the last one: a stream of Arrow
            table, use = ("Parquet", ParquetReader) if magic.startswith(b"PAR1") else ("Arrow", IpcReader)
            if isinstance(reader, use):
                return _explain_row(reader, _first_table_row(file, magic), damaged)
            return f"This is a file in the format {table}: use {use.__name__}, or move the file out of the folder."
        codec = codec_of(name, getattr(reader, "compression", "infer"))
        if codec is not None and magic:
            return _explain_text(io.BufferedReader(decompressed(file, codec, name), _BLOCK), reader, damaged)
        found = next((found for start, found in _MAGIC.items() if magic.startswith(start)), None)
        if found is None:
            return _explain_text(file, reader, damaged)
        return (
            f"It is compressed with {found}, and was read without decompressing it: its name should end in "
            f"{_SUFFIXES[found]}, or set compression. {_RUN_AGAIN}"
        )


def _explain_row(reader: BaseDiskReader, row: dict[str, Any] | None, damaged: bool) -> str:
    if row is None:
        return ""
    keys = ", ".join(map(repr, list(row)[:_SHOWN_KEYS]))
    if reader.adapter != reader._default_adapter:
        return f"The adapter found no text in any row. The first row has the keys {keys}. {_RUN_AGAIN}"
    if not damaged and reader.text_key in row and not row[reader.text_key]:
        return ""
    return f"No row has a text under text_key={reader.text_key!r}. The first row has the keys {keys}. {_RUN_AGAIN}"


def _explain_text(file: Any, reader: BaseDiskReader, damaged: bool) -> str:
    if isinstance(reader, CSVReader):
        lines = codecs.iterdecode(file, "utf-8", "replace")
        return _explain_row(reader, next(csv.DictReader(lines), None), damaged)
    while line := read_line(file, _BLOCK):
        line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            break
    with suppress(orjson.JSONDecodeError):
        row = orjson.loads(line)
        if isinstance(row, dict):
            return _explain_row(reader, row, damaged)
    text = line.decode(errors="replace").strip()
    advice = f"Write a format that {type(reader).__name__} reads, choose another reader, or move the file elsewhere."
    if text.startswith("["):
        advice = f"It seems to be a JSON array. {_ARRAY_ADVICE}"
    if "\ufffd" in text:
        advice = "It is not UTF-8: save it as UTF-8 (iconv -t utf-8), or move it elsewhere."
    return text and f"It begins with {text[:_SHOWN_CHARACTERS]!r}. {advice}"


def _first_table_row(file: Any, magic: bytes) -> dict[str, Any] | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    batches: Any
    if magic.startswith(b"PAR1"):
        batches = pq.ParquetFile(file, pre_buffer=False).iter_batches(batch_size=1)
    elif magic.startswith(b"\xff"):
        batches = pa.ipc.open_stream(file)
    else:
        table = pa.ipc.open_file(file)
        batches = (table.get_batch(number) for number in range(table.num_record_batches))
    for batch in batches:
        if batch.num_rows:
            row: dict[str, Any] = batch.slice(0, 1).to_pylist()[0]
            return row
    return None


# What an error of the hub, or of S3, means for an input, and what to do.


_OF_THE_CLIENT = ("huggingface_hub", "httpx")
_OF_S3 = ("botocore", "aiobotocore")
_MISSING = (FileNotFoundError, PermissionError)


def explain_hub_error(dataset: str, error: BaseException, commit: str | None = None, on_hub: bool = True) -> str:
    """What happened to a dataset that is opened or looked up, and what to do.

    Args:
        commit: the one that the run reads; None: not known yet.
        on_hub: the dataset is a repository on the hub.
    """
    if commit and type(error).__name__ == "RevisionNotFoundError":
        return (
            f"The dataset {dataset!r} has no commit {commit} any more, with which this run began: its history was "
            "squashed or rewritten. A run keeps to the commit that it began with. Restore the commit (a branch or tag "
            f"that holds it), or start from the beginning: with another {written.folders}."
        )
    if on_hub and (refused := hub_refusal(error)):
        return f"The dataset {dataset!r} cannot be opened: {refused}."
    what = f"The dataset {dataset!r} cannot be opened: {one_line(error)}."
    token = "; for a private or gated dataset, set HF_TOKEN to a token of an account that may read it"
    if on_hub and http_status(error) is None and isinstance(error, ValueError):
        return f"{what} Correct dataset_options."  # a split or a config that is not there
    if on_hub and http_status(error) is None:
        return f"{what} Check the network and HF_ENDPOINT, and correct dataset and dataset_options{token}."
    return f"{what} Correct dataset and dataset_options{token if on_hub else ''}."


def one_line(error: BaseException) -> str:
    """datasets says of each error in a file that one occurred; its cause says which."""
    cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" else None
    return library_line(cause) if cause else library_line(error)


def is_on_hub(folder: DataFolder) -> bool:
    """Whether this is a folder of a repository or a bucket on the hub."""
    return "hf" in getattr(folder.fs, "protocol", ())


@contextmanager
def naming_hub_input(
    folder: DataFolder, name: str = "", missing: bool = True, libraries: tuple[str, ...] = _OF_THE_CLIENT
) -> Iterator[None]:
    """Turns what the hub, or S3, raises about files of an input into an error that says what to do.

    Args:
        name: the file that is read; "": the folder is listed.
        missing: ``FileNotFoundError`` and ``PermissionError`` count, too, which the client raises for a folder.
        libraries: whose errors count.

    Raises:
        InputError: the hub or its client, or the client of S3, raised an error.
    """
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        is_denied = missing and isinstance(error, PermissionError) and "s3" in getattr(folder.fs, "protocol", ())
        if is_denied or (type(error).__module__.startswith(_OF_S3) and not isinstance(error, OSError)):
            what = f"The input file {name!r} in" if name else "The input"
            raise InputError(
                f"{what} {folder.resolve_paths('')!r} cannot be read: {library_line(error)}. Check the credentials "
                "(AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), the endpoint and the network."
            ) from error
        of_the_client = type(error).__module__.startswith(libraries)
        if not is_on_hub(folder) or not (of_the_client or (missing and isinstance(error, _MISSING))):
            raise
        raise InputError(_explain_folder(folder.resolve_paths(""), name, error)) from error


def no_files(folder: DataFolder) -> InputError:
    """The error of a folder in which no file matches."""
    return InputError(
        f"The input {folder.resolve_paths('')!r} holds no files for this reader: the folder does not exist there, or "
        f"glob_pattern fits none. Correct {written.data_folder} or glob_pattern."
    )


def _explain_folder(folder: str, name: str, error: BaseException) -> str:
    what = f"The input file {name!r} in {folder}" if name else f"The input {folder!r}"
    if refused := hub_refusal(error):
        return f"{what} cannot be read: {refused}."
    what += f" cannot be read: {one_line(error)}."
    kind, text, status = type(error).__name__, str(error), http_status(error)
    may_read = "set HF_TOKEN to a token of an account that may read it"
    if "Revision" in kind or "(revision not found)" in text:
        return f"{what} Correct the branch, tag or commit after the @ in {written.data_folder}."
    if "EntryNotFound" in kind:
        return (
            f"{what} It was there when the folder was listed: restore it, and run the same command again; or start "
            f"anew for the new input, with another {written.folders}."
        )
    if isinstance(error, _MISSING):
        return (
            f"{what} Correct {written.data_folder}, or restore the repository; if it is private or gated, {may_read}."
        )
    if status == 404:
        return f"{what} Correct {written.data_folder}, or {may_read}."
    return f"{what} Check the network, HF_ENDPOINT and https://status.huggingface.co, and run the same command again."
