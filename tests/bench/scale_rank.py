"""Runs one rank of a job as a task on a cluster does: without the checks of all ranks that ``run`` makes before.

python -m tests.bench.scale_rank FOLDER RANK
"""

from __future__ import annotations

import os
import sys

from datatrove_ckpt.cli.overrides import read_config
from datatrove_ckpt.cli.yaml_config import build

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    build(read_config("job.yaml", []))._run_for_rank(int(sys.argv[2]))
