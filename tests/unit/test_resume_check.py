"""``assert_resume_is_exact`` passes loaders that resume, and names what the others repeat, skip or
move.
"""

import numpy as np
import pytest

from tests.resume import assert_resume_is_exact


class Loader:
    """Ten samples an epoch in batches of three.

    ``fault`` is added to the position of each state.
    """

    def __init__(self, fault=0, swaps=False, size=3):
        self.fault = fault
        self.swaps = swaps
        self.size = size
        self.epoch = 0
        self.at = 0
        self.resumes_at = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.at, self.resumes_at = self.resumes_at, 0
        names = [f"{self.epoch}/{i}" for i in range(10)]
        if self.swaps and self.at:
            names[-2:] = reversed(names[-2:])
        while self.at < len(names):
            start, self.at = self.at, min(self.at + self.size, len(names))
            yield {"text": names[start : self.at]}

    def state_dict(self):
        return {"at": max(self.at + self.fault, 0) if self.at < 10 else 10}

    def load_state_dict(self, state):
        self.resumes_at = state["at"]


class Forgetful(Loader):
    """A loader that gives the last state for a finished epoch, and so skips the next epoch."""

    def state_dict(self):
        return {"at": self.at}


def test_a_loader_that_resumes_passes_at_every_stop():
    report = assert_resume_is_exact(Loader, stops=[0, 1, 2, 3, 4, (1, 1), (0, 2, 1)])
    assert (
        str(report)
        == "7 resumed runs of 1 epochs with 10 samples in 4 batches: each as the run without stops"
    )
    assert assert_resume_is_exact(Loader).stops == [(1,), (2,), (4,)]


class Turning(Loader):
    """A loader whose numbers have another type after a resume."""

    kind = np.int64

    def __iter__(self):
        for batch in super().__iter__():
            yield [{"text": name, "n": [self.kind(0)]} for name in batch["text"]]

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.kind = np.int32


SIZES = iter([3, 3, 2])


@pytest.mark.parametrize(
    ("make", "stop", "epochs", "said"),
    [
        (lambda: Loader(fault=-2), 2, 1, r"^Stopped after 2 batches the loader did not go on where it had stopped:\n"
         r"  seen too often in epoch 0: 2 samples: {'text': '0/4'}, {'text': '0/5'}$"),
        (Forgetful, 4, 2, r"between two epochs,(.|\n)*skipped in epoch 1: 10 samples"),
        (lambda: Loader(swaps=True), 1, 1, r"another order: sample 8 is .*0/9.*, and without a stop .*0/8"),
        (lambda: Loader(size=next(SIZES)), 1, 1, "other batches: batch 1 has 2, and without a stop 3"),
        (Turning, 1, 1, r"in other types: .*'n': list\[int32\]}, and without a stop .*'n': list\[int64\]}$"),
    ],
)  # fmt: skip
def test_what_is_repeated_skipped_or_moved_is_named(make, stop, epochs, said):
    with pytest.raises(AssertionError, match=said):
        assert_resume_is_exact(make, stops=[stop], epochs=epochs)
