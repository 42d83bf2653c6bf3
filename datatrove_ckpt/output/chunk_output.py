"""ChunkOutput: the documents of a finished chunk -> any DiskWriter -> staged files -> published in one step.

Files appear under their final names whole or not at all. In a local output folder they are staged in a hidden folder
beside the final ones (a rename works within one file system only) and renamed; for a remote one they are staged in
the checkpoint's folder, and uploaded (see remote.py). The writer itself never knows: each chunk gets a fresh copy of
it, whose file manager is ours.

Bytes depend on the documents only: gzip is told to leave the time out of its header.
"""

from __future__ import annotations

import copy
import gzip
import io
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec.compression
import fsspec.utils
import xxhash
from datatrove.io import OutputFileManager
from datatrove.pipeline.writers.disk_base import DiskWriter
from fsspec.spec import AbstractBufferedFile

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.journal import Finished
from datatrove_ckpt.documents import decode
from datatrove_ckpt.errors import CkptError, ConfigError, OutputFailed
from datatrove_ckpt.output.adapter import use_shallow_adapter
from datatrove_ckpt.output.upload import RemoteFolder
from datatrove_ckpt.redaction import check_no_secrets

STAGING = ".datatrove-ckpt-staging"
_BUFFER = 1 << 20


def check_writer(writer: DiskWriter, checkpoints: bool) -> None:
    """Refuses at construction what would lose data, or tell a secret, at the end.

    Raises:
        ConfigError: no ``${chunk_index}`` in the template, a writer that uploads by itself, or a secret among the
            output folder's storage options.
    """
    template = getattr(getattr(writer, "output_filename", None), "template", None)
    if template is None:
        raise ConfigError(f"output_writer: {type(writer).__name__} is not a DiskWriter (it has no output_filename).")
    if type(writer).__name__ == "HuggingFaceDatasetWriter":
        raise ConfigError(
            "output_writer: HuggingFaceDatasetWriter uploads by itself when it is closed, so a chunk could not be "
            "published in one step. Use ParquetWriter with output_folder='hf://datasets/OWNER/NAME' instead."
        )
    check_no_secrets(writer.output_folder, "output_writer")
    if checkpoints and not _mentions(writer, "chunk_index"):
        raise ConfigError(
            f"output_writer: with checkpoints each chunk is one file, so output_filename {template!r} needs "
            "${chunk_index}. Example: '${rank}_chunk_${chunk_index}.jsonl'."
        )


def check_rank_in_template(writer: DiskWriter, world_size: int) -> None:
    """Several tasks must not write one file.

    Raises:
        ConfigError: no ``${rank}`` in the template of a writer used by several tasks.
    """
    if world_size > 1 and not _mentions(writer, "rank"):
        raise ConfigError(
            f"output_writer: {world_size} tasks would write the same files, so output_filename "
            f"{writer.output_filename.template!r} needs ${{rank}}. Example: '${{rank}}_chunk_${{chunk_index}}.jsonl'."
        )


def _mentions(writer: DiskWriter, name: str) -> bool:
    template = writer.output_filename
    return bool(template.safe_substitute({name: "0"}) != template.safe_substitute({name: "1"}))


class ChunkOutput:
    """Writes one chunk after the other of one rank.

    Args:
        writer: the user's, never opened itself.
        scratch: where files for a remote output folder are staged.
        prefix: before the chunk index in files' names.
    """

    def __init__(self, writer: DiskWriter, rank: int, scratch: Path, prefix: str = "") -> None:
        self._prefix = prefix
        self._writer = writer
        self._rank = rank
        self._target: _Target
        if writer.output_folder.is_local():
            folder = Path(writer.output_folder.resolve_paths("")).absolute()
            # Another run may write other files into the same folder; it must not clear away what this one stages.
            run = xxhash.xxh3_64_hexdigest(str(scratch).encode())
            self._target = _LocalFolder(folder, f"{rank:05d}-{run}")
        else:
            self._target = _RemoteTarget(writer.output_folder, scratch)

    def prepare(self) -> None:
        """Removes what earlier lives staged and never published, and makes the staging folder.

        Raises:
            StorageFailed, OutputFailed: the output folder cannot be written, which is better known before anything is
                paid for.
        """
        self._target.prepare()
        files.disk.remove_tree(self._target.staging.parent)
        files.disk.make_dirs(self._target.staging)

    def stop(self) -> None:
        """Nobody waits for the chunk that is being uploaded any longer; the next life uploads it again."""
        self._target.stop()

    def finish(self) -> None:
        """Removes the staging folder, once nothing will be staged any more."""
        files.disk.remove_tree(self._target.staging.parent)
        files.disk.remove_dir(self._target.staging.parent.parent)

    def write_chunk(self, chunk_index: int, documents: Iterator[Finished]) -> list[OutputFile]:
        """Steps 2 and 3 of a commit.

        Raises:
            OutputFailed: a document cannot be written, or the output folder refuses; the journal is kept.
            StorageFailed: the disk refused.
        """
        staging = self._target.staging / f"chunk_{chunk_index:05d}"
        files.disk.remove_tree(staging)
        staged = StagedFiles(staging, self._writer.output_mg)
        try:
            self._write(staged, chunk_index, documents)
            output = [self._target.publish(path, name) for name, path in staged.finished.items()]
        finally:
            staged.abandon()
        self._target.sync(output)
        files.disk.remove_tree(staging)
        return [OutputFile(name, staged.sizes[name], staged.hashes[name]) for name in staged.finished]

    def _write(self, staged: StagedFiles, chunk_index: int, documents: Iterable[Finished]) -> None:
        writer = _fresh_copy(self._writer, staged)
        for finished in documents:
            document = None
            try:
                document = decode(finished.document)
                writer.write(document, rank=self._rank, chunk_index=f"{self._prefix}{chunk_index:05d}")
            except CkptError:
                raise
            except Exception as error:
                name = repr(document.id) if document else "(unreadable)"
                raise OutputFailed(
                    f"Document {name} (number {finished.ordinal} of this rank) could not be written by "
                    f"{type(writer).__name__}: {type(error).__name__}: {error}. Its chunk's journal is kept: mend the "
                    "writer (its adapter, its schema) and run the same command again."
                ) from error
        try:
            writer.close()
            staged.close()
        except CkptError:
            raise
        except Exception as error:
            raise OutputFailed(
                f"Chunk {chunk_index} could not be written by {type(writer).__name__}: {type(error).__name__}: "
                f"{error}. Its journal is kept: mend the writer and run the same command again."
            ) from error


def _fresh_copy(writer: DiskWriter, staged: StagedFiles) -> DiskWriter:
    """A writer with the user's settings, and no memory of earlier chunks, that writes into the staging folder."""
    # A deep copy, because writers keep counters, batches and open files in attributes of their own. The user's
    # writer was never written to, so there is nothing open to copy. Its file manager is left out.
    original = writer.output_mg
    fresh: DiskWriter = copy.deepcopy(writer, {id(original): staged})
    use_shallow_adapter(fresh)
    return fresh


class StagedFiles(OutputFileManager):  # type: ignore[misc]
    """datatrove's file manager, writing below a staging folder and hashing what it writes."""

    def __init__(self, folder: Path, original: OutputFileManager) -> None:
        super().__init__(original.fs, original.mode, original.compression)
        self.finished: dict[str, Path] = {}
        self.sizes: dict[str, int] = {}
        self.hashes: dict[str, str] = {}
        self._folder = folder

    def get_file(self, filename: str) -> Any:
        if filename not in self._output_files:
            if filename in self.finished:
                raise OutputFailed(f"{filename} was closed and is written to again; it would lose what it holds.")
            self._output_files[filename] = self._create(filename)
        return self._output_files[filename]

    def _create(self, filename: str) -> _StagedFile:
        path = self._folder / filename
        files.disk.make_dirs(path.parent)
        return _StagedFile(path, filename, self)

    def abandon(self) -> None:
        """Lets go of files that were not closed, without finishing them."""
        for file in self._output_files.values():
            file.abandon()
        self._output_files.clear()


class _OpenFile:
    """What a writer sees of an open file: binary or text, compressed or not."""

    def __init__(self, raw: Any, filename: str, manager: OutputFileManager) -> None:
        self._raw = raw
        self._buffered = io.BufferedWriter(raw, _BUFFER)
        self._file: Any = _compressed(self._buffered, filename, manager.compression)
        if "b" not in manager.mode:
            self._file = io.TextIOWrapper(self._file, encoding="utf-8", newline="\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> Any:
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()
        if not self._buffered.closed:  # gzip and zstd leave what they wrap open
            self._buffered.close()

    def abandon(self) -> None:
        """Closes the descriptor first, so that nothing that is still buffered can get out."""
        self._raw.close()
        self._file = io.BytesIO()  # pyarrow's writer ends its file when it is collected; let it, elsewhere


class _StagedFile(_OpenFile):
    def __init__(self, path: Path, filename: str, manager: StagedFiles) -> None:
        super().__init__(files.HashedFile(path), filename, manager)
        self._filename = filename
        self._manager = manager

    def close(self) -> None:
        if self._filename in self._manager.finished:
            return
        super().close()
        files.disk.sync(self._raw.path)
        self._manager.finished[self._filename] = self._raw.path
        self._manager.sizes[self._filename] = self._raw.size
        self._manager.hashes[self._filename] = self._raw.hexdigest()


class RemoteFiles(OutputFileManager):  # type: ignore[misc]
    """datatrove's file manager, whose remote files can be let go of: datatrove's own complete their upload then."""

    def get_file(self, filename: str) -> Any:
        if filename not in self._output_files:
            self._output_files[filename] = _RemoteFile(self.fs.open(filename, "wb"), filename, self)
        return self._output_files[filename]

    def abandon(self) -> None:
        for file in self._output_files.values():
            file.abandon()
        self._output_files.clear()


class _RemoteFile(_OpenFile):
    def abandon(self) -> None:
        if isinstance(self._raw, AbstractBufferedFile):
            with suppress(Exception):
                self._raw.discard()  # only some file systems can
            self._raw.closed = True  # to close it would be to publish it
        super().abandon()


def _compressed(file: Any, filename: str, compression: str | None) -> Any:
    if compression == "infer":
        compression = fsspec.utils.infer_compression(filename)
    if compression is None:
        return file
    if compression == "gzip":
        return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
    return fsspec.compression.compr[compression](file, mode="wb")


def _owner() -> str:
    """A folder of its own for each process: one that lost its rank to another must not touch what that one stages."""
    return secrets.token_hex(4)


@dataclass
class _Target:
    staging: Path

    def prepare(self) -> None:
        """Called before what earlier lives staged is removed."""

    def publish(self, staged: Path, name: str) -> Path:
        raise NotImplementedError

    def stop(self) -> None:
        """Nobody waits for ``publish`` any longer."""

    def sync(self, published: list[Path]) -> None:
        """What was published survives power loss from here on."""


class _LocalFolder(_Target):
    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / STAGING / name / _owner())
        self._folder = folder

    def publish(self, staged: Path, name: str) -> Path:
        final = self._folder / name
        files.disk.make_dirs(final.parent)
        files.disk.rename(staged, final)
        return final

    def sync(self, published: list[Path]) -> None:
        for folder in dict.fromkeys(path.parent for path in published):
            files.disk.sync_dir(folder)


class _RemoteTarget(_Target):
    def __init__(self, folder: Any, scratch: Path) -> None:
        super().__init__(scratch / "staging" / _owner())
        # Another rank, or run, that writes into the same folder has a name of its own.
        run = xxhash.xxh3_64_hexdigest(str(scratch).encode())
        self._remote = RemoteFolder(folder, f"{STAGING}/probe-{run}")

    def prepare(self) -> None:
        # What was being uploaded when a life ended lies staged still.
        left = self.staging.parent
        found = (path.relative_to(left).parts for path in left.rglob("*") if path.is_file())
        self._remote.prepare(["/".join(parts[2:]) for parts in found] if left.exists() else None)

    def publish(self, staged: Path, name: str) -> Path:
        self._remote.upload(staged, name)
        return staged

    def stop(self) -> None:
        self._remote.stop()
