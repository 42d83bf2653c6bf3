"""Small objects below a URL, through fsspec: the one place that changes what lies there.

Each method of ``Effects`` is one effect: it happened or it did not, apart from ``put``, of which a kill may leave a
part where a put is no single step (files; not S3). ``testing`` replaces ``effects`` to crash before or in the middle of
any of them. Credentials come from the environment, as every fsspec file system takes them; a URL holds none.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.redaction import holds_credentials
from datatrove_ckpt.remote_errors import s3_code


class Effects:
    """What changes the remote."""

    def put(self, fs: Any, path: str, data: bytes) -> None:
        """The object holds ``data`` from here on."""
        fs.pipe_file(path, data)

    def copy(self, fs: Any, source: str, target: str) -> None:
        """Another object with the same content. Object stores do this without sending it over the wire."""
        fs.cp_file(source, target)

    def delete(self, fs: Any, path: str) -> None:
        """The object is gone."""
        fs.rm_file(path)


effects = Effects()
"""Always reached as ``store.effects``, so that a test can put others in its place."""


class Store:
    """The objects below one URL, by their names, which may have folders in them."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # A local folder's missing parents are made; a bucket is not.
        options = {"auto_mkdir": True} if get_protocol(url) in ("file", "local") else {}
        self._fs, root = url_to_fs(self.url, **options)
        self._root = root.rstrip("/")

    def put(self, name: str, data: bytes) -> None:
        effects.put(self._fs, self._path(name), data)

    def copy(self, name: str, to: str) -> None:
        effects.copy(self._fs, self._path(name), self._path(to))

    def remove(self, name: str) -> None:
        """One that is gone already is fine."""
        with suppress(FileNotFoundError):
            effects.delete(self._fs, self._path(name))

    def read(self, name: str) -> bytes | None:
        """None: there is no such object."""
        try:
            return bytes(self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def names(self, folder: str = "") -> list[str]:
        """The names of what lies in the folder, without the folder's; none if there is no such folder.

        Raises:
            ConfigError: there is no such bucket, which s3fs calls a missing file, too.
        """
        path = self._path(folder)
        self._fs.invalidate_cache(path)
        try:
            return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in self._fs.ls(path, detail=False))
        except FileNotFoundError as error:
            if s3_code(error) == "NoSuchBucket":
                raise ConfigError(
                    f"checkpoints_remote_dir: {self.url} lies in a bucket that does not exist. Make the bucket, or "
                    "correct the setting (on S3 also AWS_ENDPOINT_URL), and run the same command again."
                ) from error
            return []

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")


def check_url(key: str, url: str) -> None:
    """Refuses what cannot work, without touching the network.

    Raises:
        ConfigError: no file system of fsspec's is called that, its package is not installed, or the URL holds a secret.
    """
    if holds_credentials(url):
        raise ConfigError(
            f"{key}: holds a user or a password, which would end up in files. Give credentials by the environment."
        )
    try:
        fsspec.get_filesystem_class(get_protocol(url))
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{key}: {url!r} cannot be used: {error}") from error
