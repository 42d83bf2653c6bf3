"""Changes a checkpoint of which only the mirror can be reached: in a restored copy, which is then uploaded again.

``repair`` and ``relocate`` do so.
The output's files are removed before the upload. After a crash in between, the mirror still has the old commits, and
the same command finds their files missing, and takes the commits back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from datatrove_ckpt.checkpoint.ledger import RankLedger
from datatrove_ckpt.errors import CheckpointLocked
from datatrove_ckpt.maintenance.read_state import read_run_state
from datatrove_ckpt.maintenance.where import Place


@contextmanager
def restored(place: Place) -> Iterator[Place]:
    """The place with all ranks restored in a temporary folder, to be changed there.

    Raises:
        StorageFailed, CheckpointCorrupt, ConfigError: see ``mirror.restore``.
    """
    from datatrove_ckpt.mirror.changing import restore_ranks  # fsspec is slow to import

    assert place.mirror is not None
    with tempfile.TemporaryDirectory(prefix="datatrove-ckpt-") as folder:
        restore_ranks(place.mirror.url, place.mirror.ranks, Path(folder))
        yield replace(place, folder=Path(folder))


def check_idle(place: Place, ranks: list[RankLedger]) -> None:
    """Checks that no process works on the ranks, as far as the mirror shows.

    Raises:
        CheckpointLocked: one does.
    """
    state = read_run_state(place)
    running = {(rank.root, rank.rank): rank for rank in (*state.ranks, *state.retries) if rank.state == "running"}
    for rank in ranks:
        if (found := running.get(rank.key)) is not None:
            attempt = found.attempt
            who = f"pid {attempt.pid} on {attempt.host}" if attempt else "another process"
            raise CheckpointLocked(
                f"{rank.place}: {who} works on this rank, or has ended without a word less than 20 minutes "
                f"ago, as its mirror {place.what} shows. Wait for it to end, or stop it, and run the same "
                "command again."
            )


def upload(place: Place, ranks: list[RankLedger]) -> None:
    """Uploads the changed ranks.

    Raises:
        StorageFailed: one could not be uploaded; the same command continues from there.
    """
    from datatrove_ckpt.mirror.changing import upload_rank

    assert place.mirror is not None
    for rank in {rank.key: rank for rank in ranks}.values():
        upload_rank(f"{place.mirror.url}/{rank.folder.relative_to(place.folder)}", rank.folder)
