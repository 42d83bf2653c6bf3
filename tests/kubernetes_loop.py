"""What Kubernetes does with an Indexed Job, as far as its controller and a kubelet show: pods as processes.

A pod has an empty HOME, TMPDIR and working folder of its own, which are removed when it has ended, and the ConfigMap's
files. Its volumes are folders of this machine, at the paths where the Job mounts them. What follows from its end is
read from the Job: the first rule of ``podFailurePolicy`` that fits, ``backoffLimitPerIndex``, ``parallelism``.
All pods see the same host and the same processes, as those of one node may.
"""

from __future__ import annotations

import queue
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from tests import processes

CONFIG, WORK = "/etc/datatrove-ckpt", "/work"
LABEL = "metadata.labels['batch.kubernetes.io/controller-uid']"


class Pod:
    """One process of a worker.

    Attributes:
        ended_by: "eviction", "spot" (SIGTERM, but no condition), "node lost", "cut off", or "" if nothing ended it.
        asked: the questions that it sent.
    """

    def __init__(self, folder: Path, index: int, job: dict[str, Any], files: dict[str, str], launch: str) -> None:
        self.index, self.ended_by, self.asked = index, "", set[str]()
        self._folder = folder
        for name in ("home", "tmp", "work", "config"):
            (folder / name).mkdir(parents=True)
        spec = job["spec"]["template"]["spec"]
        config = spec["volumes"][0]["configMap"]
        items = config.get("items") or [{"key": name, "path": name} for name in files]
        for path, key in ((folder / "config" / item["path"], item["key"]) for item in items):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[key])
        self.grace = spec["terminationGracePeriodSeconds"]
        (container,) = spec["containers"]
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
        for one in container["env"]:
            if "value" in one:
                environment[one["name"]] = self._here(one["value"])
            else:
                assert one["valueFrom"] == {"fieldRef": {"fieldPath": LABEL}}
                environment[one["name"]] = launch
        program, *words = [self._here(word) for word in container["command"]]
        assert program == "datatrove-ckpt"
        self._log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "datatrove_ckpt", *words],
            cwd=self._here(container["workingDir"]),
            env=environment,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def _here(self, text: str) -> str:
        return text.replace(CONFIG, str(self._folder / "config")).replace(WORK, str(self._folder / "work"))

    def end(self, why: str) -> None:
        """Begins to end it as Kubernetes does. One that is cut off stands still, and may go on later (SIGCONT)."""
        self.ended_by = why
        numbers = {"node lost": signal.SIGKILL, "cut off": signal.SIGSTOP}
        self.process.send_signal(numbers.get(why, signal.SIGTERM))

    def wait(self) -> int:
        """Its exit code, as a container's: 128 + n of a signal."""
        code = self.process.wait()
        processes.kill_session(self.process.pid)
        return code if code >= 0 else 128 - code

    def close(self) -> str:
        """Removes all that it had on its disk. Returns its log."""
        self._log.seek(0)
        with self._log as log:
            text = log.read()
        shutil.rmtree(self._folder)
        return text


class Cluster:
    """Runs a Job to its end.

    Attributes:
        active: the pod of each index that runs.
        succeeded, failed: indexes.
        exits: how often a pod ended so: by why, exit code and what followed from it.
        is_failed: a rule with FailJob fitted.
        cut_off: pods that are not removed.
    """

    def __init__(self, folder: Path, manifests: str) -> None:
        config_map, self._job = yaml.safe_load_all(manifests)
        self._files = config_map["data"]
        self._spec = self._job["spec"]
        self._folder = folder
        self._launch = uuid.uuid4().hex
        self._ended: queue.SimpleQueue[tuple[Pod, int]] = queue.SimpleQueue()
        self._timers: list[threading.Timer] = []
        self._failures = Counter[int]()
        self.active: dict[int, Pod] = {}
        self.succeeded, self.failed, self.is_failed = set[int](), set[int](), False
        self.exits = Counter[tuple[str, int, str]]()
        self.logs: list[str] = []
        self.cut_off: list[Pod] = []

    def end(self, index: int, why: str) -> bool:
        """Ends the pod of an index, from any thread. Whether there was one that nothing had ended yet."""
        pod = self.active.get(index)
        if pod is None or pod.ended_by:
            return False
        pod.end(why)
        if why == "cut off":
            self.cut_off.append(pod)
            self._ended.put((pod, 128 + signal.SIGKILL))
        if why in ("eviction", "spot"):
            timer = threading.Timer(pod.grace, pod.process.kill)
            timer.daemon = True
            timer.start()
            self._timers.append(timer)
        return True

    def run(self) -> None:
        waiting = list(range(self._spec["completions"]))
        while waiting or self.active:
            while waiting and len(self.active) < self._spec["parallelism"] and not self.is_failed:
                self._start(waiting.pop(0))
            pod, code = self._ended.get()
            if self.active.get(pod.index) is not pod:  # it was cut off
                continue
            if pod not in self.cut_off:
                self.logs.append(pod.close())
            del self.active[pod.index]
            if self._follows(pod, code):
                waiting.append(pod.index)
            if self.is_failed:
                waiting.clear()
                for index in [*self.active]:
                    self.end(index, "spot")
        for timer in self._timers:
            timer.cancel()

    def _start(self, index: int) -> None:
        # All pods see the same paths. One that is cut off keeps its own.
        folder = self._folder / f"{index}-{sum(pod.index == index for pod in self.cut_off)}"
        pod = self.active[index] = Pod(folder, index, self._job, self._files, self._launch)
        threading.Thread(target=lambda: self._ended.put((pod, pod.wait())), daemon=True).start()

    def _follows(self, pod: Pod, code: int) -> bool:
        """What follows from the end of a pod. Returns whether its index gets another one."""
        action = "Succeed" if code == 0 else self._action(pod, code)
        self.exits[pod.ended_by, code, action] += 1
        if action == "Count":
            self._failures[pod.index] += 1
            action = "FailIndex" if self._failures[pod.index] > self._spec["backoffLimitPerIndex"] else "Ignore"
        if action == "Succeed":
            self.succeeded.add(pod.index)
        elif action == "FailIndex":
            self.failed.add(pod.index)
        elif action == "FailJob":
            self.is_failed = True
        return action == "Ignore"

    def _action(self, pod: Pod, code: int) -> str:
        conditions = {"DisruptionTarget"} if pod.ended_by in ("eviction", "node lost", "cut off") else set[str]()
        for rule in self._spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes is not None:
                assert codes["operator"] == "In"
                fits = code in codes["values"]
            else:
                fits = any(one["type"] in conditions for one in rule["onPodConditions"])
            if fits:
                return str(rule["action"])
        return "Count"
