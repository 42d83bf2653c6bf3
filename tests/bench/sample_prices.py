"""How often ``run --sample`` is right: ``python -m tests.bench.sample_prices [--seed 0] [--jobs 20]``.

Jobs of 2,000 rows in files, with simulated answers: uneven ones (rows sorted by length, lognormal
lengths and answers, files of unlike rows) and even ones. Of each kind, how many ranges of a sample of
50 hold the cost of the whole run, and the factor between the ends of the range. No server.
"""

import argparse
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from loguru import logger

from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.run_folder.counted_input import count_input

ROWS = 2000


def lengths(kind, random):
    if kind == "even":
        return random.integers(200, 260, ROWS)
    if kind == "sorted":
        return np.sort(np.ceil(random.lognormal(4, 1, ROWS)).astype(int))
    if kind == "lognormal":
        return np.ceil(random.lognormal(4, 0.8, ROWS)).astype(int)
    return np.repeat([20, 60, 200, 600], ROWS // 4) + random.integers(0, 20, ROWS)


UNEVEN = ("sorted", "lognormal", "files")


def costs(sizes, random):
    """Of prompts, which cost a quarter a character, and of answers that vary."""
    return sizes / 4 + 4 * random.lognormal(3, random.choice([0.3, 0.6, 0.8]), ROWS)


def job(folder, kind, random, files=4):
    sizes = lengths(kind, random)
    paid = costs(sizes, random)
    for number, part in enumerate(np.split(np.arange(ROWS), files)):
        lines = [json.dumps({"id": str(row), "text": "x" * sizes[row]}) for row in part]
        Path(folder, f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return paid


def priced(kind, seed, number=50):
    """The true cost of a job, and the estimate."""
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        paid = job(folder, kind, random)
        reader = JsonlReader(folder, text_key=None)
        runner = SimpleNamespace(
            plan=SimpleNamespace(tasks=int(random.integers(1, 5))), before=[reader]
        )
        documents, whole = count_input(runner, number)
    sent = [paid[int(document.id)] for document in documents]
    return paid.sum(), whole.total(sent, [document.size for document in documents])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=20)
    options = parser.parse_args()
    logger.remove()
    for name, kinds in (("uneven", UNEVEN), ("even", ("even",))):
        held = 0
        factors = []
        for number in range(options.jobs):
            truth, found = priced(kinds[number % len(kinds)], options.seed + number)
            held += found.low <= truth <= found.high
            factors.append(found.high / found.low)
        print(
            f"{name}: {held} of {options.jobs} ranges held; factor between the ends: median "
            f"{np.median(factors):.2f}, highest {max(factors):.2f}"
        )


if __name__ == "__main__":
    main()
