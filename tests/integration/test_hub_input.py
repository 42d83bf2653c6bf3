"""Input on the hub: no file before the position is downloaded again."""

import pytest
from huggingface_hub import HfFileSystem

from datatrove_ckpt.errors import CheckpointMismatch, ConfigError, InputError
from datatrove_ckpt.readers import (
    HuggingFaceDatasetReader,
    JsonlReader,
    ParquetReader,
    position_state,
)
from datatrove_ckpt.torch import ReaderDataset
from tests.unit.tables import parquet, resume

pytestmark = pytest.mark.xdist_group("datasets")  # its import takes seconds

REPOSITORY = "org/data"


@pytest.fixture
def ranges(monkeypatch):
    """What is downloaded of files that are read in parts: path in the repository, first byte,
    end.
    """
    from huggingface_hub.hf_file_system import HfFileSystemFile

    found = []
    fetch = HfFileSystemFile._fetch_range

    def noted(file, start, end):
        found.append((file.resolved_path.path_in_repo, start, end))
        return fetch(file, start, end)

    monkeypatch.setattr(HfFileSystemFile, "_fetch_range", noted)
    return found


def options(**more):
    return {
        "dataset": REPOSITORY,
        "dataset_options": {"split": "train"},
        "streaming": True,
        "batch_size": 4,
    } | more


def read(given):
    return list(HuggingFaceDatasetReader(**given).run())


def test_no_file_before_the_position_is_downloaded_again(hub, ranges):
    contents = {f"data/train-{n}.parquet": parquet(100 * n, 40, 50_000) for n in range(3)}
    hub.put(REPOSITORY, contents)
    documents = read(options())
    position = documents[40 + 29]
    ranges.clear()
    asked = len(hub.requests)
    assert resume(options(), position) == documents[40 + 30 :]
    footer = len(contents["data/train-0.parquet"]) - 2**17
    # For the columns.
    assert all(first >= footer for name, first, _ in ranges if name == "data/train-0.parquet")
    kinds = [request.kind for request in hub.requests[asked:]]
    assert len([kind for kind in kinds if kind != "resolve"]) <= 15


def test_another_revision_is_refused(hub):
    hub.put(REPOSITORY, {"data/train-0.parquet": parquet(0, 9)})
    documents = read(options())
    commit = hub.commits(REPOSITORY)[-1]
    assert position_state(documents[0])["commit"] == commit.oid  # type: ignore[index]
    other = options(dataset_options={"split": "train", "revision": commit.oid})
    with pytest.raises(CheckpointMismatch, match="dataset_options"):
        resume(other, documents[3])
    assert read(other) == documents


@pytest.mark.matrix(
    ("status", "code", "message"),
    [
        (
            401,
            None,
            r"the hub wants a valid token .*: log in \(hf auth login, or export HF_TOKEN\)",
        ),
        (404, None, r"Correct its name or URL, .* and dataset_options; .*HF_TOKEN"),
        (
            404,
            "RevisionNotFound",
            r"no longer has the commit [0-9a-f]{40} of this run",
        ),
    ],
)
def test_what_the_hub_refuses_about_the_files_is_one_clear_error(hub, status, code, message):
    hub.put(REPOSITORY, {"data/train-0.parquet": parquet(0, 9)})
    inputs = HuggingFaceDatasetReader(**options()).list_dataset()
    HfFileSystem.clear_instance_cache()
    hub.fail("tree", status, times=None, headers={} if code is None else {"X-Error-Code": code})
    with pytest.raises(InputError, match=message) as raised:
        inputs.size(0)
    assert "mozilla" not in str(raised.value)
    assert "\n" not in str(raised.value)


# ParquetReader -----------------------------------------------------------------------------------


def test_parquet_reader_waits_for_an_outage(hub, monkeypatch, policy):
    waits = []
    policy("READING", sleep=waits.append)
    monkeypatch.setattr("huggingface_hub.hf_file_system.http_backoff", _without_backoff)
    hub.put(REPOSITORY, {"data/0.parquet": parquet(0, 9)})
    expected = list(ParquetReader(f"hf://datasets/{REPOSITORY}/data").run())
    hub.fail("resolve", 503, times=2)
    hub.fail("resolve", 429, headers={"Retry-After": "900"})
    assert list(ParquetReader(f"hf://datasets/{REPOSITORY}/data").run()) == expected
    assert 900 <= max(waits) <= 990


def _without_backoff(*arguments, **more):
    from huggingface_hub.utils import http_backoff

    return http_backoff(*arguments, **more, max_retries=0)


# what cannot be read: one line each, with what to do ---------------------------------------------

LINES = b'{"id": "0", "text": "a"}\n{"id": "1", "text": "b"}\n'


def refused(hub, place):
    hub.put("org/input", {"part/0.jsonl": LINES})
    with pytest.raises(InputError) as caught:
        list(JsonlReader(f"hf://datasets/{place}").run())
    assert "\n" not in str(caught.value)
    assert "hf_Fake" not in str(caught.value)
    return str(caught.value)


@pytest.mark.matrix(
    ("place", "advice"),
    [
        (
            "org/none/part",
            "the dataset org/none does not exist, or is hidden from this token. Correct the name, or log in",
        ),
        (
            "org/input/other",
            "holds no files for this reader. Correct the path",
        ),
        (
            "org/input@v2/part",
            "Correct its name or URL, the revision, and dataset_options;",
        ),
    ],
)
def test_a_folder_that_is_not_there(hub, place, advice):
    said = refused(hub, place)
    assert f"'hf://datasets/{place}'" in said
    assert advice in said


@pytest.mark.matrix
def test_a_token_that_has_expired(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.expired_token)
    assert "log in (hf auth login, or export HF_TOKEN)" in refused(hub, "org/input/part")


CARD = b"""---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/train-*.parquet
  - split: test
    path: en/test.parquet
---
"""


def test_a_training_reads_a_split_of_a_configuration(hub):
    files = {f"en/train-{n}.parquet": parquet(100 * n, 9) for n in range(2)}
    hub.put(REPOSITORY, files | {"en/test.parquet": parquet(900, 9), "README.md": CARD})
    hub.put("org/tables", {"a.csv": b"text\na\n"})
    rows = ReaderDataset.from_hub(REPOSITORY, "en", split="train").select_columns(["n"])
    assert [row["n"] for row in rows] == [*range(9), *range(100, 109)]
    state = rows.state_dict()
    hub.put(REPOSITORY, {"unused.txt": b"a new commit"})
    ReaderDataset.from_hub(REPOSITORY, "en", split="train").load_state_dict(state)
    with pytest.raises(CheckpointMismatch, match="files"):
        ReaderDataset.from_hub(REPOSITORY, "en", split="test").load_state_dict(state)
    with pytest.raises(ConfigError, match=r"has no files, and one kind of \.parquet"):
        ReaderDataset.from_hub("org/tables")
