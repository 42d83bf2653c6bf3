"""100 ranks write to one repository of a fake hub at once, in accelerated time, with ours and with datatrove's runner.

    python -m tests.bench.hub --ranks 100 --chunks 34 [--system datatrove]

The hub keeps the real one's limits, by its own fast clock, makes one commit at a time, and fails now and then, before
the effect and after it. The table says what it counted.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from datatrove_ckpt.testing import FakeServer
from tests.bench import tables
from tests.bench.hub_ranks import SYSTEMS, Job, expected
from tests.hub import FakeHub
from tests.hub.client import without_hub

ROOT = Path(__file__).parents[2]
REPO = "org/data"
COMMITS_PER_HOUR = 128
REQUESTS_PER_5_MINUTES = 1000


@dataclass(frozen=True)
class Plan:
    """What is simulated. Seconds are the hub's: ``speed`` of them pass in one real second."""

    ranks: int = 100
    chunks: int = 34
    speed: float = 60.0
    chunk_seconds: float = 300.0
    commit_seconds: float = 300.0
    faults: int = 13
    """One of so many commits fails before its effect, and others after it, or their answer is lost. 0: none."""
    limit: float = 1800.0
    """Real seconds after which ranks that are not done are killed; they count as failed."""


@dataclass(frozen=True)
class Tally:
    """What became of it."""

    files: int
    """Parquet files in the repository at the end."""
    complete: int
    """Ranks whose documents are all there, each once."""
    missing: int
    twice: int
    """Documents that are nowhere, and those that are in two files."""
    committed_twice: int
    """Files that a commit has although an earlier one had them."""
    commits: int
    commits_of_worst_hour: int
    requests_of_worst_5_minutes: int
    refused: int
    """Requests that got 429."""
    failed: int
    """Ranks that ended with an error, or not at all."""
    errors: tuple[str, ...]
    leftovers: int
    """Files in TMPDIR at the end."""
    seconds: float
    hub_hours: float


@contextmanager
def fake_hub(plan: Plan) -> Iterator[FakeHub]:
    """A hub with the real one's limits and, if the plan has them, its faults."""
    with FakeHub(COMMITS_PER_HOUR, REQUESTS_PER_5_MINUTES, plan.speed) as hub:
        hub.create_repo(REPO)
        hub.latency = {"*": 0.3 / plan.speed, "commit": 2 / plan.speed}
        if often := plan.faults:
            hub.lag_commits = 1
            hub.fail("commit", status=500, times=None, every=often)
            hub.fail("commit", status=504, times=None, every=often + 4, after_effect=True)
            hub.drop_answer("commit", times=None, every=often + 6)
            hub.fail("lfs-upload", status=503, times=None, every=8 * often)
            hub.drop_answer("lfs-upload", times=None, every=8 * often + 1)
            hub.fail("preupload", status=500, times=None, every=16 * often)
            hub.fail("lfs-batch", status=502, times=None, every=16 * often + 1)
        yield hub


def simulate(system: str, plan: Plan, folder: Path) -> Tally:
    """Runs all ranks, and counts what the hub has at the end."""
    with fake_hub(plan) as hub, FakeServer() as server:
        job = Job(
            system,
            plan.ranks,
            plan.chunks,
            f"hf://datasets/{REPO}/config",
            server.url,
            str(folder),
            plan.chunk_seconds,
            plan.commit_seconds,
            plan.speed,
        )
        began, hub_began = time.monotonic(), hub.clock.now()
        command = [sys.executable, "-m", "tests.bench.hub_ranks", json.dumps(asdict(job))]
        environment = without_hub() | hub.environment(folder / "hf")
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=plan.limit)
        seconds, hub_seconds = time.monotonic() - began, hub.clock.now() - hub_began
        return _tally(hub, plan, job, seconds, hub_seconds)


def _tally(hub: FakeHub, plan: Plan, job: Job, seconds: float, hub_seconds: float) -> Tally:
    results = [json.loads(path.read_text()) for path in sorted(job.path("results").iterdir())]
    errors = Counter(result["error"].partition("\n")[0][:200] for result in results if result["error"])
    files = [content for path, content in hub.files(REPO).items() if path.endswith(".parquet")]
    found: Counter[str] = Counter()
    for content in files:
        found.update(pq.read_table(io.BytesIO(content), columns=["id"]).column("id").to_pylist())
    wanted = list(expected(plan.ranks, plan.chunks))
    wrong = {name.partition("-")[0] for name in wanted if found[name] != 1}
    return Tally(
        files=len(files),
        complete=plan.ranks - len(wrong),
        missing=sum(found[name] == 0 for name in wanted),
        twice=sum(times > 1 for times in found.values()),
        committed_twice=sum(len(commit.added) for commit in hub.commits(REPO)) - len(files),
        commits=len(hub.commits(REPO)),
        commits_of_worst_hour=hub.worst_hour(REPO),
        requests_of_worst_5_minutes=hub.worst_5_minutes(),
        refused=sum(request.status == 429 for request in hub.requests),
        failed=plan.ranks - sum(not result["error"] for result in results),
        errors=tuple(f"{times} x {error}" for error, times in errors.most_common(3)),
        leftovers=sum(path.is_file() for path in job.path("tmp").rglob("*")),
        seconds=seconds,
        hub_hours=hub_seconds / 3600,
    )


def table(tallies: dict[str, Tally], plan: Plan) -> str:
    """As Markdown."""
    rows: list[tuple[str, Any]] = [
        ("files in the repository", lambda tally: f"{tally.files:,} of {plan.ranks * plan.chunks:,}"),
        ("documents missing", lambda tally: f"{tally.missing:,}"),
        ("documents there twice", lambda tally: f"{tally.twice:,}"),
        ("files committed again", lambda tally: f"{tally.committed_twice:,}"),
        ("ranks whose documents are all there", lambda tally: f"{tally.complete:,} of {plan.ranks:,}"),
        ("ranks that failed or ran out of time", lambda tally: f"{tally.failed:,} of {plan.ranks:,}"),
        ("commits", lambda tally: f"{tally.commits:,}"),
        ("commits of the worst hour", lambda tally: f"{tally.commits_of_worst_hour:,}"),
        ("requests of the worst 5 minutes", lambda tally: f"{tally.requests_of_worst_5_minutes:,}"),
        ("requests refused with 429", lambda tally: f"{tally.refused:,}"),
        ("files left in TMPDIR", lambda tally: f"{tally.leftovers:,}"),
        ("seconds", lambda tally: f"{tally.seconds:.0f}"),
        ("hours of the hub", lambda tally: f"{tally.hub_hours:.1f}"),
    ]
    return tables.markdown(["", *tallies], [[name, *map(show, tallies.values())] for name, show in rows])


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="several times for several; default: ours")
    tables.add_fields(parser, Plan())
    parser.add_argument("--keep", type=Path, help="folder for logs and checkpoints; default: a temporary one")
    given = vars(parser.parse_args())
    systems, keep = given.pop("system") or ["ours"], given.pop("keep")
    plan = Plan(**given)
    tallies = {}
    with tempfile.TemporaryDirectory() as temporary:
        for system in systems:
            tallies[system] = simulate(system, plan, Path(keep or temporary, system))
            for error in tallies[system].errors:
                print(f"{system}: {error}", file=sys.stderr)
    print(table(tallies, plan))


if __name__ == "__main__":
    main()
