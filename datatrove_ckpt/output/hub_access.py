"""Checks without a trace whether a job may write to its folder on the hub.

``whoami-v2`` was rejected: it does not show whether the token fits this repository, and is limited.
"""

import shlex

from loguru import logger

from datatrove_ckpt.common import retrying
from datatrove_ckpt.errors import OutputFailed
from datatrove_ckpt.output.hub import HubFolder, get
from datatrove_ckpt.output.interruptible_calls import InterruptibleCalls

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
        message = _ask(folder)
        if message is not None:
            return message
        return _make(folder, private, only_look)

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
            f"{folder.url}: there is no token for the hub. Export HF_TOKEN with one that may "
            f"write to {folder.repo}, or run: hf auth login. Tasks on other nodes need it there."
        )
    if folder.is_bucket:
        try:
            folder.api().bucket_info(folder.repo)
        except BucketNotFoundError:
            return None
        return f"{folder.url} exists. Whether the token may write to it shows with the first file."
    response = get(f"{folder.api_url}/auth-check/write")
    if response.headers.get("X-Error-Code") == "RepoNotFound":
        return None
    if response.status_code == 404:
        return f"{folder.url}: whether the token may write to this hub shows with the first file."
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
            f"{folder.url}: there is no {kind} {folder.repo}, or this token may not see it. "
            "Correct the name or the token; restore it, if the run has written there; or make it: "
            f"{make} --private"
        )
    how = "public"
    if private:
        how = "private"
    if only_look:
        return f"{folder.url}: there is no {kind} {folder.repo} yet; a run makes it, {how}."
    if folder.is_bucket:
        folder.api().create_bucket(folder.repo, private=private, exist_ok=True)
    else:
        folder.api().create_repo(folder.repo, private=private, repo_type=folder.kind, exist_ok=True)
    made = f"{folder.url}: made the {how} {kind} {folder.repo}, which was not there."
    logger.info(made)
    return made
