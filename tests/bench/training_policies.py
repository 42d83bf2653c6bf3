"""The share of the time for which saves stop a training: ``python -m tests.bench.training_policies
[--share 0.035] [--seconds 60] [--megabytes 64]``.

A loop of matrix products saves by ``Overhead(share)``, in a process that does nothing else. Its own
clock, not the policy's, times each call that saved; the table has the share of the wall time, and
its distance from the bound in percentage points, after each quarter of the run.
"""

import tempfile
import time

import torch
from loguru import logger
from torch import nn

from datatrove_ckpt.torch import Last, Overhead, TrainingCheckpoints
from tests.bench.tables import markdown, parser


def measured(share, seconds, megabytes):
    """Yields the seconds of the run, the saves, and the seconds for which they stopped it."""
    width = int((megabytes * 1e6 / 4) ** 0.5)
    model = nn.Linear(width, width, bias=False)
    values = torch.ones(16, width)
    with (
        tempfile.TemporaryDirectory() as folder,
        TrainingCheckpoints(folder, save=Overhead(share), keep=Last(1)) as saved,
    ):
        began = time.monotonic()
        quarter = step = saves = 0
        stopped = 0.0
        while quarter < 4:
            step += 1
            with torch.no_grad():
                model(values)
            before = time.monotonic()
            if saved.maybe_save(step, model=model):
                saves += 1
                stopped += time.monotonic() - before
            run = time.monotonic() - began
            if run >= seconds * (quarter + 1) / 4:
                quarter += 1
                yield run, saves, stopped


def main():
    options = parser(__doc__)
    options.add_argument("--share", type=float, default=0.035)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--megabytes", type=float, default=64.0)
    given = options.parse_args()
    logger.remove()
    rows = [
        [f"{run:.0f}", saves, f"{stopped / run:.2%}", f"{100 * (stopped / run - given.share):+.2f}"]
        for run, saves, stopped in measured(given.share, given.seconds, given.megabytes)
    ]
    print(markdown(["seconds", "saves", "stopped", f"from {given.share:.1%}, points"], rows))


if __name__ == "__main__":
    main()
