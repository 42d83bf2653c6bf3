"""Where a rank's staged files are published: a local folder, a remote one, or the hub."""

from __future__ import annotations

import filecmp
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import xxhash
from datatrove.io import DataFolder
from loguru import logger

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.checkpoint.disk_errors import explained
from datatrove_ckpt.checkpoint.placement import Placement
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.output.committed import RankCommits
from datatrove_ckpt.output.hub import HubFolder
from datatrove_ckpt.output.hub_commits import HubCommits, HubUploads
from datatrove_ckpt.output.hub_pace import CommitPace
from datatrove_ckpt.output.listing import FoundFiles
from datatrove_ckpt.output.names import STAGING, plain
from datatrove_ckpt.output.stoppable import StoppableCalls
from datatrove_ckpt.output.upload import RemoteFolder


class Target:
    """Where a rank's files are published. ``staging`` is the folder in which they are written first."""

    def __init__(self, staging_root: Path) -> None:
        # A folder for each process: one that lost its rank to another must not touch what that one stages.
        self.staging = staging_root / secrets.token_hex(4)
        self.is_first = False
        """Nothing was published by earlier attempts: a file that is there, with other content, is another job's."""

    @property
    def placement(self) -> Placement:
        """Puts what was published in place."""
        return Placement()

    def publish(self, chunk_index: int, staging: Path, staged: Mapping[str, Path]) -> dict[str, str]:
        """Publishes a chunk's files: they appear under their names, or will when ``placement`` puts them in place.

        Returns the hub's hashes of them, by name; elsewhere none.

        Args:
            staging: the folder of the chunk's staged files, which is removed once nobody needs them.
            staged: paths of the staged files, by their names in the folder.
        """
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

    def settle(self, commits: RankCommits, found: FoundFiles) -> None:
        """Corrects a listing that may show an earlier state of the folder."""

    def others_files(self, staged: Mapping[str, Path]) -> list[str]:
        """The names of those files that another job has put there meanwhile, as far as that is known."""
        return []


class LocalTarget(Target):
    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / STAGING / name)
        self._folder = folder

    def call_to_list(self, call: Callable[[], FoundFiles]) -> FoundFiles:
        with explained("list", self._folder):
            return call()

    def others_files(self, staged: Mapping[str, Path]) -> list[str]:
        # Later attempts may find what an earlier one has renamed and not committed.
        return [name for name, path in staged.items() if self.is_first and not self._may_rename(path, name)]

    def _may_rename(self, staged: Path, name: str) -> bool:
        final = self._folder / name
        with explained("read", final):
            return not final.exists() or filecmp.cmp(staged, final, shallow=False)

    def publish(self, chunk_index: int, staging: Path, staged: Mapping[str, Path]) -> dict[str, str]:
        published = [self._rename(path, name) for name, path in staged.items()]
        for folder in dict.fromkeys(path.parent for path in published):  # that the names survive a power loss
            files.disk.sync_dir(folder)
        files.disk.remove_tree(staging)
        return {}

    def _rename(self, staged: Path, name: str) -> Path:
        final = self._folder / name
        files.disk.make_dirs(final.parent)
        files.disk.rename(staged, final)
        return final


class RemoteTarget(Target):
    """``probe``: a name in the folder that only this rank of this run uses."""

    def __init__(self, folder: DataFolder, scratch: Path, probe: str) -> None:
        super().__init__(scratch / layout.STAGING)
        self._remote = RemoteFolder(folder, probe)

    def prepare(self) -> None:
        # A file that was being uploaded when a process ended is still staged.
        left = self.staging.parent
        found = (path.relative_to(left).parts for path in left.rglob("*") if path.is_file())
        self._remote.prepare(["/".join(parts[2:]) for parts in found] if left.exists() else None)

    def call_to_list(self, call: Callable[[], FoundFiles]) -> FoundFiles:
        return self._remote.list(call)

    def publish(self, chunk_index: int, staging: Path, staged: Mapping[str, Path]) -> dict[str, str]:
        for name, path in staged.items():
            self._remote.upload(path, name)
        files.disk.remove_tree(staging)
        return {}

    def stop(self) -> None:
        self._remote.stop()


class HubTarget(Target):
    """A folder on the Hugging Face hub. Files are uploaded one chunk at a time, and committed many chunks at a time.

    Args:
        pace: when uploaded files are committed.
    """

    def __init__(self, folder: HubFolder, scratch: Path, rank: int, pace: CommitPace) -> None:
        super().__init__(scratch / layout.STAGING)
        self._calls = StoppableCalls()
        self._uploads = HubUploads(folder, self._calls)
        self._commits = HubCommits(self._uploads, pace, rank, self._calls)

    @property
    def placement(self) -> Placement:
        return self._commits

    def prepare(self) -> None:
        self._uploads.prepare()

    def call_to_list(self, call: Callable[[], FoundFiles]) -> FoundFiles:
        return self._uploads.looked("cannot be listed", call)

    def publish(self, chunk_index: int, staging: Path, staged: Mapping[str, Path]) -> dict[str, str]:
        uploaded = self._uploads.upload(staged)
        hashes = {file.name: file.content_hash for file in uploaded}
        self._commits.uploaded(chunk_index, uploaded, partial(files.disk.remove_tree, staging))
        return hashes

    def settle(self, commits: RankCommits, found: FoundFiles) -> None:
        """The hub may not show yet what it has committed. It is asked again for a while; then its answer counts."""
        found.show(self._uploads.look_again(one.file for one in commits.files if not found.is_right(one.file)))
        lost = {plain(one.file.path): one.file for one in commits.files if not found.is_right(one.file)}
        trusted = self._not_shown_yet(lost.keys() - found.sizes.keys())
        if trusted:
            logger.info(
                f"{self._uploads.folder.url} does not show {plural(len(trusted), 'file')} yet whose commit it has "
                "confirmed. Check them later with datatrove-ckpt verify."
            )
            found.sizes |= {name: lost[name].size for name in trusted}

    def _not_shown_yet(self, lost: set[str]) -> set[str]:
        """Those of the files that this process has committed to a state that the hub does not show yet.

        If it shows that state, or one that came later, they are gone: deleted, or the repository was made anew.
        """
        confirmed = {plain(name): one for name, one in self._commits.confirmed.items()}
        if self._uploads.folder.is_bucket or not lost & confirmed.keys():
            return set()
        history = self._uploads.looked("cannot be listed", self._uploads.read_history)
        return {name for name in lost & confirmed.keys() if self._uploads.is_earlier(history, confirmed[name])}

    def stop(self) -> None:
        self._commits.stop()


def make_target(folder: DataFolder, scratch: Path, rank: int, pace: CommitPace) -> Target:
    """The target for a writer's output folder. ``scratch``: below it, files for a remote folder are staged."""
    # Another run may write other files into the same folder. It must not remove what this one stages.
    run = xxhash.xxh3_64_hexdigest(str(scratch).encode())
    if folder.is_local():
        return LocalTarget(Path(folder.resolve_paths("")).absolute(), f"{rank:05d}-{run}")
    if (hub := HubFolder.of(folder)) is not None:
        return HubTarget(hub, scratch, rank, pace)
    return RemoteTarget(folder, scratch, f"{STAGING}/probe-{run}")
