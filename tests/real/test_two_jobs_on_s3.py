"""Two jobs and one output folder on a real S3 server: the tests of test_owner.py, which name what
they prove.
"""

import threading
from functools import partial

import pytest
from datatrove.data import Document

from datatrove_ckpt.errors import OutputMismatch
from tests.owners import SCENARIOS, UNOWNED, Place, job, servers, start, unowned
from tests.real.s3 import bucket, relay, weed

__all__ = ["bucket", "relay", "servers", "start", "unowned", "weed"]

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.timeout(300)]


class S3Place(Place):
    def __init__(self, place):
        self.fs = place.fs
        self.url = f"s3://{place.name}/output"
        self._root = f"{place.name}/output"
        self._moved = {}
        self.files = partial(place.files, "output")


@pytest.fixture
def place(bucket, relay):
    return S3Place(bucket)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_jobs(scenario, tmp_path, place, servers, start, monkeypatch, command):
    scenario(tmp_path, place, servers, start, monkeypatch, command)


def ended_together(tmp_path, place, servers, documents, before=lambda: None):
    """How two jobs end that start at one moment: None, or the error."""
    ended = []

    def start(name, number):
        before()
        try:
            job(tmp_path, name, servers[number], place).run(documents)
            ended.append(None)
        except OutputMismatch as error:
            ended.append(error)

    threads = [
        threading.Thread(target=start, args=(name, number)) for number, name in enumerate("ab")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def test_of_two_jobs_that_start_at_one_moment_one_alone_asks(tmp_path, place, servers):
    four = [Document("text", f"id {n}") for n in range(4)]
    ended = ended_together(tmp_path, place, servers, four, threading.Barrier(2).wait)
    assert len(ended) == 2
    assert ended.count(None) == 1
    assert sorted(server.asked.total() for server in servers) == [0, 4]
    winner = b'"text":"a"' if servers[0].asked else b'"text":"b"'
    assert all(content.count(winner) == 2 for content in place.files().values())


@UNOWNED
def test_s3_itself_refuses_the_second_of_two_files_that_are_sent_at_one_moment(
    tmp_path, place, servers, relay
):
    """Both have looked, and found nothing."""
    both_have_looked = threading.Barrier(2)

    def rule(request):
        if (
            request.kind == "HeadObject"
            and request.stage == "answered"
            and "00000_00000" in request.path
        ):
            relay.rule = rule if both_have_looked.n_waiting == 0 else (lambda request: None)
            both_have_looked.wait(60)

    relay.rule = rule
    ended = ended_together(tmp_path, place, servers, [Document("text", "id 0")])
    assert len(ended) == 2
    assert ended.count(None) == 1
