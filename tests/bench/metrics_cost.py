"""What metrics cost a run, as ratios in one process: python -m tests.bench.metrics_cost [documents] [rounds]

By turns, against the mock server: without ``monitoring``; with a port that another process scrapes each second, and a
file that is written each second. That is 15 times as often as usual. CPU is of this process with all its threads; what
scrapes is not counted. Below 1.02 is the aim. What one scrape takes is measured by itself, too.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter
from loguru import logger

from datatrove_ckpt import InferenceConfig, InferenceRunner, MonitoringConfig
from datatrove_ckpt.generation.export.prometheus import encoded
from tests.bench.measure import MockServer, mock_server
from tests.unit.test_metrics import close_metrics_ports

PORT = 9464
SCRAPER = """
import sys, threading, time, urllib.request
opener, ended, found = urllib.request.build_opener(urllib.request.ProxyHandler({})), threading.Event(), 0
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.wait(1):
    try:
        found += b"documents_total" in opener.open(sys.argv[1], timeout=10).read()
    except OSError:
        pass
print(found)
"""


async def ask(document: Document, generate: Any) -> Any:
    return await generate({"messages": [{"role": "user", "content": document.text}], "max_tokens": 64})


def run(server: MockServer, folder: Path, documents: int, monitoring: MonitoringConfig | None) -> tuple[float, float]:
    """CPU seconds and seconds."""
    server.reset(0.05)
    config = InferenceConfig("endpoint", "mock", endpoint_url=server.url, max_concurrent_generations=256)
    writer = JsonlWriter(str(folder / "output"), "${rank}_${chunk_index}.jsonl", compression=None)
    job = InferenceRunner(ask, config, writer, checkpoints_local_dir=str(folder / "checkpoints"), monitoring=monitoring)
    texts = [Document(text=f"text {number} " * 50, id=str(number)) for number in range(documents)]
    cpu, wall = time.process_time(), time.perf_counter()
    job.run(texts)
    return time.process_time() - cpu, time.perf_counter() - wall


@contextmanager
def scraped(address: str) -> Iterator[list[int]]:
    """Another process scrapes each second. The list gets how many scrapes had the metrics."""
    command = [sys.executable, "-c", SCRAPER, f"http://{address}:{PORT}/metrics"]
    found: list[int] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield found
        found.append(int(process.communicate()[0]))


def main(documents: int, rounds: int) -> None:
    logger.remove()
    chance = random.SystemRandom()
    address = f"127.{chance.randrange(1, 255)}.{chance.randrange(1, 255)}.{chance.randrange(1, 255)}"
    results: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as parent, mock_server() as server, scraped(address) as scrapes:
        file = f"{parent}/metrics.prom"
        shown = MonitoringConfig(
            run_name="bench", metrics_port=PORT, metrics_host=address, metrics_file=file, metrics_file_seconds=1.0
        )
        run(server, Path(parent) / "warm", min(documents, 1000), shown)
        for number in range(rounds):
            for on in (False, True) if number % 2 else (True, False):
                folder = Path(parent) / f"{number} {on}"
                results[on].append(run(server, folder, documents, shown if on else None))
    close_metrics_ports()
    for index, name in enumerate(("CPU", "time")):
        off, on = ([one[index] for one in results[which]] for which in (False, True))
        ratios = [a / b for a, b in zip(on, off, strict=True)]
        with_them, without = statistics.median(on), statistics.median(off)
        print(f"{name}: {with_them:.2f} s with metrics, {without:.2f} s without, as medians")
        print(f"    ratio: {statistics.median(ratios):.3f}, of {rounds} from {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"{documents} documents in each run; {scrapes[0]} scrapes")
    one_scrape()


def one_scrape() -> None:
    """The text of one rank, and of 64."""
    from tests.unit.test_metrics import snapshot

    for ranks in (1, 64):
        started = time.process_time()
        for _ in range(20):
            text, _ = encoded([snapshot(rank) for rank in range(ranks)], "")
        each = (time.process_time() - started) / 20
        print(f"One scrape of {ranks} ranks takes {1000 * each:.1f} ms of CPU, and has {len(text) / 1000:.0f} kB.")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, int(sys.argv[2]) if len(sys.argv) > 2 else 5)
