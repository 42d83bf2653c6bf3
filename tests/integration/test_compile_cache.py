"""What a server compiled on one node is there before a server starts on a new node, by the mirror;
and nothing but a key makes it so, because servers execute it.
"""

import gzip
import os
import sys
import threading
from pathlib import Path

import pytest

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.common.redaction import MIRROR_KEY_VARIABLE
from datatrove_ckpt.mirror.object_store import ObjectStore
from tests import jobs
from tests.integration.test_supervision import ENGINE
from tests.processes import write_program

# Compiles unless it finds its code, as vLLM; writes down which, and its environment.
VLLM = f"""#!{sys.executable} -S
import os, pathlib
cache = pathlib.Path(os.environ["VLLM_CACHE_ROOT"], "torch_compile_cache/torch_aot_compile/0123/rank_0_0")
with open("starts", "a") as starts:
    starts.write("found\\n" if (cache / "code.py").exists() else "compiled\\n")
cache.mkdir(parents=True, exist_ok=True)
(cache / "code.py").write_text("print(1)")
(cache / "cache_key_factors.json").write_text(str(dict(os.environ)))
{ENGINE}"""


@pytest.fixture
def node(here, monkeypatch):
    """Runs a job on a new node; returns what each of its servers found, and the archives."""
    monkeypatch.setattr("tempfile.tempdir", str(here))
    monkeypatch.setenv(MIRROR_KEY_VARIABLE, "a key of the user's")
    write_program(Path("bin/vllm"), VLLM)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:{os.environ['PATH']}")
    numbers = iter(range(10))

    def run(**settings):
        number = next(numbers)
        home = here / f"home {number}"
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(home))
        older = home / "torch_compile_cache/torch_aot_compile/4567/of another model"
        older.parent.mkdir(parents=True)
        older.touch()
        config = InferenceConfig("vllm", "m", server_stop_timeout_sec=2.0, **settings)
        runner = InferenceRunner(
            jobs.ask,
            config,
            jobs.writer(here / f"job {number}"),
            checkpoints_local_dir=str(here / f"job {number}/checkpoints"),
            checkpoints_remote_dir=f"file://{here}/mirror {number}",
        )
        (here / f"mirror {number}").mkdir()
        (here / "shared").mkdir(exist_ok=True)
        (here / f"mirror {number}/compile-cache").symlink_to(here / "shared")
        Path("starts").unlink(missing_ok=True)
        runner.run(iter(jobs.documents(1)), rank=0)
        for thread in threading.enumerate():
            if thread.name == "datatrove-ckpt compiled":
                thread.join(300)
        assert len(jobs.rows(here / f"job {number}")) == 1
        assert [path.name for path in home.iterdir()] == ["torch_compile_cache"]
        return Path("starts").read_text().split(), sorted(Path("shared").iterdir())

    return run


def test_a_new_node_starts_with_what_another_node_compiled_if_there_is_a_key(
    node, log, monkeypatch
):
    starts, (archive,) = node()
    assert starts == ["compiled"]
    content = archive.read_bytes()
    packed = gzip.decompress(content.partition(b"\n")[2])
    assert b"print(1)" in packed
    assert b"VLLM_API_KEY" not in packed
    assert b"of another model" not in packed
    assert node() == (["found"], [archive])
    assert archive.read_bytes() == content
    starts, archives = node(model_max_context=100)
    assert starts == ["compiled"]
    assert len(archives) == 2
    assert not [line for line in log if "compiled could not" in line]
    monkeypatch.delenv(MIRROR_KEY_VARIABLE)
    # Nothing that was compiled goes to the mirror or comes from it.
    assert node() == (["compiled"], archives)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["other code", "cut", "no seal", "another key"])
def test_an_archive_that_is_not_whole_or_not_sealed_is_not_used_and_replaced(
    node, log, change, monkeypatch
):
    _, (archive,) = node()
    whole = archive.read_bytes()
    if change == "cut":
        archive.write_bytes(whole[:-50])
    elif change == "other code":
        head, _, packed = whole.partition(b"\n")
        other = gzip.decompress(packed).replace(b"print(1)", b"print(2)")
        archive.write_bytes(head + b"\n" + gzip.compress(other))
    elif change == "no seal":
        archive.write_bytes(whole.partition(b"\n")[2])
    else:
        monkeypatch.setenv(MIRROR_KEY_VARIABLE, "another key of the user's")
    assert node() == (["compiled"], [archive])
    assert len([line for line in log if "could not be fetched from the mirror" in line]) == 1
    assert node() == (["found"], [archive])


def test_a_mirror_that_fails_costs_one_warning_each_way(node, log, monkeypatch):
    path = ObjectStore._path

    def fail(store, name):
        if name.startswith("compile-cache"):
            raise OSError("the bucket is away")
        return path(store, name)

    monkeypatch.setattr(ObjectStore, "_path", fail)
    assert node() == (["compiled"], [])
    assert len([line for line in log if "the bucket is away" in line]) == 2
