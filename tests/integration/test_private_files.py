"""Files that may hold prompts, documents or answers are for their owner only; secrets are in no
file at all.
"""

import os
import signal
import stat
import subprocess
import sys

import pytest

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.testing import FakeServer
from tests.kept import until_kept
from tests.patience import until

JOB = """
import os, sys
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.writers import JsonlWriter
from datatrove_ckpt import InferenceConfig, InferenceRunner
os.umask(0o022)
async def rollout(document, generate):
    return (await generate({"messages": [{"role": "user", "content": document.text}]})).text
def read(data, rank=0, world_size=1):
    for number in range(9):
        yield Document(text=f"text {number}", id=str(number))
config = InferenceConfig(
    "endpoint", "m", endpoint_url=sys.argv[1] + "/?code=${CODE}", api_key_env="KEY_OF_TEST",
    max_concurrent_generations=2,
)
runner = InferenceRunner(
    rollout, config, JsonlWriter("out/put", "${rank}_${chunk_index}.jsonl", compression=None), records_per_chunk=4,
    checkpoints_local_dir="run/checkpoints", checkpoints_remote_dir="run/mirror", mirror_seconds=0.1,
    skip_bad_requests=True, drain_seconds=0.1,
)
LocalPipelineExecutor([read, runner], tasks=1, logging_dir="logs").run()
"""
SECRETS = {"CODE": "canary-code", "KEY_OF_TEST": "canary-key"}


def start(folder, server):
    command = [sys.executable, "-c", JOB, server.url]
    environment = {**os.environ, **SECRETS}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    )


def modes(folder):
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in sorted(folder.rglob("*"))
    }


def check(folder):
    """Everything inside a rank's folder is private, and no file holds a secret."""
    found = modes(folder)
    for name, mode in found.items():
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            assert not any(secret.encode() in content for secret in SECRETS.values()), name
        if "checkpoints/00000" in name:
            assert mode == (0o700 if (folder / name).is_dir() else 0o600), name
    assert found["run/mirror/00000"] == found["run/checkpoints/00000"] == 0o700
    assert (
        found["run/checkpoints"] == found["run/checkpoints/last_chunk"] == found["out/put"] == 0o755
    )
    return found


@pytest.mark.matrix("echo", [True, False])
def test_a_run_leaves_private_files_when_it_is_killed_and_when_it_ends(tmp_path, echo):
    def status(payload, times):
        return 400 if echo and "text 8" in str(payload) else None

    with FakeServer(hold_after=6, status=status) as server:
        process = start(tmp_path, server)
        until_kept(tmp_path / "run/checkpoints", 2)
        there = (
            "checkpoints/last_chunk/00000.txt",
            "checkpoints/00000/chunk_00001.jsonl",
            "mirror",
        )
        until(lambda: all((tmp_path / "run" / name).exists() for name in there))
        os.killpg(process.pid, signal.SIGKILL)  # also the process of datatrove's that would stay
        process.wait()
        killed = check(tmp_path)
        assert killed["run/checkpoints/00000/replay.sqlite3-wal"] == 0o600
        assert "run/checkpoints/00000/chunk_00001.jsonl" in killed
        server.release()
        assert start(tmp_path, server).wait() == 0
    ended = check(tmp_path)
    assert (
        ended["out/put/00000_00001.jsonl"] == ended["run/checkpoints/last_chunk/00000.txt"] == 0o644
    )
    assert ("run/checkpoints/00000/dead_letters.jsonl" in ended) is echo
    assert not [name for name in ended if "staging" in name]


def test_a_file_that_its_owner_opened_to_a_group_stays_open(tmp_path):
    path = tmp_path / "run.json"
    files.disk.replace(path, b"1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    files.disk.replace(path, b"2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
