"""Checks without a trace whether a job may write to its folder on the hub.

    question                                    asked by
    is there a token?                           no request
    is the repository there, may it be written  GET auth-check/write: the hub's own answer for token
                                                and repository
    is a bucket there?                          GET of the bucket; no request shows the right to
                                                write to it

``whoami-v2`` was rejected: it does not show whether the token fits this repository, and is limited.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from datatrove.pipeline.writers.disk_base import DiskWriter
from loguru import logger

from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.redaction import redact, remember
from datatrove_ckpt.common.retrying import failure_line, http_status
from datatrove_ckpt.errors import CkptError, OutputFailed
from datatrove_ckpt.output.hub import HubFolder, get
from datatrove_ckpt.output.stoppable import StoppableCalls

_ANSWER_SECONDS = 60.0


def check_access(
    folder: HubFolder,
    private: bool | None = None,
    calls: StoppableCalls | None = None,
    only_look: bool = False,
    committed: Callable[[], int] = lambda: 0,
) -> str:
    """Returns what was found, for people, when the folder can be written to. Waits for a hub that
    refuses for now.

    Args:
        private: how to make a missing repository; None: do not make it.
        only_look: make nothing, and wait for seconds only.
        committed: counts the job's committed files there: a new repository would lack them.

    Raises:
        OutputFailed: the folder cannot be written to.
        Stopping: ``calls`` were stopped.
    """
    policy = retrying.HUB_LOOK
    if only_look:
        policy = retrying.HUB_PROBE
    access = _Access(folder, private, not only_look, committed)
    calls = calls or StoppableCalls()
    return calls.retry(folder.url, access.ask, policy, _shown, folder.advice, _ANSWER_SECONDS)


def private_if_made(writer: DiskWriter) -> bool | None:
    """Returns how a writer for the hub makes a missing repository; None: not at all."""
    private: bool | None = getattr(writer, "private", None)
    return private


def repository_is_gone(folder: HubFolder, committed: int) -> str:
    return (
        f"{folder.url}: {_no_repository(folder)}, but this job has committed "
        f"{plural(committed, 'file')} there. It was deleted or renamed, or the token is another "
        "one. Restore it or rename it back, or set the output folder to its new name and "
        "accept_changes to true, or set HF_TOKEN to a token that may see it, and run again. If "
        "the files are lost, start over in other folders: everything is generated again."
    )


def _no_repository(folder: HubFolder) -> str:
    return f"there is no {_kind(folder)} {folder.repo}, or this token may not see it"


def _kind(folder: HubFolder) -> str:
    if folder.is_bucket:
        return "bucket"
    return f"{folder.kind} repository"


@dataclass
class _Access:
    _folder: HubFolder
    _private: bool | None
    _make: bool
    _count_committed: Callable[[], int]

    def ask(self) -> str:
        from huggingface_hub import constants, get_token
        from huggingface_hub.errors import BucketNotFoundError

        folder = self._folder
        if constants.HF_HUB_OFFLINE:
            raise OutputFailed(
                f"{folder.url}: HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it."
            )
        if get_token() is None:
            raise OutputFailed(
                f"{folder.url}: there is no token for the hub. Export HF_TOKEN with one that may "
                f"write to {folder.repo}, or run: hf auth login. Tasks on other nodes need it "
                "there."
            )
        if folder.is_bucket:
            try:
                folder.api().bucket_info(folder.repo)
            except BucketNotFoundError:
                return self._missing()
            return (
                f"{folder.url} exists. Whether the token may write to a bucket shows with the "
                "first file."
            )
        return self._check_repository()

    def _check_repository(self) -> str:
        from huggingface_hub import hf_raise_for_status

        folder = self._folder
        response = get(f"{folder.api_url}/auth-check/write")
        if response.headers.get("X-Error-Code") == "RepoNotFound":
            return self._missing()
        if response.status_code == 404:
            return (
                f"{folder.url}: whether the token may write to this hub shows with the first file."
            )
        hf_raise_for_status(response)
        return f"{folder.url} exists, and the token may write to it."

    # a missing repository ------------------------------------------------------------------------

    def _missing(self) -> str:
        folder = self._folder
        try:
            committed = self._count_committed()
        except CkptError as error:
            raise OutputFailed(
                f"{folder.url} has vanished, or this token may not see it. {error}"
            ) from None
        if committed:
            raise OutputFailed(repository_is_gone(folder, committed))
        kind = _kind(folder)
        if self._private is None or folder.revision is not None:  # a run makes no branches
            raise OutputFailed(
                f"{folder.url}: {_no_repository(folder)}. Correct the name or the token, or make "
                f"it: {self._command()}"
            )
        how = "public"
        if self._private:
            how = "private"
        if not self._make:
            return f"{folder.url}: there is no {kind} {folder.repo} yet; a run makes it, {how}."
        if folder.is_bucket:
            folder.api().create_bucket(folder.repo, private=self._private, exist_ok=True)
        else:
            folder.api().create_repo(
                folder.repo, private=self._private, repo_type=folder.kind, exist_ok=True
            )
        logger.info(f"{folder.url}: made the {how} {kind} {folder.repo}, which was not there.")
        return f"{folder.url}: made the {how} {kind}."

    def _command(self) -> str:
        folder = self._folder
        command = ["hf", "repos", "create", folder.repo, "--repo-type", folder.kind, "--private"]
        if folder.is_bucket:
            command = ["hf", "buckets", "create", folder.repo, "--private"]
        return shlex.join(command)


def _shown(error: BaseException) -> str:
    """Returns one line without the token, which a proxy may have quoted."""
    from huggingface_hub import get_token

    status = http_status(error)
    if status is None:
        text = failure_line(error)
    else:
        said = getattr(error, "server_message", None) or ""
        text = f"the hub answers {status}, {said}".rstrip(", ")
    remember(get_token() or "")
    return " ".join(redact(text).split()).rstrip(".")
