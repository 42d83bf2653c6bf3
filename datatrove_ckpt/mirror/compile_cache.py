"""Copies what an engine compiled for a model to the mirror, and from there to new nodes.

An engine executes the files, so they are exchanged only with a key (``sealing.py``). An archive is
a sealed line with a SHA-256, and a tar file. No failure ends a run: the engine compiles by itself.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from loguru import logger

from datatrove_ckpt.common.formatting import byte_size
from datatrove_ckpt.common.redaction import MIRROR_KEY_VARIABLE
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import CheckpointCorrupt
from datatrove_ckpt.mirror.object_store import ObjectStore
from datatrove_ckpt.mirror.sealing import Seal, without_seal

_FOLDER = "compile-cache"
_MAX_BYTES = 512 << 20  # an archive is made in memory
_NOTE = ".datatrove-ckpt"
# vLLM writes environment variables to it for people; releases before 0.32 its API key, too.
_LEFT_OUT = ("cache_key_factors.json", _NOTE)
# The servers of a process share a folder: the first one copies, and the others find the result.
_fetching = threading.Lock()
_saving = threading.Lock()


class MirroredCompileCache:
    """A ``CompileCache`` on a mirror.

    Args:
        url: ``checkpoints_remote_dir``.
    """

    def __init__(self, url: str) -> None:
        self._store = ObjectStore(url, apart=True)
        self._seal = Seal(f"{url}/{_FOLDER}")
        # A kill may cut an upload: ``save`` replaces what ``fetch`` could not read.
        self._unreadable = set[str]()
        self._there_before = dict[str, set[Path]]()

    @classmethod
    def of(cls, url: str) -> MirroredCompileCache | None:
        """Returns None without a key."""
        if MIRROR_KEY_VARIABLE in os.environ:
            return cls(url)
        return None

    def fetch(self, key: str, folder: Path) -> None:
        with _warning("fetched from", self._store.url):
            self._there_before.setdefault(key, set(folder.rglob("*")))
            with _fetching:
                self._fetch(key, folder)

    def _fetch(self, key: str, folder: Path) -> None:
        if _note(key, folder).exists():
            return
        archive = self._store.read(_name(key), _MAX_BYTES)
        if archive is None:
            return
        self._unreadable.add(key)
        head, _, content = archive.partition(b"\n")
        self._seal.check(_name(key), head)
        if without_seal(head) != _body(content):
            raise CheckpointCorrupt(f"{_name(key)} is damaged.")
        _unpack(content, folder)
        _note(key, folder).touch()
        self._unreadable.remove(key)
        logger.info(f"What a server compiled on another node is here: {folder}")

    def save(self, key: str, folder: Path) -> None:
        """See ``CompileCache``. Files that were there before its servers are other models'."""
        with _saving, _warning("copied to", self._store.url):
            made = [
                path
                for path in folder.rglob("*")
                if path.is_file()
                and path not in self._there_before[key]
                and not path.name.endswith(_LEFT_OUT)
            ]
            if not made:
                return
            _note(key, folder).touch()
            if key in self._store.names(_FOLDER) and key not in self._unreadable:
                return
            size = sum(path.stat().st_size for path in made)
            if size > _MAX_BYTES:
                raise OSError(f"{byte_size(size)} are too much.")
            content = _pack(folder, made)
            head = self._seal.add(_name(key), _body(content))
            self._store.put(_name(key), head + b"\n" + content)


def _name(key: str) -> str:
    return f"{_FOLDER}/{key}"


def _note(key: str, folder: Path) -> Path:
    """Shows that the folder has what was compiled for the key."""
    return folder / f"{key}{_NOTE}"


def _body(content: bytes) -> bytes:
    return b'{"sha256":"%s"}' % hashlib.sha256(content).hexdigest().encode()


def _pack(folder: Path, made: list[Path]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        for path in made:
            archive.add(path, path.relative_to(folder))
    return file.getvalue()


def _unpack(content: bytes, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix=".datatrove-ckpt-", dir=folder.parent) as unpacked,
        tarfile.open(fileobj=io.BytesIO(content)) as archive,
    ):
        archive.extractall(unpacked, filter="data")
        _merge(Path(unpacked), folder)


def _merge(made: Path, target: Path) -> None:
    """Moves what is missing there: servers of this node made the rest."""
    if not target.exists():
        made.rename(target)
    elif made.is_dir():
        for path in made.iterdir():
            _merge(path, target / path.name)


@contextmanager
def _warning(done: str, url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning(
            f"What a server compiled could not be {done} the mirror {url}: {failure_line(error)} "
            "Servers on new nodes compile by themselves."
        )
