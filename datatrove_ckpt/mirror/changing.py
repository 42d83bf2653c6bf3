"""Restores ranks from their mirror and uploads them again, for ``repair``.

The upload is a new version of a new owner: a node with the old folder restores it at its next
start, and a process that still works on the rank stops.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from loguru import logger

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.checkpoint.identity import parse_run
from datatrove_ckpt.checkpoint.rank_files import Snapshot
from datatrove_ckpt.checkpoint.request_cache import RequestCache
from datatrove_ckpt.common.formatting import plural
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import StorageFailed
from datatrove_ckpt.mirror.job import restore_job
from datatrove_ckpt.mirror.manifests import MAX_OBJECT_BYTES, Uploads, Versions, is_mirrored
from datatrove_ckpt.mirror.restore import restore, unreadable

_THREADS = 32


def restore_ranks(url: str, names: Iterable[str], folder: Path) -> None:
    """Restores ranks into a folder of their own, with everything that a run needs.

    Args:
        url: ``checkpoints_remote_dir``.
        names: of the ranks' folders, such as "00000" or "retry-00001/00000".

    Raises:
        StorageFailed, CheckpointCorrupt, ConfigError: see ``restore``.
    """
    try:
        for name in names:
            restore(f"{url}/{name}", folder / name)
        restore_job(url, folder)
    except OSError as error:
        raise unreadable(url, error) from error


def upload_rank(url: str, folder: Path) -> None:
    """Uploads a rank's folder as a new version, which is finished if the folder is.

    Args:
        url: of the rank's folder on the mirror.
        folder: the rank's local folder. No process works on it.

    Raises:
        StorageFailed: it could not be uploaded. The version before it stays the newest one.
    """
    snapshot = _snapshot(folder)
    uploads = Uploads(Versions(url))
    try:
        uploads.start_version(parse_run(folder / layout.RUN, snapshot.run), snapshot)
        for name in snapshot.sizes:
            with (folder / name).open("rb") as file:
                while data := file.read(MAX_OBJECT_BYTES):
                    uploads.add(name, data)
        uploads.add_answers(snapshot)
        uploads.publish(finished=layout.is_finished(folder))
    except OSError as error:
        raise StorageFailed(
            f"Could not upload the changed task to {url}: {failure_line(error)}. The mirror is as "
            "it was. Correct that, and run the same command again."
        ) from error


def upload_finished_ranks(url: str, root: Path) -> None:
    """Uploads the finished ranks that a mirror lacks, retries among them: a mirror may be set
    later.

    A remote that fails costs a warning; the next start tries again.

    Args:
        url: ``checkpoints_remote_dir``. ``check_job`` has refused the mirror of another run.
        root: ``checkpoints_local_dir``.
    """
    roots = [root, *layout.retry_folders(root)]
    folders = [
        layout.rank_folder(each, rank) for each in roots for rank in layout.rank_numbers(each)
    ]
    finished = {
        f"{url}/{folder.relative_to(root)}": folder
        for folder in folders
        if layout.is_finished(folder)
    }
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            known = threads.map(_is_uploaded, finished)
            missing = [
                place for place, is_there in zip(finished, known, strict=True) if not is_there
            ]
        if missing:
            with ThreadPoolExecutor(_THREADS) as threads:
                list(threads.map(lambda place: upload_rank(place, finished[place]), missing))
            logger.info(f"Uploaded {plural(len(missing), 'finished task')} to the mirror {url}.")
    except (OSError, StorageFailed) as error:
        logger.warning(
            f"Could not upload finished tasks to the mirror {url} ({failure_line(error)}). Tried "
            "again later."
        )


def _is_uploaded(url: str) -> bool:
    """Whether a version other than 1 is there: a kill in the first upload leaves an empty version
    1.
    """
    return any(version.number > 1 for version in Versions(url).all_versions())


def _snapshot(folder: Path) -> Snapshot:
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if is_mirrored(path.name)}
    answers = []
    unfinished = frozenset[int]()
    last = 0
    if (folder / layout.CACHE).exists():
        with closing(RequestCache(folder / layout.CACHE)) as cache:
            unfinished = frozenset(ordinal for ordinal, _ in cache.answer_counts())
            answers = cache.answers_since(0, unfinished)
            last = cache.last_answer
    run = (folder / layout.RUN).read_bytes()
    return Snapshot(
        run, {name: size for name, size in sizes.items() if size}, unfinished, answers, last
    )
