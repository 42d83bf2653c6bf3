"""The fake hub answers the real client: what a job on the hub asks for, from the first look to the last commit."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi, HfFileSystem
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from tests.hub import FakeHub


@pytest.fixture
def api(hub: FakeHub) -> HfApi:
    hub.create_repo("org/data")
    return HfApi()


def add(api: HfApi, *paths: str, revision: str | None = None, **how: str) -> str:
    additions = [CommitOperationAdd(path, f"content of {path}".encode()) for path in paths]
    message = " ".join(paths)
    made = api.create_commit(
        "org/data", additions, commit_message=message, repo_type="dataset", revision=revision, **how
    )
    return made.oid


def test_content_that_went_up_before_is_named_by_the_commit(hub: FakeHub, api: HfApi) -> None:
    additions = [CommitOperationAdd(f"data/{number}.parquet", bytes([number]) * 1000) for number in range(3)]
    api.preupload_lfs_files("org/data", additions, repo_type="dataset")
    assert len(hub.repo("org/data").uploads) == 3
    assert hub.files("org/data") == {}
    api.create_commit("org/data", additions, commit_message="all", repo_type="dataset")
    assert hub.files("org/data") == {f"data/{number}.parquet": bytes([number]) * 1000 for number in range(3)}
    assert [commit.title for commit in hub.commits("org/data")] == ["all"]


def test_a_commit_of_content_that_never_went_up_is_refused(hub: FakeHub, api: HfApi) -> None:
    addition = CommitOperationAdd("0.parquet", b"0")
    api.preupload_lfs_files("org/data", [addition], repo_type="dataset")
    hub.repo("org/data").blobs.clear()
    with pytest.raises(HfHubHTTPError, match="not in the storage"):
        api.create_commit("org/data", [addition], commit_message="all", repo_type="dataset")


def test_deleted_and_copied_files_and_folders(hub: FakeHub, api: HfApi) -> None:
    add(api, "a/0.parquet", "b/1.txt", "b/2.txt")
    operations = [
        CommitOperationDelete("b/"),
        CommitOperationCopy("a/0.parquet", "c/0.parquet"),
        CommitOperationCopy("b/1.txt", "1.txt"),
    ]
    api.create_commit("org/data", operations, commit_message="moved", repo_type="dataset")
    assert hub.files("org/data") == {
        "1.txt": b"content of b/1.txt",
        "a/0.parquet": b"content of a/0.parquet",
        "c/0.parquet": b"content of a/0.parquet",
    }


def test_listings_come_in_pages(hub: FakeHub, api: HfApi) -> None:
    hub.page_size = 3
    add(api, *(f"{folder}/{number}.txt" for folder in "ab" for number in range(4)))
    paths = [entry.path for entry in api.list_repo_tree("org/data", recursive=True, repo_type="dataset")]
    assert paths == [".gitattributes", "a", *(f"a/{n}.txt" for n in range(4)), "b", *(f"b/{n}.txt" for n in range(4))]
    assert [entry.path for entry in api.list_repo_tree("org/data", "b", repo_type="dataset")] == paths[7:]
    assert len(hub.asked("tree")) == 4 + 2
    found = api.get_paths_info("org/data", ["a", "a/1.txt", "no"], repo_type="dataset")
    assert [entry.path for entry in found] == ["a", "a/1.txt"]


def test_branches_have_files_of_their_own(hub: FakeHub, api: HfApi) -> None:
    api.create_branch("org/data", branch="run/1", repo_type="dataset")
    add(api, "0.txt", revision="run/1")
    assert list(hub.files("org/data", "run/1")) == ["0.txt"]
    assert hub.files("org/data") == {}
    assert [commit.title for commit in api.list_repo_commits("org/data", revision="run/1", repo_type="dataset")] == [
        "0.txt",
        "initial commit",
    ]
    with pytest.raises(RevisionNotFoundError):
        add(api, "0.txt", revision="no")


def test_a_file_system_reads_parts_and_writes(hub: FakeHub, api: HfApi, tmp_path: Path) -> None:
    files = HfFileSystem()
    with files.open("datasets/org/data/a/0.parquet", "wb") as file:
        file.write(b"0123456789")
    assert files.cat_file("datasets/org/data/a/0.parquet", 2, 5) == b"234"
    assert files.info("datasets/org/data/a/0.parquet")["size"] == 10
    assert files.find("datasets/org/data/a") == ["datasets/org/data/a/0.parquet"]
    local = api.hf_hub_download("org/data", "a/0.parquet", repo_type="dataset")
    assert Path(local).read_bytes() == b"0123456789"
    assert tmp_path in Path(local).parents


def test_repositories_are_made_private_and_only_where_the_user_may(hub: FakeHub, api: HfApi) -> None:
    api.create_repo("org/more", repo_type="dataset", private=True)
    assert hub.repo("org/more").private
    with pytest.raises(HfHubHTTPError, match="already created"):
        api.create_repo("org/more", repo_type="dataset")
    api.create_repo("org/more", repo_type="dataset", exist_ok=True)
    with pytest.raises(HfHubHTTPError, match="403"):
        api.create_repo("others/more", repo_type="dataset")
    with pytest.raises(RepositoryNotFoundError):
        HfApi(token=False).repo_info("org/more", repo_type="dataset")
    assert not api.repo_exists("org/none", repo_type="dataset")


def test_a_token_that_only_reads(hub: FakeHub, api: HfApi) -> None:
    reader = HfApi(token=hub.read_token)
    assert reader.whoami()["auth"]["accessToken"]["role"] == "read"
    assert reader.repo_exists("org/data", repo_type="dataset")
    with pytest.raises(HfHubHTTPError, match="403"):
        add(reader, "0.txt")
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        HfApi(token=hub.expired_token).whoami()
    hub.expire(after_requests=1)
    api.repo_info("org/data", repo_type="dataset")
    with pytest.raises(HfHubHTTPError, match="401"):
        api.repo_info("org/data", repo_type="dataset")
