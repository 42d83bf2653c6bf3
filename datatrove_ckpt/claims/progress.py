"""How far a rank is, as numbers that only grow: whether an attempt was in vain."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from datatrove_ckpt.checkpoint.layout import CACHE, COMMITS, is_journal, rank_folder
from datatrove_ckpt.mirror.restore import newest_manifest

Progress = tuple[int, int, int]
"""Bytes of a rank's commits, journals and saved answers.

Earlier ones count more: a commit drops the others.
"""


def mirrored_progress(mirrors: Iterable[str], rank: int) -> Progress:
    commits = journals = answers = 0
    urls = [f"{url}/{rank:05d}" for url in mirrors]
    for manifest in filter(None, map(newest_manifest, urls)):
        sizes = manifest.sizes
        commits += sizes.get(COMMITS, 0)
        journals += sum(size for name, size in sizes.items() if is_journal(name))
        answers += sum(part.size for part in manifest.answers)
    return commits, journals, answers


def local_progress(roots: Iterable[Path], rank: int) -> Progress:
    commits = journals = answers = 0
    for path in [path for root in roots for path in rank_folder(root, rank).glob("*")]:
        try:
            size = path.stat().st_size
        except FileNotFoundError:  # a journal whose chunk was committed
            continue
        if path.name == COMMITS:
            commits += size
        elif is_journal(path.name):
            journals += size
        elif path.name.startswith(CACHE):
            answers += size
    return commits, journals, answers
