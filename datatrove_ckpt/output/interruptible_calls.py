"""Runs library calls that cannot be stopped: a rank that stops leaves their threads behind.

``check_access`` checks without a trace whether a job may write to its folder on the hub.
``whoami-v2`` was rejected: it does not show whether the token fits this repository, and is limited.
"""

import shlex
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from loguru import logger

from datatrove_ckpt.checkpoint.open_checkpoint import RankLease
from datatrove_ckpt.checkpoint.publish_intents import PublicationStopped
from datatrove_ckpt.common import retrying
from datatrove_ckpt.common.threads import in_thread
from datatrove_ckpt.errors import OutputFailed
from datatrove_ckpt.output.hub import HubFolder, get, hub_failure

T = TypeVar("T")


def _advice(error: BaseException) -> str:
    status = retrying.http_status(error)
    if retrying.lacks_credentials(error):
        return "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
    if isinstance(error, PermissionError) or status in (401, 403):
        return (
            "Check the credentials. The hub needs HF_TOKEN, or a login (hf auth login), with "
            "write access. S3 needs s3:PutObject, s3:GetObject, s3:ListBucket, "
            "s3:AbortMultipartUpload, s3:ListBucketMultipartUploads."
        )
    if isinstance(error, FileNotFoundError) or status == 404:
        return (
            "Make the bucket, repository or branch, or correct the output folder (on S3 also "
            "AWS_ENDPOINT_URL)."
        )
    return "Check the network, the server's status, and HF_ENDPOINT."


class InterruptibleCalls:
    """Runs calls and pauses for one folder, which end when any thread calls ``stop``."""

    def __init__(self, location: str, hub: HubFolder | None = None) -> None:
        self.hub = hub
        self.location = location
        self._explain = retrying.failure_line if hub is None else hub_failure
        self._stopped: Future[Any] = Future()  # Any, because ``wait`` needs futures of one type

    @property
    def stopped(self) -> bool:
        return self._stopped.done()

    def stop(self) -> None:
        """Ends all waits. A request under way ends by itself, or with the process."""
        if not self._stopped.done():
            self._stopped.set_result(None)

    def sleep(self, seconds: float) -> None:
        wait([self._stopped], timeout=seconds)

    def run(self, call: Callable[[], T], at_most_seconds: float | None = None) -> T:
        """Runs the call in a dedicated thread.

        Raises:
            PublicationStopped: ``stop`` was called before the call returned.
            TimeoutError: the call took too long. It may still have its effect.
            OSError: an error of the library.
        """

        def run() -> T:
            with retrying.file_system_call():
                return call()

        if self.stopped:
            raise PublicationStopped
        result = in_thread(run, "datatrove-ckpt upload")
        wait([result, self._stopped], timeout=at_most_seconds, return_when=FIRST_COMPLETED)
        if not result.done():
            if self.stopped:
                raise PublicationStopped
            raise TimeoutError(f"no answer within {at_most_seconds:.0f} s")
        return result.result()

    def retry(
        self,
        problem: str,
        call: Callable[[], T],
        policy: retrying.RetryPolicy | None = None,
        at_most_seconds: float | None = None,
        lease: RankLease | None = None,
    ) -> T:
        """Retries the call until it succeeds, fails permanently, or has failed for too long.

        Args:
            policy: retry policy; None: ``STORAGE``, on the hub ``HUB_LOOK``.
            at_most_seconds: limit of one call; None: no limit, on the hub the policy's patience.

        Raises:
            OutputFailed: the call failed; the cause is the last error.
            PublicationStopped: ``stop`` was called.
        """

        def pause(seconds: float) -> None:
            self.sleep(seconds)
            if lease is not None:
                lease.check()

        if self.hub is not None:
            policy = policy or retrying.HUB_LOOK
            at_most_seconds = at_most_seconds or policy.patience
        stoppable = replace(policy or retrying.STORAGE, sleep=pause)
        run = partial(self.run, call, at_most_seconds)
        try:
            return stoppable.run(run, f"{self.location}: {problem}", self._explain)
        except OSError as error:
            raise self.failed(problem, error) from error

    def failed(self, problem: str, error: OSError) -> OutputFailed:
        advice = "Run again."
        explained = f"{self._explain(error)}. {_advice(error)}"
        return OutputFailed(f"{self.location}: {problem}: {explained} {advice}")


_ANSWER_SECONDS = 60.0


def check_access(
    folder: HubFolder,
    private: bool | None = None,
    calls: InterruptibleCalls | None = None,
    only_look: bool = False,
) -> str:
    """Returns a sentence for people once the folder can be written to. Waits while the hub refuses
    temporarily.

    Args:
        private: whether a missing repository is made private; None: do not make it.
        only_look: make nothing, and wait for seconds only.

    Raises:
        OutputFailed: the folder cannot be written to.
        PublicationStopped: ``calls`` were stopped.
    """

    def check() -> str:
        return _ask(folder) or _make(folder, private, only_look)

    policy = retrying.HUB_LOOK
    if only_look:
        policy = retrying.HUB_PROBE
    calls = calls or InterruptibleCalls(folder.url, folder)
    return calls.retry("cannot be written to", check, policy, _ANSWER_SECONDS)


def _ask(folder: HubFolder) -> str | None:
    from huggingface_hub import constants, get_token, hf_raise_for_status
    from huggingface_hub.errors import BucketNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise OutputFailed(
            f"{folder.url}: HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it."
        )
    if get_token() is None:
        raise OutputFailed(
            f"{folder.url}: there is no token. Where the tasks run, export HF_TOKEN with one "
            f"that may write to {folder.repo}, or run: hf auth login."
        )
    if folder.is_bucket:
        try:
            folder.api().bucket_info(folder.repo)
        except BucketNotFoundError:
            return None
        return f"{folder.url} exists. The first file shows whether the token may write."
    response = get(f"{folder.api_url}/auth-check/write")
    if response.headers.get("X-Error-Code") == "RepoNotFound":
        return None
    if response.status_code == 404:
        return f"{folder.url}: the first file shows whether the token may write."
    hf_raise_for_status(response)
    return f"{folder.url} exists, and the token may write to it."


def _make(folder: HubFolder, private: bool | None, only_look: bool) -> str:
    kind = f"{folder.kind} repository"
    make = f"hf repos create {shlex.quote(folder.repo)} --repo-type {folder.kind}"
    if folder.is_bucket:
        kind = folder.kind
        make = f"hf buckets create {shlex.quote(folder.repo)}"
    if private is None or folder.revision is not None:  # a run makes no branches
        raise OutputFailed(
            f"{folder.url}: there is no {kind} {folder.repo}, or it is hidden from this token. "
            f"Correct the name or token; restore it, if the run had it; or make it: {make} "
            "--private"
        )
    how = "public"
    if private:
        how = "private"
    if only_look:
        return f"{folder.url}: there is no {kind} {folder.repo} yet; a run makes it {how}."
    if folder.is_bucket:
        folder.api().create_bucket(folder.repo, private=private, exist_ok=True)
    else:
        folder.api().create_repo(folder.repo, private=private, repo_type=folder.kind, exist_ok=True)
    made = f"{folder.url}: made the {how} {kind} {folder.repo}."
    logger.info(made)
    return made
