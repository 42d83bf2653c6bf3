"""What the ranks of one process share of their executor."""

from __future__ import annotations

from pathlib import Path

from datatrove.io import get_datafolder

from datatrove_ckpt.executor import _own_listings


def test_each_rank_has_listings_of_its_own_of_a_remote_logging_dir(tmp_path: Path) -> None:
    """huggingface_hub looks into what it has just listed, and another thread may have dropped that."""
    remote = get_datafolder("hf://buckets/org/job/logs")
    own = _own_listings(remote)
    assert own.fs is not remote.fs
    assert type(own.fs) is type(remote.fs)
    assert own.resolve_paths("completions") == remote.resolve_paths("completions")
    local = get_datafolder(str(tmp_path))
    assert _own_listings(local) is local
