"""OutputFolder checks to which run an output folder belongs, and which files are in it.

It writes no output and needs no lease: most refusals come before a rank is taken.

A record beside the folder names the run to which the folder belongs (``owner``). In the folder, the
template and the rank in a file's name show which rank may have written the file. The file belongs
to this rank if a commit names it; until the rank is complete also if an intent to publish names it,
or the chunk in its name is not committed yet. All other files with the rank's names are refused:
when a rank starts, resumes and is complete, and before a job. Committed files that are missing, or
have another content, are also refused.
"""

import shlex
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path

from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.checksummed_lines import explained
from datatrove_ckpt.checkpoint.commits import read_commits
from datatrove_ckpt.checkpoint.job_file import recorded_output
from datatrove_ckpt.common.formatting import plural, repair_command
from datatrove_ckpt.common.retrying import RetryPolicy, file_system_call
from datatrove_ckpt.errors import OutputMismatch
from datatrove_ckpt.output.committed import (
    STRAY_ADVICE,
    CommittedFile,
    OutputListing,
    RankCommits,
    content_hash,
    file_problem,
    first_names,
    has_commits,
    list_output,
    listed,
    published_names,
)
from datatrove_ckpt.output.file_names import output_pattern, plain, rank_and_chunk
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_access import check_access
from datatrove_ckpt.output.interruptible_calls import InterruptibleCalls
from datatrove_ckpt.output.owner import OutputOwnership, RunOrigin
from datatrove_ckpt.output.writer_checks import stands_elsewhere


class OutputFolder:
    """The output folder of one step. Each refusal is an OutputMismatch.

    Args:
        root, mirror, run: see ``RunOrigin``.
        logging_dir: the executor's ``logging_dir``, for the repair command; None: no marker was
            written.
    """

    def __init__(
        self,
        writer: DiskWriter,
        root: Path,
        mirror: str | None = None,
        logging_dir: str | None = None,
        run: str | None = None,
    ) -> None:
        self.writer = writer
        self.root = root
        self.hub = HubFolder.of(writer.output_folder)
        self.location = str(writer.output_folder.resolve_paths(""))
        self.calls = InterruptibleCalls(self.location, self.hub)
        """Runs all calls and pauses for the folder and its target. ``ChunkOutput.stop`` ends them.
        """
        self._template = writer.output_filename.template
        self._owner = OutputOwnership(
            writer.output_folder, self._template, RunOrigin(root, mirror, run), self._is_unused
        )
        self._mirror = mirror
        self._logging_dir = logging_dir
        self._any_writer = output_pattern(self._template, any_writer=True)
        self.ours = output_pattern(self._template)
        """The names that the present ``output_filename`` may give."""

    def check_access(self) -> None:
        """Checks that the hub's folder can be written to, before it is listed."""
        if self.hub is not None:
            private = None
            if not has_commits(self.root):  # else a new repository would lack committed files
                private = getattr(self.writer, "private", None)
            check_access(self.hub, private, self.calls)

    def claim(self) -> None:
        if self.writer.output_folder.is_local():
            with explained("read", Path(self.location).absolute()):
                self._owner.claim()
        else:
            self.calls.retry("cannot be claimed for this run", self._owner.claim)

    def refuse_existing(self, rank: int, retry: str) -> None:
        """Checks the folder before the first start of a rank, and claims it.

        Args:
            retry: folder of a retry that starts, or "".

        Raises:
            OutputMismatch: files exist that this rank would write.
        """
        self.check_access()
        listing = self.look(self.by_name([RankCommits(self.root, rank)]), rank)
        self.refuse_foreign(rank, listing, root=retry)
        self.claim()

    def check_moved(self) -> None:
        """Checks names and sizes of committed files, before a job first starts with another output
        folder.

        Raises:
            OutputMismatch: committed files are not in this folder, or it belongs to another run.
        """
        ranks = layout.rank_numbers(self.root)
        committed = self.by_name(RankCommits(self.root, rank) for rank in ranks)
        if committed:
            self.refuse_lost(committed, self.look(committed, contents=False))

    def by_name(self, commits: Iterable[RankCommits]) -> dict[str, CommittedFile]:
        """Returns the committed files by their paths. Refuses two commits that name one file."""
        committed: dict[str, CommittedFile] = {}
        for file in chain.from_iterable(rank_commits.files for rank_commits in commits):
            other = committed.setdefault(file.path, file)
            if other is not file:
                raise OutputMismatch(
                    f"{self.location}: {file.path} was written by {other.place} and by "
                    f"{file.place}. One overwrote the other's documents: output_filename "
                    f"{self._template!r} gives both the same name. Choose one that begins with "
                    "${rank}/${chunk_index}/.",
                    starts_over="anew",
                )
        return committed

    def look(
        self,
        committed: Mapping[str, CommittedFile],
        rank: int | None = None,
        with_others: bool = True,
        contents: bool = True,
        policy: RetryPolicy | None = None,
    ) -> OutputListing:
        """Lists the output folder, see ``list_output``. Refuses a folder of another run.

        Args:
            contents: whether to read files whose stamp has changed.
            policy: retry policy, see ``InterruptibleCalls.retry``.
        """
        look = partial(self._look, committed, rank, with_others, contents)
        if self.writer.output_folder.is_local():
            with explained("read", Path(self.location).absolute()):
                return look()
        return listed(self.calls, look, committed.values(), policy)

    def _look(
        self,
        committed: Mapping[str, CommittedFile],
        rank: int | None,
        with_others: bool,
        contents: bool,
    ) -> OutputListing:
        self._owner.check()
        listing = list_output(self.writer, committed, rank, with_others)
        if contents:
            commits_of = cache(read_commits)
            for name in listing.touched:
                chunk = committed[name]
                folder = layout.rank_folder(self.root / chunk.root, chunk.rank)
                commit = commits_of(folder / layout.COMMITS)[chunk.chunk_index]
                expected = next(file.xxh128 for file in commit.files if plain(file.path) == name)
                actual = ""
                with suppress(FileNotFoundError), file_system_call():
                    actual = content_hash(self.writer.output_folder, name)
                if actual != expected:
                    listing.altered.add(name)
        checkpoint = None
        if self.root.is_relative_to(self.location):
            checkpoint = f"{self.root.relative_to(self.location).as_posix()}/"
        for name in listing.sizes:
            if name in committed:
                continue
            match = self._any_writer.fullmatch(name)
            if match is not None and (checkpoint is None or not name.startswith(checkpoint)):
                (root, number), _ = rank_and_chunk(match)
                listing.by_rank[number].append((root, name))
        return listing

    def _is_unused(self) -> bool:
        return not any(
            self._any_writer.fullmatch(name) for name in list_output(self.writer, {}).sizes
        )

    def refuse_lost(self, committed: Mapping[str, CommittedFile], listing: OutputListing) -> None:
        wrong = [file for file in committed.values() if not listing.is_right(file)]
        if not wrong:
            return
        first = wrong[0]
        recorded = recorded_output(self.root)
        if recorded and stands_elsewhere(recorded, self.writer.output_folder):
            raise OutputMismatch(
                f"{self.location} lacks output files that were committed, such as {first.path} "
                f"({first.place}). They were written to {recorded}, and that folder still exists. "
                "Nothing was changed. Set the output folder back to it; or copy all its "
                "files to the new folder, and run the same command again."
            )
        problems = [f"{file.path} {file_problem(file, listing.size(file))[1]}" for file in wrong]
        moved = ""
        output = None
        if not listing.sizes:
            moved = "The folder is empty: was it moved? Set the output folder to its new location. "
            output = self.location  # the folder may be missing, and then repair needs its name
        repair = repair_command(str(self.root), logging_dir=self._logging_dir, output=output)
        retry = ""
        if any(file.root for file in wrong):
            retry = ", and with retry_dead_letters when it is done"
        raise OutputMismatch(
            f"{self.location}: output files differ from what was committed ({len(wrong)} of "
            f"{len(committed)}): {first_names(problems)}. {moved}Put them back, or have them made "
            f"again: {repair}, then run the same command again{retry}. Files that seem unchanged "
            f"were not read: datatrove-ckpt verify {shlex.quote(str(self.root))} --full reads them."
        )

    def refuse_foreign(
        self,
        rank: int,
        listing: OutputListing,
        commits: RankCommits | None = None,
        is_complete: bool = False,
        root: str = "",
    ) -> None:
        """Refuses uncommitted files of a rank that are not its own.

        Args:
            commits: commits of the rank; None: the rank starts for the first time, and no file is
                its own.
            is_complete: whether all chunks of the rank are committed.
            root: folder of a retry that starts; "": the rank, and all its retries.
        """
        own_names: Container[str] = ()
        if commits is not None and listing.by_rank[rank]:
            own_names = self._own(commits, listing, is_complete)
        names = sorted(
            name
            for retry, name in listing.by_rank[rank]
            if root in ("", retry) and name not in own_names
        )
        if not names:
            return
        verify = shlex.join(["datatrove-ckpt", "verify", str(self.root)])
        mirror = ""
        if self._mirror:  # without it, a folder that another node has continued is used as it is
            mirror = f" If the mirror {self._mirror} could not be read, keep them until it can be."
        raise OutputMismatch(
            f"{self.location} holds {plural(len(names), 'file')} that output_filename "
            f"{self._template!r} may have named, and that no commit of task {rank} names: "
            f"{first_names(names, 20)}. Another run wrote them (datatrove's own InferenceRunner, "
            "or one whose checkpoint was deleted), or they were copied there. "
            f"{STRAY_ADVICE} ({verify} names all of them); or choose another output folder, or "
            f"bring the checkpoint back; and run the same command again.{mirror} To continue a "
            "run of datatrove's own, choose other folders, and set finished_from to the old ones."
        )

    def _own(
        self, commits: RankCommits, listing: OutputListing, is_complete: bool
    ) -> Container[str]:
        """Returns the uncommitted files that a rank may have published: the files of its intents;
        for a complete rank, and without intents, the files with its names.
        """
        if not is_complete:
            published = published_names(self.root, commits.rank)
            if published is not None:
                return published
        own_names = []
        for _, name in listing.by_rank[commits.rank]:
            match = self.ours.fullmatch(name)
            if match is None:
                continue
            (root, _), chunk_index = rank_and_chunk(match)
            # The rank, or a retry of a complete rank, has yet to commit these.
            if not is_complete or (root, chunk_index) in commits.unfinished:
                own_names.append(name)
        return own_names
