"""ChunkOutput writes the documents of a finished chunk to staged files, and publishes the files.

Each chunk gets a fresh copy of the user's DiskWriter, with our file manager (``file_managers.py``).
Files are staged in the checkpoint's folder, and then get their names, or are uploaded
(``targets.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.intents import Intents
from datatrove_ckpt.checkpoint.journal import Finished
from datatrove_ckpt.checkpoint.lease import RankLease
from datatrove_ckpt.errors import OutputFailed, OutputMismatch
from datatrove_ckpt.output.arrow_types import NO_TYPES, Types
from datatrove_ckpt.output.chunk_writing import ChunkWriting
from datatrove_ckpt.output.committed import RankCommits, other_content, published_names
from datatrove_ckpt.output.file_managers import StagedFiles
from datatrove_ckpt.output.hub_pace import CommitPace
from datatrove_ckpt.output.listing import FoundFiles
from datatrove_ckpt.output.names import plain
from datatrove_ckpt.output.output_folder import OutputFolder
from datatrove_ckpt.output.removal import remove_output
from datatrove_ckpt.output.targets import make_target


class ChunkOutput:
    """Writes the chunks of one rank, one after the other.

    Args:
        folder: the rank's output folder. Its writer is never opened itself.
        pace: when files that are uploaded to the hub are committed.
    """

    def __init__(self, folder: OutputFolder, lease: RankLease, pace: CommitPace) -> None:
        self.names = folder.names
        self._folder = folder
        self._check = folder.check
        self._lease = lease
        self._rank = folder.rank
        self._writing = ChunkWriting(folder.writer, folder.rank, folder.names)
        self._taken: dict[str, tuple[str, int]] = {}
        self._has_published = False
        self._target = make_target(folder, lease, pace)
        self.placement = self._target.placement
        """Puts the files of written chunks in place."""

    def check_complete(self) -> None:
        """Call it when all chunks are committed.

        Raises OutputMismatch if the folder is not as the commits say.
        """
        self._check.refuse_unknown(*self._look())

    def _commits(self) -> RankCommits:
        return RankCommits(self._check.root, self._rank, read=self._lease.read_rank)

    def _look(self, others: bool = True) -> tuple[RankCommits, FoundFiles]:
        commits = self._commits()
        found = self._folder.look(commits, others)
        self._target.settle(commits, found)
        self._check.refuse_lost(self._check.by_name([commits]), found)
        return commits, found

    def prepare(self, given: Types = NO_TYPES) -> None:
        """Compares the folder with the commits, and removes what earlier processes staged.

        Args:
            given: types of the input's columns, by their paths in the writer's rows.

        Raises:
            OutputMismatch: the folder is not as the commits say, or belongs to another run.
            StorageFailed, OutputFailed: the folder cannot be written to. Checked before the first
                request.
        """
        is_first = self._folder.is_first
        if not is_first:
            self._folder.check_access()
        self._intents = Intents(self._folder.scratch)
        # On the hub, one listing compares all ranks' files elsewhere.
        is_elsewhere = self._folder.hub is None
        others = not is_first and (is_elsewhere or not self._intents.is_kept)
        commits = self._commits()
        if others or commits.files:
            commits, found = self._look(others)
            if others:
                self._refuse_strangers(commits, found)
        self._writing.resume(commits.files, given)
        if self.names.fields:  # otherwise the chunk index alone distinguishes names
            self._taken = {one.path: (one.root, one.chunk_index) for one in commits.files}
        if not is_first:
            self._folder.claim()
        if not self._intents.is_kept:
            self._intents.add({})
        self._target.prepare()
        # The looks at the output took their time, and what is staged may be a new owner's.
        self._lease.files.fence.check(thorough=True)
        files.disk.remove_tree(self._target.staging.parent)
        for folder in (self._target.staging.parent, self._target.staging):
            files.disk.make_dirs(folder, files.PRIVATE_FOLDER)

    def _refuse_strangers(self, commits: RankCommits, found: FoundFiles) -> None:
        """Refuses foreign files; without intents, all files of a rank are its own."""
        uncommitted = found.by_rank[self._rank]
        if not uncommitted:
            return
        names = {name for root, name in uncommitted if root == self._folder.retry}
        if not self._intents.is_kept:
            self._check.refuse_strangers(commits, found)
            # One write, because a crash between two would make the rest foreign.
            self._intents.add({name: self._target.hash_of(name) for name in names})
            return
        intended = names & self._intents.names
        others = [
            name
            for name in intended
            if self._target.hash_of(name) not in self._intents.hashes(name)
        ]
        if others:
            raise other_content(self._check.where, sorted(others))
        self._check.refuse_strangers(commits, found, published_names(self._check.root, self._rank))
        # With another output_filename, their documents are written to other files.
        remove_output(
            self._folder.writer.output_folder,
            [name for name in intended if not self._check.is_name_of_run(name)],
        )

    def stop(self) -> None:
        """Ends the wait for uploads and commits; the next process publishes those chunks again."""
        self._folder.calls.stop()
        self.placement.stop()

    def finish(self) -> None:
        """Call it when nothing is staged any more."""
        files.disk.remove_tree(self._target.staging.parent)
        self._target.finish()

    def write_chunk(self, chunk_index: int, documents: Iterable[Finished]) -> list[OutputFile]:
        """Writes and publishes a chunk (steps 2 and 3 of a commit). Returns its files; see
        ``placement``.

        Raises:
            OutputFailed: a document cannot be written, or the output folder refuses it. The journal
                stays.
            OutputMismatch: another job has written a file of this name, or owns the folder.
            StorageFailed: the disk refused a write.
        """
        staging = self._target.staging / f"chunk_{chunk_index:05d}"
        files.disk.remove_tree(staging)
        staged = StagedFiles(staging, self._folder.writer.output_mg)
        try:
            self._writing.write(staged, chunk_index, documents)
            self._refuse_taken(chunk_index, staged.finished)
            if not self._has_published:
                self._folder.claim()
                self._has_published = True
            return self._target.publish(chunk_index, staged, self._intents)
        except OutputMismatch:
            files.disk.remove_tree(staging)
            raise
        finally:
            staged.abandon()

    def _refuse_taken(self, chunk_index: int, names: Iterable[str]) -> None:
        if not self.names.fields:
            return
        mine = (self._folder.retry, chunk_index)
        for name in names:
            owner = self._taken.setdefault(plain(name), mine)
            if owner != mine:
                raise OutputFailed(
                    f"Chunks {owner[1]} and {chunk_index} of task {self._rank} would both write "
                    f"{name}: fields of documents run into the chunk index in output_filename "
                    f"{self.names.template!r}. Put a / or _ between them.",
                    starts_over="anew",
                )
