"""What the ends of tasks cost: ``python -m tests.bench.barrier [--documents 3200] [--tasks 1 10
40]``.

The same documents, as one task and as several, by one worker or by ``--workers``, over a server
that answers after as long as the document says. The lengths have a long tail, as those of reasoning
models. "ideal": all places of the server are always taken.
"""

import random
import tempfile
from pathlib import Path

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.testing import FakeServer
from tests.bench.measure import table
from tests.bench.tasks import AT_ONCE, run_tasks, tasks_parser


async def ask(document, generate):
    return await generate({"messages": [{"role": "user", "content": document.text}]})


def run(server, folder, tasks, ranks_at_once, seconds, workers=1):
    """Returns the seconds of a job, in which each document must have been asked once."""
    server.asked.clear()
    config = InferenceConfig(
        "endpoint", "fake", endpoint_url=server.url, max_concurrent_generations=AT_ONCE // workers
    )
    rows = [{"id": f"{n}", "text": f"{n} {one:.3f}"} for n, one in enumerate(seconds)]
    took = run_tasks(
        folder,
        ask,
        config,
        rows,
        tasks=tasks,
        workers=workers,
        start_method="fork",
        ranks_at_once=ranks_at_once,
    )
    assert list(server.asked.values()) == [1] * len(seconds)
    return took


def measure(documents, cases, longest=10.0, workers=1):
    """The seconds of each case, a number of tasks and how many of them run at once; first the
    ideal.
    """
    chance = random.Random(0)
    seconds = [
        longest * min(1.0, max(0.025, chance.lognormvariate(-2.5, 0.8))) for _ in range(documents)
    ]
    found = [sum(seconds) / AT_ONCE]
    with FakeServer(delay=_seconds_of) as server, tempfile.TemporaryDirectory() as name:
        for tasks, at_once in cases:
            found.append(
                run(server, Path(name, f"{tasks}-{at_once}"), tasks, at_once, seconds, workers)
            )
    return found


def _seconds_of(payload, times):
    return float(payload["messages"][0]["content"].split()[1])


def main():
    parser = tasks_parser(__doc__, 3200)
    parser.add_argument("--ranks-at-once", type=int, nargs="+", default=[32, 1])
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    cases = [(tasks, at_once) for at_once in options.ranks_at_once for tasks in options.tasks]
    ideal, first, *others = measure(options.documents, cases, workers=options.workers)
    rows = [["ideal", "", f"{ideal:.1f}", f"{ideal / first:.2f}"]]
    for (tasks, at_once), seconds in zip(cases, [first, *others], strict=True):
        rows.append([tasks, at_once, f"{seconds:.1f}", f"{seconds / first:.2f}"])
    table(["tasks", "ranks at once", "seconds", "of the first"], rows)


if __name__ == "__main__":
    main()
