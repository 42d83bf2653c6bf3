"""What the ranks of one process share of their executor."""

from typing import Any, ClassVar

from datatrove_ckpt import LocalPipelineExecutor


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
