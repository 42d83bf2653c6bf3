"""Makes the fixture of a release: the folders that its code leaves behind, as
tests/data/releases/NAME.

    python -m tests.make_release COMMIT NAME         git archives the package of COMMIT, and runs
                                                     this job with it

The job has three tasks. Task 0 is finished, and has retried its dead letter. Task 1 was killed with
-9: a committed chunk, a journal, and a cached answer of a document that was not finished. Task 2
has not started. Task 1 has a mirror.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

RELEASES = Path(__file__).parent / "data" / "releases"
TASKS, PER_CHUNK = 3, 2
STOP = "stop"
"""The text of the document whose second rollout gets no answer."""
BAD = "bad"
"""The text of the document that the server rejects at first."""
TEXTS = (("a0", "a1", BAD, "a3", "a4"), ("b0", "b1", "b2", STOP, "b4"), ("c0", "c1", "c2"))
"""Of the documents of each task."""


def write_input(folder):
    """One file for each task."""
    folder.mkdir(parents=True)
    for number, texts in enumerate(TEXTS):
        rows = [
            json.dumps({"text": text, "id": f"{number}/{index}"})
            for index, text in enumerate(texts)
        ]
        (folder / f"part-{number}.jsonl").write_text("\n".join(rows) + "\n")


def run(folder, url, rank, output=None, **changes):
    """Runs one task of the job, with the package that is there. Uses only what 0.1.0 has, too."""
    from datatrove.pipeline.writers import JsonlWriter

    from datatrove_ckpt import InferenceConfig, InferenceRunner
    from datatrove_ckpt.readers import JsonlReader
    from datatrove_ckpt.rollouts import PromptRollout

    reader = JsonlReader(str(folder / "input"), add_file_path=False)
    runner = InferenceRunner(
        PromptRollout("Rewrite: {text}"),
        InferenceConfig(
            server_type="endpoint",
            endpoint_url=url,
            model_name_or_path="fake",
            rollouts_per_document=2,
            max_concurrent_generations=1,
        ),
        JsonlWriter(
            output or str(folder / "output"), "${rank}_chunk_${chunk_index}.jsonl", compression=None
        ),
        checkpoints_local_dir=str(folder / "checkpoints"),
        records_per_chunk=PER_CHUNK,
        skip_bad_requests=True,
        sync_seconds=0.1,
        mirror_seconds=0.1,
        **changes,
    )
    data = () if changes.get("retry_dead_letters") else reader.run(None, rank, TASKS)
    runner.run(data, rank, TASKS)


def make(commit, target):
    """Makes the fixture with the code of a commit."""
    from datatrove_ckpt.testing import FakeServer

    stopped = threading.Event()

    def delay(payload, times):
        if is_about(payload, STOP) and times:
            stopped.set()
            return 20.0  # longer than until the kill
        return 0.0

    def status(payload, times):
        return 400 if is_about(payload, BAD) and not times else None

    with tempfile.TemporaryDirectory(prefix="made-by-") as temporary:
        root, folder = Path(temporary), Path(temporary) / "job"
        archive = subprocess.run(
            ["git", "archive", commit, "datatrove_ckpt"], check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", str(root)], input=archive, check=True)
        write_input(folder / "input")
        with FakeServer(delay=delay, status=status) as server:
            for changes in ({"rank": 0}, {"rank": 0, "retry_dead_letters": True}):
                start(root, folder, server.url, **changes).wait()
            killed = start(
                root, folder, server.url, rank=1, checkpoints_remote_dir=str(folder / "mirror")
            )
            assert stopped.wait(240), "the document was not asked for"
            time.sleep(3)  # all that was answered is on the disk, and on the mirror
            killed.send_signal(signal.SIGKILL)
            killed.wait()
        said = "from datatrove_ckpt import __version__ as v; print(v)"
        asked = subprocess.run(
            [sys.executable, "-c", said], cwd=root, capture_output=True, text=True, check=False
        )
        made = {"commit": commit, "version": asked.stdout.strip() or "0.1.0", "folder": str(folder)}
        (folder / "made.json").write_text(json.dumps(made, indent=2) + "\n")
        shutil.rmtree(folder / "input")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)


def is_about(payload, text):
    return bool(payload["messages"][-1]["content"] == f"Rewrite: {text}")


def start(package, folder, url, **changes):
    """A process that runs a task with the package in ``package``."""
    command = [sys.executable, __file__, "--job", str(folder), url, json.dumps(changes)]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(package), "PYTHONSAFEPATH": "1"}, cwd=package
    )


if __name__ == "__main__":
    if sys.argv[1] == "--job":
        run(Path(sys.argv[2]), sys.argv[3], **json.loads(sys.argv[4]))
    else:
        make(sys.argv[1], RELEASES / sys.argv[2])
