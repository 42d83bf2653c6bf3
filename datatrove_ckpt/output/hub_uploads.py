"""Reads from a folder on the hub, and uploads files' content before the commit that names them.

``preupload_lfs_files`` reads the staged file itself, and does not send content that the hub has.
Small text files travel inside the commit, outside LFS.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from datatrove_ckpt.checkpoint.commits import OutputFile
from datatrove_ckpt.checkpoint.open_checkpoint import RankLease
from datatrove_ckpt.common import retrying
from datatrove_ckpt.output.committed import FoundFiles
from datatrove_ckpt.output.hub import HubFile, HubFolder
from datatrove_ckpt.output.names import plain
from datatrove_ckpt.output.stoppable import StoppableCalls

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

T = TypeVar("T")

ANSWER_SECONDS = 600.0
"""How long the hub may take to answer a request. The client itself would wait for ever."""

SLOWEST_BYTES_PER_SECOND = 50_000
"""An upload that is slower than this is given up and made again."""

LAG_LOOKS = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds before each further look at files that the hub does not show yet: it may list a folder as
it was before its newest commits.
"""


class UploadedFile:
    """A file whose content is on the hub, or goes there inside its commit."""

    def __init__(self, name: str, operation: CommitOperationAdd) -> None:
        self.name = name
        self._operation = operation
        self._is_regular = getattr(operation, "_upload_mode", None) == "regular"
        self.bytes_in_commit = 0
        if self._is_regular:
            self.bytes_in_commit = operation.upload_info.size
        self.earlier: Collection[str] = ()
        """The hashes of content that the rank may have published under this name before."""
        self.is_ignored = bool(getattr(operation, "_should_ignore", False))
        """Whether the repository's .gitignore leaves the file out of every commit, without an
        error.
        """

    def operation(self) -> CommitOperationAdd:
        """Returns a new operation, because the client refuses committed operations."""
        return copy.copy(self._operation)

    def is_there(self, found: HubFile | None) -> bool:
        return found is not None and found.hash == self.content_hash

    def may_replace(self, found: HubFile) -> bool:
        """Whether the hub has this file, or one that the rank has published before."""
        return self.is_there(found) or found.hash in self.earlier

    @cached_property
    def content_hash(self) -> str:
        """The file's hash in the hub's listing: SHA-256, or git's hash outside of LFS."""
        if not self._is_regular:
            return str(self._operation.upload_info.sha256.hex())
        with self._operation.as_file() as file:
            content = file.read()
        return hashlib.sha1(
            b"blob %d\0" % len(content) + content, usedforsecurity=False
        ).hexdigest()


class HubReads:
    """Reads from one folder, and waits for a hub that does not answer."""

    def __init__(
        self, folder: HubFolder, calls: StoppableCalls, lease: RankLease | None = None
    ) -> None:
        self.folder = folder
        self.calls = calls
        self.lease = lease

    def looked(
        self,
        what: str,
        call: Callable[[], T],
        policy: retrying.RetryPolicy | None = None,
        at_most_seconds: float | None = None,
    ) -> T:
        """Calls until it works.

        Args:
            policy: None: ``HUB_LOOK``, before or after generation.
            at_most_seconds: for one call; None: the patience of the policy.

        Raises:
            OutputFailed: the call cannot work, or has failed for too long.
            Stopping: the calls were stopped.
        """
        policy = policy or retrying.HUB_LOOK
        at_most_seconds = at_most_seconds or policy.patience
        folder = self.folder
        what = f"{folder.url}: {what}"
        return self.calls.retry(
            what, call, policy, hub_failure, folder.advice, at_most_seconds, self.lease
        )

    def listed(
        self,
        call: Callable[[], FoundFiles],
        files: Iterable[OutputFile],
        policy: retrying.RetryPolicy | None = None,
    ) -> FoundFiles:
        """Lists the folder, and looks up missing files again."""
        found = self.looked("cannot be listed", call, policy)
        for seconds in LAG_LOOKS:
            files = [file for file in files if not found.is_right(file)]
            if not files:
                break
            self.calls.sleep(seconds)
            names = [plain(file.path) for file in files]
            found.show(self.looked("cannot be listed", partial(self.folder.newest, names)))
        return found


def preupload(folder: HubFolder, paths: Mapping[str, Path]) -> list[UploadedFile]:
    """Uploads the content of files, by their names in the folder. Raises OSError."""
    from huggingface_hub import CommitOperationAdd

    added = {
        name: CommitOperationAdd(folder.full_name(name), str(path)) for name, path in paths.items()
    }
    folder.api().preupload_lfs_files(
        folder.repo,
        added.values(),
        repo_type=folder.kind,
        revision=folder.branch,
        free_memory=False,
    )
    return [UploadedFile(name, operation) for name, operation in added.items()]


def seconds_to_send(size: int) -> float:
    """Returns how long a call may take that sends so many bytes."""
    return ANSWER_SECONDS + size / SLOWEST_BYTES_PER_SECOND


def hub_failure(error: BaseException) -> str:
    if retrying.http_status(error) in (409, 412):
        return f"another process committed at the same moment (HTTP {retrying.http_status(error)})"
    return retrying.library_line(error)
