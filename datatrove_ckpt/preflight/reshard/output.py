"""Output files of ranks that there will be no more, published by a chunk that was not committed before a kill.

Such a rank would publish them again, under the same names. Now its documents go to another rank, which writes them into
files of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.errors import OutputFailed
from datatrove_ckpt.output.committed import OutputCheck, RankCommits
from datatrove_ckpt.output.hub_access import hub_folder_of
from datatrove_ckpt.output.hub_commits import remove_files
from datatrove_ckpt.retrying import failure_line, file_system_call


def unfinished_files(writer: DiskWriter, root: Path, ranks: Sequence[int]) -> list[str]:
    """The files of chunks of these ranks that have a journal.

    Raises:
        OSError: the folder cannot be listed.
    """
    if not ranks:
        return []
    commits = [RankCommits(root, rank, []) for rank in ranks]
    check = OutputCheck(writer, root)
    found = check.look(commits)
    return [name for rank in commits for name in check.unfinished_files(rank, found)]


def remove_output(writer: DiskWriter, names: Sequence[str]) -> None:
    """Removes those of the files that are there.

    Raises:
        OutputFailed, StorageFailed: one could not be removed.
    """
    if (hub := hub_folder_of(writer)) is not None:
        remove_files(hub, names)
        return
    folder = writer.output_folder
    for name in names:
        if folder.is_local():
            files.disk.remove(Path(folder.resolve_paths(name)))
            continue
        try:
            with file_system_call():
                folder.rm_file(name)
        except FileNotFoundError:
            continue
        except OSError as error:
            where = folder.resolve_paths(name)
            raise OutputFailed(
                f"{where} could not be removed: {failure_line(error)}. Run the same command again."
            ) from error
