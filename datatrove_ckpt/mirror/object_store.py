"""Small objects below a URL, through fsspec. Only this module changes what is stored there.

Each method of ``Effects`` is one effect: it happened or it did not, except ``put`` where a put is
not atomic (local files; not S3), which a kill may cut. ``testing`` replaces ``effects`` to crash
before or within any effect. Credentials come from the environment.

On the Hugging Face hub a mirror lies in a bucket. ``HfFileSystem`` finds objects only in listings,
which it caches and which may lag; so no known name is looked up there. A mirror in a repository can
only be read: each put would be a commit, and the hub allows 128 an hour.
"""

from __future__ import annotations

import errno
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import fsspec
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from datatrove_ckpt.checkpoint.lines import Json
from datatrove_ckpt.common.formatting import missing_package, no_bars_in_logs
from datatrove_ckpt.common.redaction import holds_credentials, refuse_variables
from datatrove_ckpt.common.retrying import (
    file_system_call,
    http_status,
    hub_refusal,
    lacks_bucket,
    s3_code,
)
from datatrove_ckpt.errors import ConfigError


class Effects:
    def put(self, fs: AbstractFileSystem, path: str, data: bytes) -> None:
        if _is_hub(fs):  # ``pipe_file`` would leave a copy in the temporary folder if it fails
            _put_on_hub(fs, path, data)
        else:
            fs.pipe_file(path, data)

    def put_file(self, fs: AbstractFileSystem, path: str, file: Path) -> None:
        """Writes a file's content, which need not fit into memory, to the object."""
        if _is_hub(fs):
            _put_on_hub(fs, path, str(file))
        else:
            fs.put_file(str(file), path)

    def copy(self, fs: AbstractFileSystem, source: str, target: str) -> None:
        """Copies an object; object stores do this without a transfer."""
        fs.cp_file(source, target)

    def delete(self, fs: AbstractFileSystem, path: str) -> None:
        fs.rm_file(path)


def _put_on_hub(fs: AbstractFileSystem, path: str, content: bytes | str) -> None:
    from huggingface_hub import HfApi

    _, owner, name, key = path.split("/", 3)
    HfApi(endpoint=fs.endpoint).batch_bucket_files(f"{owner}/{name}", add=[(content, key)])


def _is_hub(fs: AbstractFileSystem) -> bool:
    return bool(fs.protocol == "hf")


effects = Effects()
"""Always used as ``object_store.effects``, so that a test can replace it."""


@contextmanager
def needs_bucket(url: str) -> Iterator[None]:
    """Wraps the first write: a bucket that does not exist is a mistake, not an outage.

    Raises:
        ConfigError: the bucket or folder does not exist.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(
            f"checkpoints_remote_dir: nothing can be written to {url}: {error}. Make the bucket or "
            "folder, or correct the setting, and run the same command again. Saved answers are "
            "kept on this node."
        ) from error


_BLOCK = 8 << 20
_REPOSITORY = re.compile(r"^hf://(?:(?:datasets|models|spaces)/)?([^/]+/[^/@]+)(?:@[^/]+)?")


class ObjectStore:
    """The objects below one URL, by their names. A name may contain folders.

    Args:
        apart: share no listing with others of this process. Some file systems cannot list a folder
            in two threads at one time.
        options: of the file system, such as an endpoint; by default from the environment.
    """

    def __init__(
        self, url: str, apart: bool = False, options: Mapping[str, object] | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._is_local = get_protocol(url) in ("file", "local")
        options = dict(options or {})
        if self._is_local:
            options["auto_mkdir"] = True  # missing parents of a folder are made; a bucket is not
        with file_system_call():
            self._fs, root = url_to_fs(self.url, skip_instance_cache=apart, **options)
        no_bars_in_logs()
        self._root = root.rstrip("/")
        self._streamed = {}
        if _is_hub(self._fs):
            self._streamed["block_size"] = 0  # else sizes are looked up in a listing first

    def put(self, name: str, data: bytes) -> None:
        with file_system_call():
            if self._is_local and not Path(self._root).exists():  # it holds prompts and answers
                Path(self._root).parent.mkdir(parents=True, exist_ok=True)
                Path(self._root).mkdir(mode=0o700, exist_ok=True)
            try:
                effects.put(self._fs, self._path(name), data)
            except OSError as error:
                # After other errors the object may be whole; a removed part would count as damage.
                if self._is_local and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    with suppress(OSError):
                        effects.delete(self._fs, self._path(name))
                raise

    def put_file(self, name: str, file: Path) -> None:
        with file_system_call():
            effects.put_file(self._fs, self._path(name), file)

    def get_file(self, name: str) -> Iterator[bytes]:
        with file_system_call(), self._fs.open(self._path(name), "rb", **self._streamed) as file:
            while block := file.read(_BLOCK):
                yield block

    def copy(self, name: str, to: str, data: bytes) -> None:
        # It would list the folder first; the bucket already skips content that it has.
        if _is_hub(self._fs):
            self.put(to, data)
            return
        with file_system_call():
            effects.copy(self._fs, self._path(name), self._path(to))

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError), file_system_call():
            effects.delete(self._fs, self._path(name))

    def read(self, name: str, most: int) -> bytes | None:
        try:
            with file_system_call():
                data = bytes(
                    self._fs.cat_file(self._path(name), start=0, end=most + 1, **self._streamed)
                )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if s3_code(error) == "InvalidRange":  # of an empty object
                return b""
            if http_status(error) == 404:
                return None
            raise
        if len(data) <= most:
            return data
        return None

    def names(self, folder: str = "") -> list[str]:
        """Returns the names of the objects and folders directly in the folder.

        Raises:
            ConfigError: the bucket does not exist. Libraries report that as a missing file, too.
        """
        path = self._path(folder)
        try:
            with file_system_call():
                self._fs.invalidate_cache(path)
                found = self._fs.ls(path, detail=False)
        except FileNotFoundError as error:
            if lacks_bucket(error):
                what = hub_refusal(error) or (
                    f"the bucket of {self.url} does not exist. Make the bucket, or correct the "
                    "setting (on S3 also AWS_ENDPOINT_URL), and run the same command again"
                )
                raise ConfigError(f"checkpoints_remote_dir: {what}.") from error
            return []
        return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in found)

    def times(self, folder: str = "") -> dict[str, float]:
        """Returns when each object directly in the folder was written, in Unix seconds of the
        store; else infinity.
        """
        path = self._path(folder)
        try:
            with file_system_call():
                self._fs.invalidate_cache(path)
                entries = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        return {str(entry["name"]).rpartition("/")[2]: _written_at(entry) for entry in entries}

    def below(self, folder: str) -> list[str]:
        with file_system_call():
            self._fs.invalidate_cache()
            found = self._fs.find(self._path(folder))
        return [str(path).removeprefix(f"{self._root}/") for path in found]

    def remove_below(self, folder: str) -> None:
        for name in self.below(folder):
            self.remove(name)
        if self._is_local:
            shutil.rmtree(self._path(folder), ignore_errors=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")


def _written_at(entry: Json) -> float:
    """Reads an entry of a listing; each file system has a name of its own for the time."""
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
    """Whether each write would be a commit on the hub."""
    return get_protocol(url) == "hf" and not url.startswith("hf://buckets/")


def _bucket_for(url: str) -> str:
    return _REPOSITORY.sub(r"hf://buckets/\1", url)


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
    """Raises ConfigError for a setting that names a repository. ``writes``: would be commits."""
    raise ConfigError(
        f"{url} is in a repository, where {writes} would be a commit; the hub allows 128 an hour. "
        f"Set it to a bucket: {_bucket_for(url)} (`hf buckets create OWNER/NAME --private` makes "
        f"one).{advice}",
        setting=key,
    )


def check_url(key: str, url: str) -> None:
    """Refuses a URL that cannot work, without using the network. ``key`` names the setting in the
    error.

    Raises:
        ConfigError: fsspec has no file system of this name, its package is not installed, or the
            URL holds a secret or a variable.
    """
    if holds_credentials(url):
        raise ConfigError(
            f"{key}: the URL holds a user or a password, which would be written to files. Set "
            "credentials in the environment instead."
        )
    refuse_variables(key, url)
    try:
        fsspec.get_filesystem_class(get_protocol(url))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{key}: {url!r} cannot be used: {missing_package(str(error)) or error}"
        ) from error
