"""Reads and writes objects below a URL, through fsspec. Only this module changes them.

``put``, ``create``, ``copy``, ``delete`` and ``delete_tree`` are one effect each: it happened or it
did not, except ``put`` where a put is not atomic (local files; not S3), which a kill may cut.
``tests/crashes.py`` replaces them to crash before or within any effect. Credentials come from the
environment.

On the Hugging Face hub a mirror lies in a bucket. ``HfFileSystem`` finds objects only in listings,
which it caches and which may lag; so no known name is looked up there. A mirror in a repository can
only be read: each put would be a commit, and the hub allows 128 an hour.
"""

import errno
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path

import fsspec
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from datatrove_ckpt.common import JsonObject, redaction
from datatrove_ckpt.common.formatting import missing_package, no_bars_in_logs
from datatrove_ckpt.common.retrying import (
    file_system_call,
    http_status,
    hub_refusal,
    is_taken,
    lacks_bucket,
    s3_code,
)
from datatrove_ckpt.errors import ConfigError

CREATES_ONCE = frozenset({"s3", "s3a", "gs", "gcs"})
"""Protocols of the stores that write a file only if its name is free.

Other file systems of fsspec also accept the mode "create", but only check the name before a write.
"""
_SETTLES = 1.0  # seconds after which every process reads what was created elsewhere


class Creator:
    """Writes files of one file system whose names must be free.

    Attributes:
        creates_once: if several processes create one name, only one succeeds.
    """

    def __init__(self, fs: AbstractFileSystem) -> None:
        protocols = [fs.protocol] if isinstance(fs.protocol, str) else fs.protocol
        self.creates_once = not CREATES_ONCE.isdisjoint(protocols)

    def write(self, write: Callable[..., object]) -> bool:
        """Calls ``write``, where possible on condition that the name is free.

        Returns False if the store reports that the name is taken.
        """
        if not self.creates_once:
            write()
            return True
        try:
            write(mode="create")
        except OSError as error:
            if is_taken(error):
                return False
            if http_status(error) != HTTPStatus.NOT_IMPLEMENTED:
                raise
            self.creates_once = False  # a store with S3's protocol, but without conditions
            write()
        return True


class ObjectStore:
    """The objects below one URL, by their names. A name may contain folders.

    Args:
        apart: share no listing with other stores of this process. Some file systems cannot list a
            folder in two threads at one time.
    """

    def __init__(
        self, url: str, apart: bool = False, options: Mapping[str, object] | None = None
    ) -> None:
        self.url = url.rstrip("/")
        if self.url.endswith(":"):  # the root of a file system
            self.url = url
        self._is_local = get_protocol(url) in ("file", "local")
        options = dict(options or {})
        if self._is_local:
            options["auto_mkdir"] = True  # missing parents of a folder are made; a bucket is not
        with file_system_call():
            self._fs, root = url_to_fs(self.url, skip_instance_cache=apart, **options)
        no_bars_in_logs()
        self._root = root.rstrip("/")
        self._is_hub = self._fs.protocol == "hf"
        self._creator = Creator(self._fs)
        self._streamed = {}
        if self._is_hub:
            self._streamed["block_size"] = 0  # else sizes are looked up in a listing first

    def put(self, name: str, data: bytes | Path) -> None:
        path = self._path(name)
        try:
            with file_system_call():
                self._write(path, data)
        except OSError as error:
            # After other errors the object may be whole; a removed part would count as damage.
            if self._is_local and error.errno in (errno.ENOSPC, errno.EDQUOT):
                with suppress(OSError):
                    self._fs.rm_file(path)
            raise

    def create(self, name: str, data: bytes) -> None:
        """Writes a small object unless there is one. Read it afterwards: another process may have
        been first.
        """
        if self.read(name, 1 << 20) is None:
            with file_system_call():
                self._creator.write(partial(self._write, self._path(name), data))
        if not self._creator.creates_once:
            time.sleep(_SETTLES)

    def _write(self, path: str, data: bytes | Path, **options: str) -> None:
        if self._is_local:  # it holds prompts and answers
            Path(self._root).mkdir(0o700, parents=True, exist_ok=True)
        if self._is_hub:  # ``pipe_file`` would leave a copy in the temporary folder if it fails
            from huggingface_hub import HfApi

            _, owner, name, key = path.split("/", 3)
            api = HfApi(endpoint=self._fs.endpoint)
            api.batch_bucket_files(f"{owner}/{name}", add=[(data, key)])
        elif isinstance(data, Path):
            self._fs.put_file(str(data), path)
        else:
            self._fs.pipe_file(path, data, **options)

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Returns the object's content; None if it is missing, or larger than ``max_bytes``."""
        try:
            with file_system_call():
                data = bytes(
                    self._fs.cat_file(
                        self._path(name), start=0, end=max_bytes + 1, **self._streamed
                    )
                )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if s3_code(error) == "InvalidRange":  # of an empty object
                return b""
            if http_status(error) == 404:
                return None
            raise
        if len(data) <= max_bytes:
            return data
        return None

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yields the object's content in blocks. Raises FileNotFoundError if there is no object."""
        path = self._path(name)
        try:
            with file_system_call(), self._fs.open(path, "rb", **self._streamed) as file:
                while block := file.read(8 << 20):
                    yield block
        except OSError as error:
            if http_status(error) == 404:
                raise FileNotFoundError(f"{self.url}/{name}") from error
            raise

    def md5(self, name: str) -> str:
        """Returns the object's MD5 if the store has it, as S3 for an object that was put in one
        part; else another text.
        """
        if self._is_hub:
            return ""
        with file_system_call():
            return str(self._fs.info(self._path(name)).get("ETag")).strip('"')

    def names(self, folder: str = "") -> dict[str, float]:
        """Returns the names of the objects and folders directly in the folder, sorted, with the
        times of their last writes, in Unix seconds of the store (infinity: not known).

        Raises:
            ConfigError: the bucket does not exist. Libraries also report that as a missing file.
        """
        path = self._path(folder)
        try:
            with file_system_call():
                self._fs.invalidate_cache(path)
                entries = self._fs.ls(path, detail=True)
        except FileNotFoundError as error:
            if lacks_bucket(error):
                advice = hub_refusal(error) or (
                    f"the bucket of {self.url} does not exist. Make it, or correct the setting "
                    "(on S3 also AWS_ENDPOINT_URL)"
                )
                raise ConfigError(f"checkpoints_remote_dir: {advice}.") from error
            return {}
        times = {entry["name"].rstrip("/").rpartition("/")[2]: _time_of(entry) for entry in entries}
        return dict(sorted(times.items()))

    def copy(self, name: str, to: str, data: bytes | Path) -> None:
        """Copies an object, which object stores do without a transfer.

        Args:
            data: its content, or a file of it. Buckets of the hub get it again: they skip content
                that they have, and a copy would list the folder first.
        """
        if self._is_hub:
            self.put(to, data)
            return
        with file_system_call():
            self._fs.cp_file(self._path(name), self._path(to))

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError), file_system_call():
            self._fs.rm_file(self._path(name))

    def delete_tree(self, folder: str) -> None:
        with suppress(FileNotFoundError), file_system_call():
            self._fs.invalidate_cache()
            self._fs.rm(self._path(folder), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")


def _time_of(entry: JsonObject) -> float:
    for key in ("uploaded_at", "LastModified", "updated", "last_modified", "mtime", "created"):
        value = entry.get(key)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, float):
            return value
    return math.inf


def is_in_repository(url: str) -> bool:
    return get_protocol(url) == "hf" and not url.startswith("hf://buckets/")


def _bucket_for(url: str) -> str:
    repository = r"^hf://(?:(?:datasets|models|spaces)/)?([^/]+/[^/@]+)(?:@[^/]+)?"
    return re.sub(repository, r"hf://buckets/\1", url)


def check_mirror(url: str, key: str = "checkpoints_remote_dir") -> None:
    """Refuses a URL to which no mirror can be written, without using the network. ``key`` names the
    setting.

    Raises:
        ConfigError: see ``check_url``; or it is a repository on the Hugging Face hub.
    """
    check_url(key, url)
    if is_in_repository(url):
        refuse_repository(
            key,
            url,
            "each of the mirror's writes",
            f" If an earlier version made a mirror here, copy it first: hf cp {url}/ "
            f"{_bucket_for(url)}/",
        )


def refuse_repository(key: str, url: str, writes: str, advice: str = "") -> None:
    """Raises ConfigError for a setting that names a repository, in which ``writes`` are commits."""
    raise ConfigError(
        f"{url} is in a repository, where {writes} would be a commit. Set it to a bucket: "
        f"{_bucket_for(url)} (hf buckets create OWNER/NAME --private).{advice}",
        setting=key,
    )


def check_url(key: str, url: str) -> None:
    """Refuses a URL that cannot work, without using the network. ``key`` names the setting in the
    error.

    Raises:
        ConfigError: fsspec has no file system of this name, its package is not installed, or the
            URL holds a secret or a variable.
    """
    if redaction.holds_credentials(url):
        raise ConfigError(f"{key}: the URL holds a user or a password. Export credentials instead.")
    redaction.refuse_variables(key, url)
    try:
        fsspec.get_filesystem_class(get_protocol(url))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{key}: {url!r} cannot be used: {missing_package(str(error)) or error}"
        ) from error
