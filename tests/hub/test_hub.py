"""The fake hub answers the real client."""

import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError


@pytest.fixture
def api(hub):
    hub.create_repo("org/data")
    return HfApi()


def add(api, path, **how):
    addition = CommitOperationAdd(path, path.encode())
    return api.create_commit(
        "org/data", [addition], commit_message=path, repo_type="dataset", **how
    ).oid


def test_content_that_went_up_before_is_named_by_the_commit(hub, api):
    additions = [
        CommitOperationAdd(f"data/{number}.parquet", bytes([number]) * 1000) for number in range(3)
    ]
    api.preupload_lfs_files("org/data", additions, repo_type="dataset")
    assert len(hub.repo("org/data").uploads) == 3
    assert hub.files("org/data") == {}
    api.create_commit("org/data", additions, commit_message="all", repo_type="dataset")
    assert hub.files("org/data") == {
        f"data/{number}.parquet": bytes([number]) * 1000 for number in range(3)
    }
    lost = CommitOperationAdd("lost.parquet", b"lost")
    api.preupload_lfs_files("org/data", [lost], repo_type="dataset")
    hub.repo("org/data").blobs.clear()
    with pytest.raises(HfHubHTTPError, match="not in the storage"):
        api.create_commit("org/data", [lost], commit_message="lost", repo_type="dataset")


def test_listings_lag_behind(hub, api):
    hub.lag_commits = 1
    add(api, "0.txt")
    newest = add(api, "1.txt")

    def seen(revision):
        listed = api.list_repo_tree("org/data", repo_type="dataset", revision=revision)
        return [entry.path for entry in listed if not entry.path.startswith(".")]

    assert seen("main") == ["0.txt"]
    assert seen(newest) == ["0.txt", "1.txt"]
    assert api.get_paths_info("org/data", "1.txt", repo_type="dataset") == []
    assert api.repo_info("org/data", repo_type="dataset").sha == newest
    hub.lag_kinds |= {"info"}
    assert api.repo_info("org/data", repo_type="dataset").sha != newest
