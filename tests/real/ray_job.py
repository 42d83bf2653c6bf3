"""Jobs on a real local Ray, and what is done to them: ``python -m tests.real.ray_job FOLDER``, in
Ray's environment.

Ray listens wherever it likes, so this runs in a network namespace that has nothing but a loopback,
counting server and all, and in a PID namespace, with which everything ends that Ray starts. One Ray
for all cases, because its start takes ten seconds. A line of JSON per case goes to FOLDER/results.
"""

import faulthandler
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import ray
from datatrove.executor import RayPipelineExecutor

from datatrove_ckpt.testing import outputs
from tests.patience import until
from tests.real.cluster_job import (
    DOCUMENTS,
    ClusterJob,
    counting_server,
    pipeline,
    undisturbed,
)
from tests.real.slurm_cluster import Watched, processes

TASKS = 2
LATE = 30  # seconds a task may take, where Ray does not notice its end
LONGEST = 450  # seconds of all cases, which take 60 on a quiet machine


class Job(ClusterJob):
    def run(self, **settings):
        steps = pipeline(self.folder, self.server.url)
        logs = str(self.folder / "logs")
        RayPipelineExecutor(
            steps, tasks=TASKS, logging_dir=logs, mem_per_cpu_gb=1, **settings
        ).run()

    def complete(self):
        return sorted(int(path.name) for path in (self.folder / "logs").glob("completions/*"))


def rank_workers():
    """Pairs of process ids: an actor of datatrove's, and the process of its pool in which a rank
    runs.
    """
    pids = processes(lambda argv, _: argv[0] == "ray::RankWorker.run_for_rank")
    parents = {}
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return [(parent, pid) for pid, parent in parents.items() if parent in parents]


def running_workers():
    """The pair of each task, once those of the case before have ended."""
    pairs = rank_workers()
    return pairs if len(pairs) == TASKS else []


def send(number, to_actor):
    """Gives the process in which the rank runs, which is to end in every case."""
    pairs = until(running_workers, 60, lambda: f"{len(rank_workers())} processes of {TASKS} ranks")
    actor, worker = pairs[0]
    watched = Watched(worker)
    os.kill(actor if to_actor else worker, number)
    return watched


def play(folder, event, **settings):
    """Runs the job, with an event in the middle, and once more if not everything is complete
    then.
    """
    result = {}
    with counting_server() as server:
        job = Job(folder, server, TASKS)

        def disturb():
            try:
                job.until_held()
                if event is not None:
                    send(*event).wait(30)
                    result["complete"] = job.complete()
            finally:
                server.release()  # else the job waits without end

        with ThreadPoolExecutor(1) as pool:
            disturbed = pool.submit(disturb)
            with suppress(KeyError):  # how datatrove's executor ends after a time limit
                job.run(**settings)
            disturbed.result()
        result["runs"] = 1
        if len(job.complete()) < TASKS:
            job.run()
            result["runs"] = 2
        documents = TASKS * DOCUMENTS
        return result | {
            "documents": len(server.asked),
            "again": job.asked() - documents,
            "complete in the end": job.complete(),
            "same output": outputs(folder / "output") == undisturbed(folder, TASKS),
        }


CASES = {
    "plain run of 2": (None, {}),
    "kill -9 of the actor": ((signal.SIGKILL, True), {}),
    "SIGTERM to the actor": ((signal.SIGTERM, True), {}),
    "SIGTERM to the task's process": ((signal.SIGTERM, False), {"time": LATE}),
    "kill -9 of the task's process": ((signal.SIGKILL, False), {"time": LATE}),
}


def start_ray(folder):
    """Ray gives itself 30 s to start, which a busy machine may need more of."""
    for attempt in range(3):
        try:
            ray.init(num_cpus=4, include_dashboard=False, _temp_dir=folder)
            return
        except Exception:
            ray.shutdown()
            if attempt == 2:
                raise


def raise_loopback():
    set_flags, up = 0x8914, 1
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", up))


def main(folder):
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    raise_loopback()
    # Not in our folder: the paths of Ray's sockets are long.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        start_ray(short)
        play_all(folder)
        ray.shutdown()


def play_all(folder):
    with (folder / "results").open("w") as results:
        for number, (name, (event, settings)) in enumerate(CASES.items()):
            print(f"{time.monotonic():.0f} s: {name}", file=sys.stderr, flush=True)
            results.write(
                json.dumps({"case": name} | play(folder / str(number), event, **settings)) + "\n"
            )
            results.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
