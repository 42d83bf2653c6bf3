"""Measures how far a rank is. By this ``AttemptProgress``, claims see whether an attempt was in
vain.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.common.attempts import AttemptProgress
from datatrove_ckpt.mirror.restore import newest_manifest


def rank_progress(mirrors: Sequence[str], roots: Iterable[Path], rank: int) -> AttemptProgress:
    """Returns how far a rank is on its mirrors; without any, in the folders of its checkpoints."""
    sizes: list[tuple[str, int]] = []
    for url in mirrors:
        manifest = newest_manifest(f"{url}/{rank:05d}")
        if manifest is not None:
            sizes += manifest.sizes.items()
            sizes += [(layout.CACHE, part.size) for part in manifest.answers]
    if not mirrors:
        for path in [path for root in roots for path in layout.rank_folder(root, rank).glob("*")]:
            with suppress(FileNotFoundError):  # a journal whose chunk was committed
                sizes.append((path.name, path.stat().st_size))
    return (
        sum(size for name, size in sizes if name == layout.COMMITS),
        sum(size for name, size in sizes if layout.is_journal(name)),
        sum(size for name, size in sizes if name.startswith(layout.CACHE)),
    )
