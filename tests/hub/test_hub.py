"""The fake hub answers the real client; what it does wrong on purpose reaches it as the real hub's errors do."""

from __future__ import annotations

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from tests.hub import FakeHub


@pytest.fixture
def api(hub: FakeHub) -> HfApi:
    hub.create_repo("org/data")
    return HfApi()


def add(api: HfApi, path: str, **how: str) -> str:
    addition = CommitOperationAdd(path, path.encode())
    return api.create_commit("org/data", [addition], commit_message=path, repo_type="dataset", **how).oid


def refused(api: HfApi, path: str, **how: str) -> httpx2.Response:
    with pytest.raises(HfHubHTTPError) as caught:
        add(api, path, **how)
    return caught.value.response


def test_content_that_went_up_before_is_named_by_the_commit(hub: FakeHub, api: HfApi) -> None:
    additions = [CommitOperationAdd(f"data/{number}.parquet", bytes([number]) * 1000) for number in range(3)]
    api.preupload_lfs_files("org/data", additions, repo_type="dataset")
    assert len(hub.repo("org/data").uploads) == 3
    assert hub.files("org/data") == {}
    api.create_commit("org/data", additions, commit_message="all", repo_type="dataset")
    assert hub.files("org/data") == {f"data/{number}.parquet": bytes([number]) * 1000 for number in range(3)}
    lost = CommitOperationAdd("lost.parquet", b"lost")
    api.preupload_lfs_files("org/data", [lost], repo_type="dataset")
    hub.repo("org/data").blobs.clear()
    with pytest.raises(HfHubHTTPError, match="not in the storage"):
        api.create_commit("org/data", [lost], commit_message="lost", repo_type="dataset")


def test_a_status_before_the_effect_and_after_it(hub: FakeHub, api: HfApi) -> None:
    hub.fail("commit", status=500)
    assert refused(api, "0.txt").status_code == 500
    assert hub.commits("org/data") == []
    hub.fail("commit", status=504, after_effect=True)
    assert refused(api, "1.txt").status_code == 504
    assert list(hub.files("org/data")) == ["1.txt"]


def test_a_lost_answer(hub: FakeHub, api: HfApi) -> None:
    dropped = hub.drop_answer("commit")
    with pytest.raises(httpx2.RemoteProtocolError):
        add(api, "0.txt")
    assert [commit.title for commit in hub.commits("org/data")] == ["0.txt"]
    assert dropped.hits == 1
    add(api, "1.txt")
    assert [request.status for request in hub.asked("commit")] == [0, 200]


def test_whoever_commits_second_gets_412(hub: FakeHub, api: HfApi) -> None:
    first = add(api, "0.txt")
    add(api, "1.txt")
    assert refused(api, "2.txt", parent_commit=first).status_code == 412
    assert list(hub.files("org/data")) == ["0.txt", "1.txt"]


def test_listings_lag_behind(hub: FakeHub, api: HfApi) -> None:
    hub.lag_commits = 1
    add(api, "0.txt")
    newest = add(api, "1.txt")

    def seen(revision: str) -> list[str]:
        listed = api.list_repo_tree("org/data", repo_type="dataset", revision=revision)
        return [entry.path for entry in listed if not entry.path.startswith(".")]

    assert seen("main") == ["0.txt"]
    assert seen(newest) == ["0.txt", "1.txt"]
    assert api.get_paths_info("org/data", "1.txt", repo_type="dataset") == []
    assert api.repo_info("org/data", repo_type="dataset").sha == newest
    hub.lag_kinds |= {"info"}
    assert api.repo_info("org/data", repo_type="dataset").sha != newest
