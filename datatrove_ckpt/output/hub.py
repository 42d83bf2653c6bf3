"""A folder on the Hugging Face hub: which repository it is in, and what lies there now.

Listings come from ``HfApi``. ``HfFileSystem`` keeps listings for the life of the process, so it may show a folder as it
was before a commit. The hub itself may also answer with a listing that is one commit behind.

The token is never kept here: the client reads HF_TOKEN or the saved login for each call.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from datatrove.io import DataFolder
from datatrove.pipeline.writers.disk_base import DiskWriter
from loguru import logger

from datatrove_ckpt import retrying
from datatrove_ckpt.checkpoint.commits import stamp_of
from datatrove_ckpt.doors import written
from datatrove_ckpt.errors import CkptError, ConfigError, OutputFailed
from datatrove_ckpt.formatting import plural
from datatrove_ckpt.output.hub_pace import HOUR, History, MadeCommit
from datatrove_ckpt.output.stoppable import StoppableCalls
from datatrove_ckpt.redaction import Redactor
from datatrove_ckpt.retrying import failure_line, http_status

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi


HUB = "hf://"
BUCKET = "bucket"
MAIN = "main"

_KINDS = {"datasets": "dataset", "models": "model", "spaces": "space", "buckets": BUCKET}
# A revision ends at the next /, but these two kinds of names hold slashes.
_REVISION = re.compile(r"refs/(?:convert/[\w.-]+|pr/\d+)|[^/]+")
_PATHS_AT_ONCE = 500
_READ_SECONDS = 60.0
_SHA256_DIGITS = 64


@dataclass(frozen=True)
class HubFile:
    """A file on the hub.

    Attributes:
        size: in bytes.
        oid: SHA-256 of the content of a file that is kept in LFS or Xet, in hexadecimal; None for a small file that git
            keeps, and in a bucket.
        blob: git's own hash of the file's entry; None in a bucket.
        stamp: see ``OutputFile``, of a file in a bucket, from the hash of its content in Xet; else 0.
    """

    size: int
    oid: str | None = None
    blob: str | None = None
    stamp: int = 0

    @property
    def hash(self) -> str:
        """As a commit keeps it; "" in a bucket."""
        return self.oid or self.blob or ""

    def holds(self, size: int, digest: str) -> bool:
        """Whether this is the file with that size in bytes and hash, as far as the hub tells.

        Args:
            digest: SHA-256, or git's hash of a file that is not in LFS; "": not known.
        """
        listed = self.oid if len(digest) == _SHA256_DIGITS else self.blob if self.oid is None else None
        return self.size == size and (not digest or listed is None or listed == digest)


@dataclass(frozen=True)
class HubFolder:
    """A folder in a repository or a bucket.

    Attributes:
        kind: "dataset", "model", "space" or "bucket".
        repo: "OWNER/NAME".
        revision: a branch, a tag or a commit; None: main. A bucket has none.
        path: the folder in the repository; "": its root.
        endpoint: URL of the hub; None: HF_ENDPOINT, or the public hub.
    """

    kind: str
    repo: str
    revision: str | None = None
    path: str = ""
    endpoint: str | None = None

    @classmethod
    def parse(cls, url: str, endpoint: str | None = None) -> HubFolder:
        """Reads ``hf://[datasets/|models/|spaces/|buckets/]OWNER/NAME[@REVISION][/FOLDER]``.

        Raises:
            ConfigError: the URL names no repository.
        """
        kind, rest = "model", url.removeprefix(HUB).strip("/")
        first, _, after = rest.partition("/")
        if first in _KINDS:
            kind, rest = _KINDS[first], after
        owner, _, rest = rest.partition("/")
        name, at, path = rest.partition("@")
        revision = None
        if at and "/" not in name and kind != BUCKET:
            match = _REVISION.match(path)
            revision, path = (unquote(match[0]), path[match.end() :]) if match else (None, path)
        else:
            name, _, path = rest.partition("/")
        if not owner or not name or (at and revision is None and "@" in name):
            raise ConfigError(
                f"{url!r} names no repository. Write hf://datasets/OWNER/NAME, then @REVISION if it is not main, then "
                "the folder: hf://datasets/OWNER/NAME@REVISION/FOLDER."
            )
        return cls(kind, f"{owner}/{name}", revision, path.strip("/"), endpoint)

    @classmethod
    def of(cls, folder: DataFolder) -> HubFolder | None:
        """The folder on the hub that a datatrove folder stands for; None if it is elsewhere.

        Raises:
            ConfigError: it names no repository.
        """
        if folder.is_local():
            return None
        url = str(folder.resolve_paths(""))
        if not url.startswith(HUB):
            return None
        return cls.parse(url, folder.fs.storage_options.get("endpoint"))

    @property
    def url(self) -> str:
        """As ``parse`` reads it."""
        prefix = next(plural for plural, kind in _KINDS.items() if kind == self.kind)
        revision = f"@{self.revision.replace('/', '%2F')}" if self.revision else ""
        return f"{HUB}{prefix}/{self.repo}{revision}" + (f"/{self.path}" if self.path else "")

    @property
    def is_bucket(self) -> bool:
        """A bucket has no commits and no revisions."""
        return self.kind == BUCKET

    @property
    def branch(self) -> str:
        """The revision that commits go to."""
        return self.revision or MAIN

    def api(self) -> HfApi:
        """A client. Its token is that of the environment or of the saved login, read again for each call."""
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, library_name="datatrove-ckpt")

    def advice(self, error: BaseException) -> str:
        """What to do after a call that failed for good."""
        status = http_status(error)
        if status == 401:
            return "The token is wrong, or has expired. Export HF_TOKEN with a valid one, or run: hf auth login."
        if status == 403:
            return (
                f"The token may not write to {self.repo}. Take one of role write, or a fine-grained one with write "
                f"access to {self.repo}, of somebody who may write there."
            )
        if status == 404 or isinstance(error, FileNotFoundError):
            return f"Make the repository and the branch, or correct {written.output_folder}."
        if isinstance(error, ImportError) or isinstance(error.__cause__, ImportError):
            return "Install the extra hub."
        return "Check the network, HF_ENDPOINT and https://status.huggingface.co."

    def full_name(self, name: str) -> str:
        """The path in the repository of a file of this folder."""
        return posixpath.normpath(posixpath.join(self.path, name))

    def below(self, name: str) -> HubFolder:
        """The folder of this name in it; "": itself."""
        return replace(self, path=self.full_name(name)) if name else self

    def files(self) -> dict[str, HubFile]:
        """Lists all files below the folder, by their names in it. A folder that does not exist holds none.

        Raises:
            OSError: the hub cannot be reached, or refuses (no such repository, no permission).
        """
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return dict(self._listed())
        except EntryNotFoundError as error:  # a folder appears with its first file; a repository would be another error
            if http_status(error) not in (404, None):
                raise
            return {}

    def _listed(self) -> Iterator[tuple[str, HubFile]]:
        start = f"{self.path}/" if self.path else ""
        entries: Iterable[Any]  # RepoFile, RepoFolder, BucketFile, BucketFolder
        if self.is_bucket:
            entries = self.api().list_bucket_tree(self.repo, prefix=self.path or None, recursive=True)
        else:
            entries = self.api().list_repo_tree(
                self.repo, self.path or None, recursive=True, revision=self.revision, repo_type=self.kind
            )
        for entry in entries:
            if hasattr(entry, "size") and entry.path.startswith(start):  # a file
                yield entry.path.removeprefix(start), _hub_file(entry)

    def commit(
        self, operations: Sequence[CommitOperationAdd | CommitOperationDelete], message: str, head: str | None = None
    ) -> None:
        """Commits to the branch; with ``head``, only if that is its newest commit.

        Raises:
            OSError: the hub refuses, or cannot be reached.
        """
        self.api().create_commit(
            self.repo, operations, commit_message=message, repo_type=self.kind, revision=self.branch, parent_commit=head
        )

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        """The content of a file in a repository, in blocks of at most ``size`` bytes. One request, nothing is kept.

        Raises:
            OSError: it cannot be read.
        """
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(
            self.repo, self.full_name(name), repo_type=self.kind, revision=self.revision, endpoint=self.endpoint
        )
        # The hub sends files as they are: a ".gz" must not be unpacked on the way.
        headers = build_hf_headers(library_name="datatrove-ckpt") | {"Accept-Encoding": "identity"}
        with get_session().stream("GET", url, headers=headers, timeout=_READ_SECONDS) as response:
            hf_raise_for_status(response)
            yield from response.iter_bytes(size)

    def history(self, known: History) -> History:
        """The branch's newest commit, and those of the last hour. One request for each 50 commits that are not known.

        Raises:
            OSError: the hub cannot be reached, or refuses.
        """
        from huggingface_hub import constants, get_session, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        headers = build_hf_headers(library_name="datatrove-ckpt")
        places = {commit.oid: place for place, commit in enumerate(known.made)}
        endpoint, branch = self.endpoint or constants.ENDPOINT, quote(self.branch, safe="")
        url: str | None = f"{endpoint}/api/{self.kind}s/{self.repo}/commits/{branch}"
        now = 0.0
        made: list[MadeCommit] = []
        while url is not None:
            response = get_session().get(url, headers=headers, timeout=_READ_SECONDS)
            hf_raise_for_status(response)
            now = _date(response.headers.get("Date")).timestamp()
            for item in response.json():
                if item["id"] in places:
                    return History(now, (*made, *known.made[places[item["id"]] :]))
                made.append(MadeCommit(item["id"], datetime.fromisoformat(item["date"]).timestamp(), item["title"]))
                if now - made[-1].at > HOUR:
                    return History(now, tuple(made))
            url = response.links.get("next", {}).get("url")
        return History(now, tuple(made))

    def look_up(self, names: Sequence[str], revision: str | None = None) -> dict[str, HubFile]:
        """Returns those files of the folder that exist among ``names``, without listing the folder.

        Raises:
            OSError: as ``files``.
        """
        found: dict[str, HubFile] = {}
        for start in range(0, len(names), _PATHS_AT_ONCE):
            wanted = {self.full_name(name): name for name in names[start : start + _PATHS_AT_ONCE]}
            for entry in self._looked_up(list(wanted), revision):
                if hasattr(entry, "size") and entry.path in wanted:  # a file
                    found[wanted[entry.path]] = _hub_file(entry)
        return found

    def _looked_up(self, paths: list[str], revision: str | None) -> Iterable[Any]:  # RepoFile, BucketFile
        if self.is_bucket:
            return self.api().get_bucket_paths_info(self.repo, paths)
        return self.api().get_paths_info(self.repo, paths, revision=revision or self.revision, repo_type=self.kind)


def _date(header: str | None) -> datetime:
    """The hub's own time: the clock of this machine may be wrong."""
    found = parsedate_to_datetime(header) if header else datetime.now(UTC)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _hub_file(entry: Any) -> HubFile:  # RepoFile or BucketFile
    lfs = getattr(entry, "lfs", None)
    if not hasattr(entry, "blob_id"):  # in a bucket
        return HubFile(int(entry.size), stamp=stamp_of(getattr(entry, "xet_hash", None) or ""))
    return HubFile(int(entry.size), lfs.sha256 if lfs is not None else None, entry.blob_id)


# May a job write to its folder on the hub? Asked before anything is paid for, without leaving a trace.
#
#     question                                    asked by
#     is there a token?                           no request
#     is the repository there, may it be written  GET auth-check/write: the hub's own answer for token and repository
#     is the revision a branch?                   GET refs, and only if the URL names a revision
#     is a bucket there?                          GET of the bucket; there is no question for the right to write to it
#
# So a rank asks once, or twice. ``whoami-v2`` was rejected: it tells what a token is, not whether this repository takes
# it (members of an organisation, resource groups), and the hub limits how often it may be asked.


_ANSWER_SECONDS = 60.0
_TIMEOUT_SECONDS = 30.0


def check_access(
    folder: HubFolder,
    private: bool | None = None,
    calls: StoppableCalls | None = None,
    only_look: bool = False,
    committed: Callable[[], int] | None = None,
) -> str:
    """Returns when the folder can be written to. Waits for a hub that is away or refuses for now.

    Args:
        private: how to make a repository that is missing; None: do not make it.
        calls: ends the wait when it is stopped.
        only_look: make nothing, and wait for seconds only.
        committed: counts the files that the job has committed there. Called if the repository is missing: a new one
            in its place would lack them.

    Returns:
        What was found, for people.

    Raises:
        OutputFailed: the folder cannot be written to. Says what to do.
        Stopping: ``calls`` was stopped.
    """
    calls = calls or StoppableCalls()
    access = _Access(folder, private, not only_look, committed)
    policy = retrying.HUB_PROBE if only_look else retrying.HUB_LOOK
    try:
        return policy.run(partial(calls.run, access.ask, _ANSWER_SECONDS), folder.url, access.shown, sleep=calls.sleep)
    except _Refused as error:
        raise OutputFailed(str(error)) from None
    except OSError as error:
        advice = f"{folder.advice(error)} Then run the same command again."
        raise OutputFailed(f"{folder.url}: {access.shown(error)}. {advice}") from error


def private_if_made(writer: DiskWriter) -> bool | None:
    """How datatrove's writers for the hub make a missing repository; None for other writers, which do not make any."""
    name = type(writer).__name__
    if name not in ("HuggingFaceDatasetWriter", "HuggingFaceBucketWriter"):
        return None
    return bool(getattr(writer, "private", True))


def is_missing_repository(error: BaseException | None) -> bool:
    """Whether the hub says that there is no such repository or bucket, at least for this token."""
    from huggingface_hub.errors import BucketNotFoundError, RepositoryNotFoundError

    return isinstance(error, RepositoryNotFoundError | BucketNotFoundError)


def repository_is_gone(folder: HubFolder, committed: int) -> str:
    """The message about a repository or a bucket that is missing, although the job has committed files there."""
    return _gone(folder, f"there is no {_kind(folder)} {folder.repo}, or this token may not see it", committed)


def _gone(folder: HubFolder, what: str, committed: int) -> str:
    return (
        f"{folder.url}: {what}, but this job has committed {plural(committed, 'file')} there. It was deleted or "
        f"renamed, or the token is another one. Restore it or rename it back, or set {written.output_folder} to "
        "its new "
        "name and accept_changes to true, or set HF_TOKEN to a token that may see it, and run again. If the files "
        "are lost, "
        f"start anew with another {written.folders}: everything is generated again."
    )


def _kind(folder: HubFolder) -> str:
    return "bucket" if folder.is_bucket else f"{folder.kind} repository"


class _Refused(PermissionError):
    """A user must act. An ``OSError``, because calls into libraries end with these only."""


@dataclass
class _Access:
    """The questions about one folder. The attributes are arguments of ``check_access``."""

    _folder: HubFolder
    _private: bool | None
    _make: bool
    _count_committed: Callable[[], int] | None

    def ask(self) -> str:
        from huggingface_hub import constants, get_token

        if constants.HF_HUB_OFFLINE:
            raise _Refused(f"{self._folder.url}: HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it.")
        if get_token() is None:
            raise _Refused(
                f"{self._folder.url}: there is no token for the hub. Export HF_TOKEN with one that may write to "
                f"{self._folder.repo}, or run: hf auth login. Tasks on other nodes need it there."
            )
        return self._check_bucket() if self._folder.is_bucket else self._check_repository()

    def _check_bucket(self) -> str:
        from huggingface_hub.errors import BucketNotFoundError

        try:
            self._folder.api().bucket_info(self._folder.repo)
        except BucketNotFoundError:
            return self._missing()
        return f"{self._folder.url} exists. Whether the token may write to a bucket shows with the first file."

    def _check_repository(self) -> str:
        from huggingface_hub import get_session, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        folder, headers = self._folder, build_hf_headers(library_name="datatrove-ckpt")
        url = f"{folder.api().endpoint}/api/{folder.kind}s/{folder.repo}/auth-check/write"
        response = get_session().get(url, headers=headers, timeout=_TIMEOUT_SECONDS)
        if response.headers.get("X-Error-Code") == "RepoNotFound":
            return self._missing()
        if response.status_code != 404:
            hf_raise_for_status(response)
        if folder.revision is not None:
            self._check_branch(folder.revision)
        if response.status_code == 404:
            return f"{self._folder.url}: whether the token may write to this hub shows with the first file."
        return f"{self._folder.url} exists, and the token may write to it."

    def _check_branch(self, revision: str) -> None:
        refs = self._folder.api().list_repo_refs(
            self._folder.repo, repo_type=self._folder.kind, include_pull_requests=revision.startswith("refs/pr/")
        )
        branches = {name for ref in refs.branches for name in (ref.name, ref.ref)}
        if revision in branches or revision in {ref.ref for ref in refs.pull_requests or []}:
            return
        if revision in {name for ref in refs.tags for name in (ref.name, ref.ref)}:
            raise _Refused(f"{self._folder.url}: {revision!r} is a tag. Files can only be added to a branch: name one.")
        if committed := self._committed():
            raise _Refused(_gone(self._folder, f"{self._folder.repo} has no branch {revision!r}", committed))
        what = ["hf", "repos", "branch", "create", self._folder.repo, revision, "--repo-type", self._folder.kind]
        raise _Refused(
            f"{self._folder.url}: {self._folder.repo} has no branch {revision!r}. Correct the name, or make the "
            f"branch: {shlex.join(what)}"
        )

    # a missing repository --------------------------------------------------------------------------------------------

    def _committed(self) -> int:
        try:
            return self._count_committed() if self._count_committed is not None else 0
        except CkptError as error:
            raise _Refused(f"{self._folder.url} has vanished, or this token may not see it. {error}") from None

    def _missing(self) -> str:
        if committed := self._committed():
            raise _Refused(repository_is_gone(self._folder, committed))
        kind = _kind(self._folder)
        how = "private" if self._private else "public"
        if self._private is None:
            raise _Refused(
                f"{self._folder.url}: there is no {kind} {self._folder.repo}, or this token may not see it. Correct "
                f"the name or the token, or make it: {self._command()}"
            )
        if self._folder.revision is not None:
            raise _Refused(
                f"{self._folder.url}: there is no {kind} {self._folder.repo}, so it has no branch "
                f"{self._folder.revision!r}. Make both: {self._command()}, then hf repos branch create."
            )
        if not self._make:
            return f"{self._folder.url}: there is no {kind} {self._folder.repo} yet; a run makes it, {how}."
        api = self._folder.api()
        create = api.create_bucket if self._folder.is_bucket else partial(api.create_repo, repo_type=self._folder.kind)
        create(self._folder.repo, private=self._private, exist_ok=True)
        logger.info(f"{self._folder.url}: made the {how} {kind} {self._folder.repo}, which was not there.")
        return f"{self._folder.url}: made the {how} {kind}."

    def _command(self) -> str:
        kind, of_kind = ("buckets", []) if self._folder.is_bucket else ("repos", ["--repo-type", self._folder.kind])
        return shlex.join(["hf", kind, "create", self._folder.repo, *of_kind, "--private"])

    # failures --------------------------------------------------------------------------------------------------------

    def shown(self, error: BaseException) -> str:
        """One line without the token, which a proxy may have quoted."""
        from huggingface_hub import get_token

        status, said = http_status(error), getattr(error, "server_message", None)
        answers = f"the hub answers {status}" + (f", {said}" if said else "")
        text = failure_line(error) if status is None else answers
        return " ".join(Redactor(get_token() or "")(text).split()).rstrip(".")
