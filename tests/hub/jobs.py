"""The Jobs of a fake hub: each is a real process with a home, a TMPDIR and a working folder of its
own.

    started     ``uv run OPTIONS SCRIPT ARGUMENTS`` is this venv's python with the script; /data is
                a folder with the
                files of the bucket that the request mounts there
    timeout     SIGTERM, and SIGKILL after ``grace`` seconds; with ``grace`` 0 SIGKILL at once
    cancel      the same
    ``evict``   SIGTERM, then SIGKILL; ``kill``: SIGKILL

The job finds no file of the repository by itself: its package is what it was given. Its uploads to
buckets are replaced as in the tests' own process (``xet.py``).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from tests.hub import xet
from tests.hub.api import Problem
from tests.hub.client import environment

_ROOT = Path(__file__).parents[2]
_CUSTOMIZE = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location
sys.path[:] = [path for path in sys.path if path != {str(_ROOT)!r}]
spec = spec_from_file_location("fake_xet", {xet.__file__!r})
fake = module_from_spec(spec)
spec.loader.exec_module(fake)
import huggingface_hub.utils._xet as real
real.get_xet_session = fake.XetSession
"""
# Plays uv: the first process of a job, which hands SIGTERM on and ends as its child does.
_UV = 'trap : TERM; "$@" & child=$!; while kill -0 $child 2>/dev/null; do wait $child; code=$?; done; exit $code'


class Job:
    """One job.

    Attributes:
        spec: the request.
        stage: as the API says it.
        ended_by: "timeout", "cancel", "kill", "evict", or "" if nothing ended it.
        log: what it has printed, once it has ended.
    """

    def __init__(self, number, spec, folder, hub, grace):
        self.id, self.spec, self.stage, self.ended_by, self.log = (
            f"job{number:04d}",
            spec,
            "RUNNING",
            "",
            "",
        )
        self._folder = folder / self.id
        for name in ("home", "tmp", "work", "data", "site"):
            (self._folder / name).mkdir(parents=True)
        (self._folder / "site" / "sitecustomize.py").write_text(_CUSTOMIZE)
        for volume in spec.get("volumes") or ():
            below = f"{volume['path']}/" if volume.get("path") else ""
            for path, content in hub.files(volume["source"], kind="bucket").items():
                if path.startswith(below):
                    (self._folder / "data" / path.removeprefix(below)).write_bytes(content)
        variables = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self._folder / "home"),
            "TMPDIR": str(self._folder / "tmp"),
        }
        variables |= environment(hub.url, None, self._folder / "home" / "hf")
        variables |= {"PYTHONPATH": str(self._folder / "site"), "JOB_ID": self.id}
        variables |= spec["environment"] | (spec.get("secrets") or {})
        script = next(
            index for index, word in enumerate(spec["command"]) if word.startswith("/data/")
        )
        words = [
            re.sub("^/data/", f"{self._folder}/data/", word) for word in spec["command"][script:]
        ]
        self._output = (self._folder / "log").open("w+")
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", _UV, "uv", sys.executable, *words],
            cwd=self._folder / "work",
            env=variables,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )
        self._timers = []
        if spec.get("timeoutSeconds"):
            self._later(spec["timeoutSeconds"], lambda: self.end("timeout", grace))
        threading.Thread(target=self._wait, daemon=True).start()

    def end(self, why, grace):
        """Begins to end it. Whether nothing else had."""
        if self.ended_by or self.stage != "RUNNING":
            return False
        self.ended_by = why
        if grace:
            self._signal(signal.SIGTERM)
            self._later(grace, lambda: self._signal(signal.SIGKILL))
        else:
            self._signal(signal.SIGKILL)
        return True

    def _later(self, seconds, call):
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _signal(self, number):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _wait(self):
        code = self.process.wait()
        for timer in self._timers:
            timer.cancel()
        self._signal(signal.SIGKILL)
        self._output.seek(0)
        with self._output as output:
            self.log = output.read()
        shutil.rmtree(self._folder, ignore_errors=True)
        self.stage = "CANCELED" if self.ended_by == "cancel" else "ERROR" if code else "COMPLETED"

    def shown(self, hub):
        names = ("command", "environment", "labels", "flavor", "dockerImage")
        owner = {"id": "1", "name": hub.user, "type": "user"}
        answer = {name: self.spec[name] for name in names if name in self.spec}
        return answer | {
            "id": self.id,
            "owner": owner,
            "status": {"stage": self.stage, "message": None},
        }


class Jobs:
    """``Jobs(hub, folder)``: from now on the hub has an API for jobs, which work below ``folder``.

    Attributes:
        all: in the order of their start.
    """

    def __init__(self, hub, folder):
        self.all = []
        self._owners = {}
        self._hub, self._folder, self.grace = hub, folder, 20.0
        hub.jobs = self

    @property
    def running(self):
        return [job for job in self.all if job.stage == "RUNNING"]

    @property
    def ends(self):
        """How many ended so: by what, and with which stage."""
        return Counter((job.ended_by, job.stage) for job in self.all)

    def of(self, rank):
        """The job that has this rank now: a process of it has claimed the rank."""
        buckets = [name for kind, name in self._hub.repos if kind == "bucket"]
        names = [name for bucket in buckets for name in self._hub.files(bucket, kind="bucket")]
        marks = sorted(name.rpartition("/")[2] for name in names if f"/claims/{rank:05d}-" in name)
        owner = marks[-1].split("-")[2] if marks else "free"
        if owner == "free":
            return None
        # Of a job that was killed, the last requests are read when its process is gone.
        with suppress(ProcessLookupError, StopIteration):
            session = os.getsid(int(owner[16:24], 16))
            self._owners[owner] = next(job for job in self.running if job.process.pid == session)
        return self._owners.get(owner)

    def close(self):
        for job in self.running:
            job.end("close", 0.0)
            while job.stage == "RUNNING":
                time.sleep(0.01)

    def answer(self, http, kind, arguments, body):
        if kind == "job-run":
            spec = json.loads(body)
            assert not {*spec["environment"]} & {*(spec.get("secrets") or {})}
            self.all.append(Job(len(self.all), spec, self._folder, self._hub, self.grace))
            return web.json_response(self.all[-1].shown(self._hub))
        if kind == "job-list":
            wanted = [label.split("=", 1) for label in http.query.getall("label", [])]
            stages = http.query.getall("stage", [])
            found = [job for job in self.all if not stages or job.stage in stages]
            found = [
                job
                for job in found
                if all(job.spec["labels"].get(key) == value for key, value in wanted)
            ]
            return web.json_response([job.shown(self._hub) for job in found])
        job = next((job for job in self.all if job.id == arguments["id"]), None)
        if job is None:
            raise Problem(404, "Job not found")
        if kind == "job-cancel":
            job.end("cancel", self.grace)
        return web.json_response(job.shown(self._hub))
