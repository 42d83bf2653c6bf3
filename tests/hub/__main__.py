"""A fake hub of its own: prints its URL and the variables that a client needs, and serves until its input ends.

python -m tests.hub --port 0 --repo org/data --commits-per-hour 128
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.hub import FakeHub


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hub", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--repo", action="append", default=[], help="a dataset repository that is there, NAMESPACE/NAME"
    )
    parser.add_argument("--home", type=Path, default=Path("huggingface"), help="folder for the client's caches")
    parser.add_argument("--commits-per-hour", type=int)
    parser.add_argument("--requests-per-5-minutes", type=int)
    parser.add_argument("--speed", type=float, default=1.0, help="seconds of the hub's clock in one real second")
    asked = parser.parse_args()
    with FakeHub(asked.commits_per_hour, asked.requests_per_5_minutes, asked.speed, port=asked.port) as hub:
        hub.orgs += tuple({name.partition("/")[0] for name in asked.repo})
        for name in asked.repo:
            hub.create_repo(name)
        print(*(f"{name}={value}" for name, value in hub.environment(asked.home.absolute()).items()), sep="\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
