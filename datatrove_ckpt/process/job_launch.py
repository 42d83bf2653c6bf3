"""Runs in a Hugging Face Job as ``uv run job_launch.py FOLDER ZIP``, without the package.

uv installs nothing from hf://, so the package's zip comes through fsspec, as the pickled executor
does.
"""

import json
import os
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from io import BytesIO
from pathlib import Path

TIMEOUT = "DATATROVE_CKPT_JOB_SECONDS"
"""The variable with the seconds after which the job is killed."""
END = "DATATROVE_CKPT_JOB_END_TIME"
"""The variable with the time at which the job is killed, since the epoch; see ``slurm_job.py``."""


LAUNCH = "DATATROVE_CKPT_JOB_LAUNCH"
"""The variable that names this launch, and the file for its failure."""


def main() -> None:
    folder, name = sys.argv[1:]
    if seconds := os.environ.get(TIMEOUT):
        age = 0.0
        with suppress(OSError, ValueError, AttributeError):
            fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
            began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - began
        os.environ[END] = str(time.time() - age + float(seconds))
    import fsspec

    home = tempfile.mkdtemp(prefix="datatrove-ckpt-")
    with fsspec.open(f"{folder}/{name}", "rb") as file:
        zipfile.ZipFile(BytesIO(file.read())).extractall(home)
    sys.path.insert(0, home)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    import dill  # type: ignore[import-untyped]

    try:
        with fsspec.open(f"{folder}/executor.pik", "rb") as file:
            executor = dill.load(file)
    except ImportError as error:  # no other start would help, and no executor can report it
        failure = [
            2,
            f"{error}, in the job: put it into dependencies, or beside the file.",
        ]
        with fsspec.open(f"{folder}/failures/{os.environ[LAUNCH]}.json", "w") as file:
            json.dump(failure, file)
        raise
    executor.run()


if __name__ == "__main__":
    main()
