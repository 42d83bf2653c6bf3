"""Reads and writes a folder on the Hugging Face hub: its repository, and the files in it.

Listings come from ``HfApi``, because ``HfFileSystem`` caches listings until the process ends. The
hub's own listing may be one commit behind. The client reads the token, HF_TOKEN or the saved login,
for each call.

The hub allows a free account 128 commits per hour and repository, and then refuses commits for up
to an hour. So each rank counts the last hour's commits in the repository's history, and waits once
there are ``per_hour``. A commit succeeds only if no other commit followed the count, so the ranks
together keep the limit. A rank with more documents waits at half of the number without loss: the
other half is for ranks at their end, which block GPUs.
"""

from __future__ import annotations

import math
import posixpath
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from datatrove.io import DataFolder

from datatrove_ckpt.checkpoint.commits import stamp_of
from datatrove_ckpt.common.redaction import redact, remember
from datatrove_ckpt.common.retrying import JITTER, http_status, library_line
from datatrove_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import HfApi


HOUR = 3600.0

_RANK = re.compile(r": rank (\d+), chunks? ")


def commit_title(files: str, rank: int, chunks: str) -> str:
    """Returns the title of a commit, which shows its rank to others; ``files`` is "3 files"."""
    return f"Add {files}: rank {rank}, chunks {chunks}"


class MadeCommit(NamedTuple):
    """A commit on the hub, made ``at`` this time of the hub's clock, in Unix seconds."""

    oid: str
    at: float
    title: str


class CommitHistory(NamedTuple):
    """The newest commits of a branch on the hub.

    Attributes:
        now: the hub's clock, in Unix seconds.
        made: commits of the last hour, and at least the newest commit, from the newest to the
            oldest.
    """

    now: float = 0.0
    made: tuple[MadeCommit, ...] = ()

    @property
    def head(self) -> str | None:
        if not self.made:
            return None
        return self.made[0].oid

    @property
    def of_last_hour(self) -> list[MadeCommit]:
        return [commit for commit in self.made if self.now - commit.at < HOUR]


@dataclass(frozen=True)
class CommitPace:
    """Decides when a rank commits.

    Args:
        seconds: time that uploaded files wait for more files of their rank.
        per_hour: number of commits of all users to the repository in an hour after which every rank
            waits.
    """

    seconds: float = 300.0
    per_hour: int = 112

    def seconds_of_next(self) -> float:
        """Returns the wait for the next commit, varied so that ranks do not commit together."""
        return self.seconds * JITTER.uniform(0.5, 1)

    def seconds_until_turn(self, history: CommitHistory, ends: bool = False) -> float:
        """Returns the seconds after which the rank should check again; 0 if it may commit now.

        Each commit that becomes older than an hour permits another commit. If n ranks have
        committed, each waits for a random moment among the next n such moments.

        Args:
            ends: whether the rank has nothing else to do.
        """
        made = history.of_last_hour[::-1]
        max_commits = self.per_hour
        if not ends:
            max_commits = math.ceil(self.per_hour / 2)
        over = len(made) - max_commits
        if over < 0:
            return 0.0
        competing = {"".join(_RANK.findall(commit.title)) for commit in made}
        turn = min(over + JITTER.randrange(len(competing)), len(made) - 1)
        # The hub's dates may be rounded down.
        return made[turn].at + HOUR - history.now + JITTER.uniform(0, 2)


HUB = "hf://"
BUCKET = "bucket"
MAIN = "main"

_PATHS_AT_ONCE = 500
_READ_SECONDS = 60.0


@dataclass(frozen=True)
class HubFile:
    """A file on the hub.

    Attributes:
        oid: SHA-256, in hexadecimal, of a file in LFS or Xet; None in git and in a bucket.
        blob: git's own hash of the file's entry; None in a bucket.
        stamp: ``OutputFile.stamp`` from Xet's hash of the content, for a file in a bucket; else 0.
    """

    size: int
    oid: str | None = None
    blob: str | None = None
    stamp: int = 0

    @property
    def hash(self) -> str:
        return self.oid or self.blob or ""

    def holds(self, size: int, digest: str) -> bool:
        listed_hash = None
        if len(digest) == 64:
            listed_hash = self.oid
        elif self.oid is None:
            listed_hash = self.blob
        return self.size == size and (not digest or listed_hash in (None, digest))


@dataclass(frozen=True)
class HubFolder:
    """A folder in a repository or a bucket.

    Attributes:
        revision: a branch, a tag or a commit; None: main, or a bucket.
        path: the folder in the repository; "" for its root.
        endpoint: URL of the hub; None: HF_ENDPOINT, or the public hub.
    """

    kind: str
    repo: str
    revision: str | None = None
    path: str = ""
    endpoint: str | None = None

    @classmethod
    def parse(cls, url: str, endpoint: str | None = None) -> HubFolder:
        """Parses ``hf://[datasets/|models/|spaces/|buckets/]OWNER/NAME[@REVISION][/FOLDER]``.

        Raises:
            ConfigError: the URL names no repository.
        """
        from huggingface_hub import parse_hf_uri

        try:
            uri = parse_hf_uri(url.rstrip("/"))
        except ValueError:
            raise ConfigError(
                f"{url!r} names no repository. Write hf://datasets/OWNER/NAME@REVISION/FOLDER, "
                "of which the revision and the folder may be left out."
            ) from None
        return cls(uri.type, uri.id, uri.revision, uri.path_in_repo, endpoint)

    @classmethod
    def of(cls, folder: DataFolder) -> HubFolder | None:
        if folder.is_local():
            return None
        url = str(folder.resolve_paths(""))
        if not url.startswith(HUB):
            return None
        return cls.parse(url, folder.fs.storage_options.get("endpoint"))

    @property
    def url(self) -> str:
        url = f"{HUB}{self.kind}s/{self.repo}"
        if self.revision:
            url += f"@{self.revision.replace('/', '%2F')}"
        if self.path:
            url += f"/{self.path}"
        return url

    @property
    def is_bucket(self) -> bool:
        return self.kind == BUCKET

    @property
    def branch(self) -> str:
        return self.revision or MAIN

    def api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, library_name="datatrove-ckpt")

    @property
    def api_url(self) -> str:
        return f"{self.api().endpoint}/api/{self.kind}s/{self.repo}"

    def full_name(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.path, name))

    def below(self, name: str) -> HubFolder:
        if not name:
            return self
        return replace(self, path=self.full_name(name))

    def files(self) -> dict[str, HubFile]:
        """Lists all files below the folder, by their names in it; none if the folder is missing.
        Raises OSError.
        """
        from huggingface_hub.errors import EntryNotFoundError

        start = f"{self.path}/" if self.path else ""
        entries: Iterable[object]
        try:
            if self.is_bucket:
                entries = self.api().list_bucket_tree(
                    self.repo, prefix=self.path or None, recursive=True
                )
            else:
                entries = self.api().list_repo_tree(
                    self.repo,
                    self.path or None,
                    recursive=True,
                    revision=self.revision,
                    repo_type=self.kind,
                )
            return {
                entry.path.removeprefix(start): _hub_file(entry)
                for entry in entries
                if hasattr(entry, "size") and entry.path.startswith(start)
            }
        except EntryNotFoundError as error:
            if http_status(error) not in (404, None):
                raise
            return {}

    def commit(self, operations: Sequence[Any], message: str, head: str | None = None) -> None:
        """Commits to the branch; with ``head``, only if this is its newest commit."""
        self.api().create_commit(
            self.repo,
            operations,
            commit_message=message,
            repo_type=self.kind,
            revision=self.branch,
            parent_commit=head,
        )

    def head(self) -> str | None:
        return self.api().repo_info(self.repo, revision=self.branch, repo_type=self.kind).sha

    def remove(self, paths: Sequence[str], message: str, head: str | None = None) -> None:
        from huggingface_hub import CommitOperationDelete

        if self.is_bucket:
            self.api().batch_bucket_files(self.repo, delete=list(paths))
        else:
            self.commit([CommitOperationDelete(path) for path in paths], message, head)

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        """Reads a file of a repository with one request. Raises OSError."""
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(
            self.repo,
            self.full_name(name),
            repo_type=self.kind,
            revision=self.revision,
            endpoint=self.endpoint,
        )
        # A ".gz" must arrive without decompression.
        headers = build_hf_headers(library_name="datatrove-ckpt") | {"Accept-Encoding": "identity"}
        with get_session().stream("GET", url, headers=headers, timeout=_READ_SECONDS) as response:
            hf_raise_for_status(response)
            yield from response.iter_bytes(size)

    def history(self, earlier: CommitHistory) -> CommitHistory:
        """Returns the branch's newest commit, and the commits of the last hour. Raises OSError."""
        from huggingface_hub import hf_raise_for_status

        numbers = {commit.oid: place for place, commit in enumerate(earlier.made)}
        url = f"{self.api_url}/commits/{quote(self.branch, safe='')}"
        now = 0.0
        made: list[MadeCommit] = []
        while url is not None:
            response = get(url)
            hf_raise_for_status(response)
            now = time.time()
            date = response.headers.get("Date")
            if date:  # the clock of this machine may be wrong
                now = parsedate_to_datetime(date).timestamp()
            for item in response.json():
                if item["id"] in numbers:
                    return CommitHistory(now, (*made, *earlier.made[numbers[item["id"]] :]))
                made.append(
                    MadeCommit(
                        item["id"], datetime.fromisoformat(item["date"]).timestamp(), item["title"]
                    )
                )
                if now - made[-1].at > HOUR:
                    return CommitHistory(now, tuple(made))
            url = response.links.get("next", {}).get("url")
        return CommitHistory(now, tuple(made))

    def newest(self, names: Sequence[str]) -> dict[str, HubFile]:
        """Returns the existing files at the newest commit: a branch's name may lag behind."""
        if self.is_bucket:
            return self.look_up(names)
        return self.look_up(names, self.head())

    def look_up(self, names: Sequence[str], revision: str | None = None) -> dict[str, HubFile]:
        """Returns the existing files, without listing the folder. Raises OSError."""
        files = {}
        for start in range(0, len(names), _PATHS_AT_ONCE):
            name_of = {self.full_name(name): name for name in names[start : start + _PATHS_AT_ONCE]}
            entries: Iterable[object]
            if self.is_bucket:
                entries = self.api().get_bucket_paths_info(self.repo, list(name_of))
            else:
                revision = revision or self.revision
                entries = self.api().get_paths_info(
                    self.repo, list(name_of), revision=revision, repo_type=self.kind
                )
            for entry in entries:
                if hasattr(entry, "size") and entry.path in name_of:
                    files[name_of[entry.path]] = _hub_file(entry)
        return files


def get(url: str) -> Any:
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers = build_hf_headers(library_name="datatrove-ckpt")
    return get_session().get(url, headers=headers, timeout=_READ_SECONDS)


def _hub_file(entry: Any) -> HubFile:
    size = int(entry.size)
    if not hasattr(entry, "blob_id"):
        return HubFile(size, stamp=stamp_of(getattr(entry, "xet_hash", None) or ""))
    if entry.lfs is None:
        return HubFile(size, blob=entry.blob_id)
    return HubFile(size, entry.lfs.sha256, entry.blob_id)


def hub_failure(error: BaseException) -> str:
    """Describes an error in one line, without the token, which a proxy may have quoted."""
    from huggingface_hub import get_token

    remember(get_token() or "")
    status = http_status(error)
    if status in (409, 412):
        return f"another process committed at the same moment (HTTP {status})"
    text = library_line(error)
    message = getattr(error, "server_message", None)
    if message:
        text = f"the hub answers {status}, {message}"
    return " ".join(redact(text).split()).rstrip(".")


def is_missing_repository(error: BaseException | None) -> bool:
    from huggingface_hub.errors import BucketNotFoundError, RepositoryNotFoundError

    return isinstance(error, RepositoryNotFoundError | BucketNotFoundError)
