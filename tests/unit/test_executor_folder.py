"""What the ranks of one process share of their executor, and what a class of an executor says."""

from typing import Any, ClassVar

import datatrove.executor
import pytest

import datatrove_ckpt
from datatrove_ckpt import LocalPipelineExecutor
from datatrove_ckpt.common.launchers import LAUNCHERS, launcher


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


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("package", [datatrove.executor, datatrove_ckpt])
def test_a_class_of_the_users_launches_as_the_executor_that_it_extends(package, name):
    kind = getattr(package, name, Recording)  # Ray's is datatrove's alone
    extended = type("Mine", (kind,), {})
    expected = LAUNCHERS["LocalPipelineExecutor" if kind is Recording else name]
    assert launcher(object.__new__(extended)) == expected
