"""Reads a mirror without writing to it or taking ownership.

``status``, ``report`` and ``verify`` read local files, so some files of each rank's newest complete
version are copied to a folder. An empty lock file marks an unfinished rank.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.lines import sealed_json
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import CheckpointCorrupt, StorageFailed
from datatrove_ckpt.mirror.job import restore_job
from datatrove_ckpt.mirror.manifests import Manifest, Version, Versions
from datatrove_ckpt.mirror.object_store import ObjectStore

# Object stores answer each request after tens of milliseconds, and many at once.
_THREADS = 32


Wanted = Callable[[str, int], bool]
"""Whether a file is needed, by its name and its size in bytes."""


class CopiedRank(NamedTuple):
    """A rank that was copied. ``when``: of its upload, in Unix seconds; 0.0: not known."""

    version: Version
    when: float


class MirrorReader:
    """Copies what is wanted of a mirror into a local folder, and brings the copy up to date at each
    ``refresh``.

    Args:
        url: ``checkpoints_remote_dir``.
        folder: where the copy goes; empty.
        wanted: which files are needed; ``run.json`` always is.
    """

    def __init__(self, url: str, folder: Path, wanted: Wanted) -> None:
        self._store = ObjectStore(url)
        self.url = self._store.url
        self.ranks: dict[str, CopiedRank] = {}
        """By the rank's folder, such as "00000" or "retry-00001/00000"."""
        self._folder = folder
        self._wanted = wanted

    def refresh(self) -> None:
        """Copies the ranks that have a newer version than the copy.

        Raises:
            StorageFailed: the mirror cannot be read.
            CheckpointCorrupt: no version of a rank is complete.
            ConfigError: the bucket does not exist, or a version is sealed and there is no key.
        """
        try:
            with ThreadPoolExecutor(_THREADS) as threads:
                layout.refuse_resharded(self._folder, self._store.names())
                names = list(rank_names(self._store))
                for name, copied in zip(names, threads.map(self._copy, names), strict=True):
                    if copied is not None:
                        self.ranks[name] = copied
            restore_job(self.url, self._folder)
        except OSError as error:
            raise unreadable(self.url, error) from error

    def _copy(self, name: str) -> CopiedRank | None:
        mirrored = Versions(f"{self.url}/{name}")
        known = self.ranks.get(name)
        newer = [
            version
            for version in mirrored.all_versions()
            if known is None or version > known.version
        ]
        problems = list[str]()

        def copy(version: Version) -> CopiedRank:
            manifest = mirrored.read_manifest(version)
            self._write(mirrored, manifest, self._folder / name)
            return CopiedRank(version, _unix_seconds(manifest.when))

        copied = mirrored.newest(newer, copy, problems)
        if copied is None and problems and known is None:
            raise CheckpointCorrupt(
                f"No version at {mirrored.url} is complete:\n  " + "\n  ".join(problems)
            )
        return copied

    def _write(self, mirrored: Versions, manifest: Manifest, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = [name for name, size in manifest.sizes.items() if self._wanted(name, size)]
        contents = {
            name: [mirrored.read_object(part) for part in manifest.files[name]] for name in names
        }
        # All of it is here: from now on the folder changes.
        for path in folder.iterdir():
            if path.name not in contents:
                path.unlink()
        for name, blocks in contents.items():
            (folder / name).write_bytes(b"".join(blocks))
        (folder / layout.RUN).write_bytes(sealed_json(manifest.run))
        if not manifest.finished:
            (folder / layout.LOCK).touch()


def unreadable(url: str, error: Exception, advice: str = "") -> StorageFailed:
    """``advice``: more of the message, with a space before it."""
    return StorageFailed(
        f"Could not read the mirror {url}: {failure_line(error)}. Correct that (network, "
        f"credentials) and run the same command again.{advice}"
    )


def rank_names(store: ObjectStore) -> Iterator[str]:
    for name in store.names():
        if layout.is_rank(name):
            yield name
        elif layout.retry_number(name) is not None:
            yield from (f"{name}/{rank}" for rank in store.names(name) if layout.is_rank(rank))


def _unix_seconds(when: str) -> float:
    with suppress(ValueError):
        return datetime.datetime.fromisoformat(when).timestamp()
    return 0.0
