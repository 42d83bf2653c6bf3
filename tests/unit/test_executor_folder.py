"""What the ranks of one process share of their executor."""

from typing import Any, ClassVar

from datatrove.io import get_datafolder

from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.executors.local import _own_listings


class Recording(LocalPipelineExecutor):
    """Keeps the file system of each rank's ``logging_dir``."""

    found: ClassVar[list[Any]] = []

    def _run_for_rank(self, rank, local_rank=0, node_rank=-1):
        self.found.append(self.logging_dir.fs)
        return super()._run_for_rank(rank, local_rank, node_rank)


def test_each_rank_has_listings_of_its_own_of_a_remote_logging_dir():
    """huggingface_hub looks into what it has just listed, and another thread may have dropped
    that.
    """
    step = Recording([], tasks=2, workers=1, logging_dir="memory://logs")
    step.run()
    assert len({id(one) for one in [step.logging_dir.fs, *Recording.found]}) == 3
    assert step.get_incomplete_ranks() == []


def test_the_folder_is_the_same(tmp_path):
    remote = get_datafolder("hf://buckets/org/job/logs")
    assert _own_listings(remote).resolve_paths("completions") == remote.resolve_paths("completions")
    local = get_datafolder(str(tmp_path))
    assert _own_listings(local) is local
