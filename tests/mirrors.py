"""What tests of mirrors share: a rank that was stopped in the middle, and what a folder says is
answered.
"""

import asyncio
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from datatrove_ckpt.errors import ServerUnavailable
from datatrove_ckpt.mirror import mirror
from datatrove_ckpt.mirror.restore import restore
from datatrove_ckpt.testing import FakeServer, outputs
from tests.jobs import STOPS_SOON, chat, documents, runner
from tests.kept import committed, read_rank

ONE_BY_ONE = {"max_concurrent_generations": 1, "max_concurrent_documents": 1}


async def ask_twice(document, generate):
    await generate(chat(document.text))
    return await generate(chat(f"{document.text} again"))


class Passes:
    """Counts the uploads of mirrors, also those that found nothing new."""

    def __init__(self):
        self.number = 0
        self._failures = []

    def watch(self, monkeypatch):
        """Makes mirrors upload all the time, and counts the uploads."""
        upload = mirror.RemoteMirror._upload

        def counted(mirrored):
            try:
                upload(mirrored)
            except Exception as error:
                self._failures.append(error)
                raise
            self._failures.clear()
            self.number += 1

        monkeypatch.setattr(mirror, "_MIN_WAIT_SECONDS", 0.001)
        monkeypatch.setattr(mirror.RemoteMirror, "_upload", counted)

    def waits(self):
        """Yields pauses until an upload has started and ended."""
        until = self.number + 2
        while self.number < until:
            if len(self._failures) > 500:  # each is tried again at once
                raise AssertionError("nothing can be uploaded") from self._failures[-1]
            yield 0.0005

    def one(self):
        for pause in self.waits():
            time.sleep(pause)


PASSES = Passes()


class Job:
    """Six documents in chunks of three, two requests each, one after the other, mirrored to
    ``remote``.
    """

    def __init__(self, folder, remote=None):
        self.folder = folder
        self.remote = remote or str(folder / "remote")
        self.checkpoints = folder / "checkpoints"
        self.rank = self.checkpoints / "00000"

    def run(self, server, number=6, patience=(), **changes):
        settings = {
            "checkpoints_remote_dir": self.remote,
            "mirror_seconds": 1000,
            "records_per_chunk": 3,
            "checkpoints_local_dir": str(self.checkpoints),
            "config": ONE_BY_ONE | dict(patience),
        }
        runner(self.folder, server, ask_twice, **settings | changes).run(documents(number))

    def run_until(self, question, wait=lambda: None, **changes):
        """Runs until this question fails; then the rank uploads a last time.

        ``wait`` is called before each answer.
        """

        def broken(payload, times):
            wait()
            return 500 if payload["messages"][-1]["content"] == question else None

        with FakeServer(status=broken) as server, pytest.raises(ServerUnavailable):
            self.run(server, patience=STOPS_SOON, **changes)

    def on_another_node(self):
        """The same job with a disk of its own, an empty one; output and mirror are shared."""
        other = Job(self.folder, self.remote)
        other.checkpoints = self.folder / "other"
        other.rank = other.checkpoints / "00000"
        return other

    @property
    def output(self):
        return outputs(self.folder / "output")

    def lose_the_node(self):
        shutil.rmtree(self.checkpoints, ignore_errors=True)


def assert_not_asked_again(known, server):
    """Also forgets what is known."""
    assert not known & server.asked, "asked again for what a version holds"
    known.clear()


def up_to(question):
    """The questions before this one, one document after the other."""
    asked = [f"text {n}{end}" for n in range(6) for end in ("", " again")]
    return Counter(asked[: asked.index(question)])


def answered(rank):
    """What is answered according to a rank's folder."""
    finished, cached = known_ordinals(rank)
    found = {f"text {ordinal}{end}" for ordinal in finished for end in ("", " again")}
    found.update(f"text {ordinal}" for ordinal in cached)
    found.update(f"text {ordinal} again" for ordinal, number in cached.items() if number == 2)
    return Counter(found)


def in_newest_version(remote, scratch):
    """The questions that are answered according to a mirror."""
    shutil.rmtree(scratch, ignore_errors=True)
    restore(f"{remote}/00000", scratch / "00000")
    return answered(scratch / "00000")


def known_ordinals(rank):
    """The documents that commits and journals hold, and of how many answers of each the request
    cache knows.
    """
    cached, finished, commits = read_rank(rank)
    return {*finished, *committed(commits)}, Counter(ordinal for ordinal, _ in cached)


def read_rows(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(
            "SELECT ordinal, chunk_index, doc_id, rollout_idx, payload_hash, occurrence, result, error_message "
            "FROM request_cache ORDER BY 1, 4, 5, 6"
        ).fetchall()


RUN_DOCUMENTS = """
import sys
from loguru import logger
from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.mirror import mirror
from tests.jobs import documents, writer
from tests.mirrors import Path, ask_twice

mirror.STOP_SECONDS = 300.0  # the store may be as busy as the machine
folder, remote, url, number = sys.argv[1:]
config = InferenceConfig("endpoint", "fake", endpoint_url=url, max_concurrent_generations=8)
runner = InferenceRunner(
    ask_twice,
    config,
    writer(Path(folder)),
    checkpoints_local_dir=folder + "/checkpoints",
    records_per_chunk=7,
    checkpoints_remote_dir=remote,
    mirror_seconds=0.02,
)
runner.run(documents(int(number)))
"""


class Killed:
    """Documents in a process of its own, killed with -9 at random moments; the node's disk is lost
    every time.

    Args:
        delay: seconds before each answer.
    """

    MOST = 40
    """The most requests of one process before it is killed."""

    def __init__(self, folder, remote, delay, kills):
        self.folder = folder
        self.remote = remote
        self.log = folder / "log"
        # Two requests each: enough for all the kills, even if none of them costs a single request.
        self.documents = self.MOST * (kills + 1) // 2
        self._delay = delay
        self._kills = kills
        self._left = 0
        self._process = None

    def delay(self, payload, times):
        """For the server: kills the process before the answer that might finish it, however busy
        the machine is.
        """
        self._left -= 1
        if self._left <= 0 and self._process is not None:
            self._process.kill()
            self._process = None
        return self._delay

    def run_to_the_end(self, server, chance):
        """Checks that what the newest version holds is never requested again."""
        known = Counter()
        for left in [*(chance.randrange(5, self.MOST) for _ in range(self._kills)), None]:
            server.asked.clear()
            killed = self._run_once(server, left)
            assert_not_asked_again(known, server)
            assert killed == (left is not None)
            if killed:
                shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
                known = in_newest_version(self.remote, self.folder / "scratch")

    def _run_once(self, server, kill_after):
        """Returns whether it was killed."""
        argv = [
            sys.executable,
            "-c",
            RUN_DOCUMENTS,
            str(self.folder),
            self.remote,
            server.url,
            str(self.documents),
        ]
        self._left = kill_after or 0
        with self.log.open("ab") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=Path(__file__).parents[1])
        if kill_after is not None:
            self._process = process
        code = process.wait()
        assert code in (0, -signal.SIGKILL), self.log.read_text()[-3000:]
        return code != 0


async def one_pass():
    for pause in PASSES.waits():
        await asyncio.sleep(pause)


async def ask_between_passes(document, generate):
    """Between any two answers there is an upload to the mirror."""
    await generate({"messages": [{"role": "user", "content": document.text}]})
    await one_pass()
    answer = await generate({"messages": [{"role": "user", "content": f"{document.text} again"}]})
    await one_pass()
    return answer
