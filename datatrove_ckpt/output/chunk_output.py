"""ChunkOutput: the documents of a finished chunk -> any DiskWriter -> staged files -> published in one step.

Files appear under their final names complete or not at all. For a local output folder they are staged in a hidden
folder below it, because a rename works within one file system only, and renamed. For a remote one they are staged in
the checkpoint's folder, and uploaded (see ``upload.py``). The writer does not notice: each chunk gets a fresh copy of
it, with our file manager (see ``file_managers.py``).
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import xxhash
from datatrove.io import DataFolder
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.disk_errors import explained
from datatrove_ckpt.checkpoint.journal import Finished
from datatrove_ckpt.config.paths import refuse_variables
from datatrove_ckpt.documents import decode
from datatrove_ckpt.errors import CkptError, ConfigError, OutputFailed
from datatrove_ckpt.output.adapter import use_shallow_adapter
from datatrove_ckpt.output.committed import FoundFiles, OutputCheck, RankCommits
from datatrove_ckpt.output.file_managers import StagedFiles, missing_codec
from datatrove_ckpt.output.names import STAGING, FileNames, plain
from datatrove_ckpt.output.upload import RemoteFolder
from datatrove_ckpt.redaction import check_no_secrets


def check_writer(writer: DiskWriter, checkpoints: bool) -> None:
    """Refuses, when a runner is constructed, a writer that would later lose data or reveal a secret.

    Raises:
        ConfigError: no ``${chunk_index}`` in the template, a writer that uploads by itself, a secret among the
            output folder's storage options, a variable in its path, or a compression whose package is not
            installed.
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
    refuse_variables("output_writer: output_folder", writer.output_folder.path)
    if advice := missing_codec(writer.output_mg.compression, template):
        raise ConfigError(f"output_writer: compression: {advice}")
    if writer.output_mg.compression is None and (ending := re.search(r"\.(gz|zst|bz2|xz|zip)$", template)):
        raise ConfigError(
            f"output_writer: output_filename {template!r} ends in {ending[0]}, and compression is null: readers would "
            "take the files for damaged ones. Set compression to infer, or remove the ending."
        )
    if not writer.output_filename.is_valid():
        raise ConfigError(f"output_writer: output_filename {template!r} has a $ that starts no ${{field}}; write $$.")
    if checkpoints and not _template_uses(writer, "chunk_index"):
        raise ConfigError(
            f"output_writer: with checkpoints each chunk is one file, so output_filename {template!r} needs "
            "${chunk_index}. Example: '${rank}_chunk_${chunk_index}.jsonl'."
        )


def check_rank_in_template(writer: DiskWriter, world_size: int) -> None:
    """Refuses a writer by which several tasks would write one file.

    Raises:
        ConfigError: no ``${rank}`` in the template of a writer used by several tasks.
    """
    if world_size > 1 and not _template_uses(writer, "rank"):
        raise ConfigError(
            f"output_writer: {world_size} tasks would write the same files, so output_filename "
            f"{writer.output_filename.template!r} needs ${{rank}}. Example: '${{rank}}_chunk_${{chunk_index}}.jsonl'."
        )


def _template_uses(writer: DiskWriter, name: str) -> bool:
    """Whether the writer's filename template contains the placeholder."""
    template = writer.output_filename
    return bool(template.safe_substitute({name: "0"}) != template.safe_substitute({name: "1"}))


class ChunkOutput:
    """Writes the chunks of one rank, one after the other.

    Args:
        writer: the user's writer. It is copied for each chunk, and never opened itself.
        rank: the rank, for the writer's filename template.
        scratch: the folder below which files for a remote output folder are staged.
        prefix: stands before the chunk index in file names.
        checkpoints: ``checkpoints_local_dir``, below which ``scratch`` is.
    """

    def __init__(self, writer: DiskWriter, rank: int, scratch: Path, checkpoints: Path, prefix: str = "") -> None:
        self.names = FileNames(writer, rank, prefix, checkpoints)
        self._check = OutputCheck(writer, checkpoints)
        self._retry = scratch.parent.name if prefix else ""
        self._taken: dict[str, tuple[str, int]] = {}
        self._writer = writer
        self._rank = rank
        self._target: _Target
        if writer.output_folder.is_local():
            folder = Path(writer.output_folder.resolve_paths("")).absolute()
            # Another run may write other files into the same folder. It must not remove what this one stages.
            run = xxhash.xxh3_64_hexdigest(str(scratch).encode())
            self._target = _LocalTarget(folder, f"{rank:05d}-{run}")
        else:
            self._target = _RemoteTarget(writer.output_folder, scratch)

    def refuse_existing(self) -> None:
        """Call it before the rank's first start.

        Raises:
            OutputMismatch: the folder holds files that this rank would write.
        """
        commits, found = self._look()
        self._check.refuse_existing(commits, found, self._retry)

    def check_complete(self) -> None:
        """Call it when all chunks are committed.

        Raises:
            OutputMismatch: committed files are missing or changed, or files are there that no commit names.
        """
        commits, found = self._look()
        self._check.refuse_lost([commits], found)
        self._check.refuse_unknown(commits, found)

    def _look(self) -> tuple[RankCommits, FoundFiles]:
        commits = RankCommits(self._check.root, self._rank)
        return commits, self._target.call_to_list(partial(self._check.look, [commits], self._rank))

    def prepare(self) -> None:
        """Removes the files that earlier processes staged and did not publish, and makes the staging folder.

        Raises:
            OutputMismatch: files that earlier attempts committed are missing or changed.
            StorageFailed, OutputFailed: the output folder cannot be written to. It is checked here, before the first
                request is paid for.
        """
        if RankCommits(self._check.root, self._rank).files:
            commits, found = self._look()
            self._check.refuse_lost([commits], found)
            if self.names.fields:  # otherwise the chunk index alone keeps names apart
                self._taken = {plain(one.file.path): (one.root, one.chunk_index) for one in commits.files}
        self._target.prepare()
        files.disk.remove_tree(self._target.staging.parent)
        files.disk.make_dirs(self._target.staging, files.PRIVATE_FOLDER)

    def stop(self) -> None:
        """Ends the wait for an upload under way. The next process uploads that chunk again."""
        self._target.stop()

    def finish(self) -> None:
        """Removes the staging folder. Nothing may be staged after that."""
        files.disk.remove_tree(self._target.staging.parent)
        files.disk.remove_dir(self._target.staging.parent.parent)

    def write_chunk(self, chunk_index: int, documents: Iterator[Finished]) -> list[OutputFile]:
        """Writes and publishes a chunk: steps 2 and 3 of a commit. Returns the files that were published.

        Raises:
            OutputFailed: a document cannot be written, or the output folder refuses it. The journal is kept.
            StorageFailed: the disk refused a write.
        """
        staging = self._target.staging / f"chunk_{chunk_index:05d}"
        files.disk.remove_tree(staging)
        staged = StagedFiles(staging, self._writer.output_mg)
        try:
            self._write(staged, chunk_index, documents)
            self._refuse_taken(chunk_index, staged.finished)
            output = [self._target.publish(path, name) for name, path in staged.finished.items()]
        finally:
            staged.abandon()
        self._target.sync(output)
        files.disk.remove_tree(staging)
        return [OutputFile(name, staged.sizes[name], staged.hashes[name]) for name in staged.finished]

    def _refuse_taken(self, chunk_index: int, names: Iterable[str]) -> None:
        if not self.names.fields:
            return
        mine = (self._retry, chunk_index)
        for name in names:
            owner = self._taken.setdefault(plain(name), mine)
            if owner != mine:
                raise OutputFailed(
                    f"Chunks {owner[1]} and {chunk_index} of rank {self._rank} would both write {name}: fields of "
                    f"documents run into the chunk index in output_filename {self.names.template!r}. Put a / or _ "
                    "between them, choose another output_folder and checkpoint for that, and start again."
                )

    def _write(self, staged: StagedFiles, chunk_index: int, documents: Iterable[Finished]) -> None:
        writer = _fresh_copy(self._writer, staged)
        self.names.use_in(writer)
        chunk_field = self.names.chunk_field(chunk_index)
        for finished in documents:
            document = None
            try:
                document = decode(finished.document)
                writer.write(document, rank=self._rank, chunk_index=chunk_field)
            except CkptError:
                raise
            except Exception as error:
                name = repr(document.id) if document else "(unreadable)"
                raise OutputFailed(
                    f"Document {name} (number {finished.ordinal} of this rank) could not be written by "
                    f"{type(writer).__name__}: {type(error).__name__}: {error}. Its chunk's journal is kept: fix the "
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
                f"{error}. Its journal is kept: fix the writer and run the same command again."
            ) from error


def _fresh_copy(writer: DiskWriter, staged: StagedFiles) -> DiskWriter:
    """A writer with the user's settings and no state of earlier chunks, which writes to the staging folder."""
    # A deep copy, because writers keep counters, batches and open files in attributes of their own. The user's
    # writer was never written to, so there is nothing open to copy. Its file manager is replaced.
    original = writer.output_mg
    fresh: DiskWriter = copy.deepcopy(writer, {id(original): staged})
    use_shallow_adapter(fresh)
    return fresh


class _Target:
    """Where a rank's files are published. ``staging`` is the folder in which they are written first."""

    def __init__(self, staging_root: Path) -> None:
        # A folder for each process: one that lost its rank to another must not touch what that one stages.
        self.staging = staging_root / secrets.token_hex(4)

    def publish(self, staged: Path, name: str) -> Path:
        """Makes a staged file appear under its final name. Returns its local path, or the staged one if it has none."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Called before the files that earlier processes staged are removed."""

    def stop(self) -> None:
        """Ends the wait in ``publish``."""

    def call_to_list(self, call: Callable[[], FoundFiles]) -> FoundFiles:
        """Calls what lists the folder.

        Raises:
            StorageFailed, OutputFailed: it cannot be listed.
        """
        raise NotImplementedError

    def sync(self, published: list[Path]) -> None:
        """Makes the published names survive a power loss."""


class _LocalTarget(_Target):
    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / STAGING / name)
        self._folder = folder

    def call_to_list(self, call: Callable[[], FoundFiles]) -> FoundFiles:
        with explained("list", self._folder):
            return call()

    def publish(self, staged: Path, name: str) -> Path:
        final = self._folder / name
        files.disk.make_dirs(final.parent)
        files.disk.rename(staged, final)
        return final

    def sync(self, published: list[Path]) -> None:
        for folder in dict.fromkeys(path.parent for path in published):
            files.disk.sync_dir(folder)


class _RemoteTarget(_Target):
    def __init__(self, folder: DataFolder, scratch: Path) -> None:
        super().__init__(scratch / layout.STAGING)
        # Another rank or run that writes to the same folder has another probe.
        run = xxhash.xxh3_64_hexdigest(str(scratch).encode())
        self._remote = RemoteFolder(folder, f"{STAGING}/probe-{run}")

    def prepare(self) -> None:
        # A file that was being uploaded when a process ended is still staged.
        left = self.staging.parent
        found = (path.relative_to(left).parts for path in left.rglob("*") if path.is_file())
        self._remote.prepare(["/".join(parts[2:]) for parts in found] if left.exists() else None)

    def call_to_list(self, call: Callable[[], FoundFiles]) -> FoundFiles:
        return self._remote.list(call)

    def publish(self, staged: Path, name: str) -> Path:
        self._remote.upload(staged, name)
        return staged

    def stop(self) -> None:
        self._remote.stop()
