"""HuggingFaceDatasetReader: datatrove's documents, resumed from every position, and never from
another input.
"""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datatrove.pipeline.readers import HuggingFaceDatasetReader as Original

from datatrove_ckpt.errors import CheckpointCorrupt, CheckpointMismatch, ConfigError, InputError
from datatrove_ckpt.readers import HuggingFaceDatasetReader, PositionedDocument, position_state
from datatrove_ckpt.readers.inputs import Revisions
from datatrove_ckpt.torch import Mix, Pack
from tests import golden
from tests.unit.tables import resume, rows, write_table

pytestmark = pytest.mark.xdist_group("datasets")  # its import takes seconds

SIZES = (25, 1, 12)


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def write(folder, kind, sizes=SIZES):
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        write_table(
            folder / f"{number}.{kind}",
            pa.Table.from_pylist(rows(size, 100 * number)),
            4,
            stream=True,
        )
    return folder


def arguments(folder, kind, **options):
    chosen = {"data_files": str(folder / f"*.{kind}"), "split": "train"}
    return {"dataset": kind, "dataset_options": chosen, "batch_size": 8} | options


def read(kind, options, rank=0, tasks=1):
    return list(kind(**options).run(None, rank, tasks))


def read_as_datatrove(options, rank=0, tasks=1):
    documents = read(HuggingFaceDatasetReader, options, rank, tasks)
    assert documents == read(Original, options, rank, tasks)
    return documents


def assert_resumes_everywhere(options, documents, rank, tasks, step=7):
    """Where batches, row groups and shards begin and end differs, so every ``step``-th position
    meets all cases.
    """
    for number, document in enumerate(documents, start=1):
        if number % step not in (0, 1) and number < len(documents):
            continue
        resumed = HuggingFaceDatasetReader(**options)
        state = json.loads(json.dumps(position_state(document)))
        assert len(json.dumps(state)) < 1000
        resumed.load_state_dict(state)
        assert list(resumed.run(None, rank, tasks)) == documents[number:]


@pytest.mark.matrix("streaming", [True, False])
@pytest.mark.parametrize("kind", ["parquet", "json", "arrow"])
def test_documents_and_resumes_are_those_of_datatrove(kind, streaming, tmp_path):
    options = arguments(write(tmp_path / "in", kind), kind, streaming=streaming)
    for tasks in (1, 2):
        for rank in range(tasks):
            documents = read_as_datatrove(options, rank, tasks)
            assert all(isinstance(document, PositionedDocument) for document in documents)
            if tasks == 2:
                assert_resumes_everywhere(
                    options, documents, rank, tasks, 1 if kind == "parquet" else 7
                )


@pytest.mark.parametrize("sizes, tasks", [((50,), 3), (SIZES, 4)])
def test_ranks_share_a_single_file_by_its_rows_and_one_beyond_the_shards_has_no_documents(
    tmp_path, sizes, tasks
):
    options = arguments(write(tmp_path / "in", "parquet", sizes), "parquet", streaming=True)
    for rank in range(tasks):
        documents = read_as_datatrove(options, rank, tasks)
        assert bool(documents) == (rank < 3)
        assert_resumes_everywhere(options, documents, rank, tasks)


def upper(self, data, path, id_in_file):
    return {
        "text": data["text"].upper(),
        "id": f"{path}!{id_in_file}",
        "metadata": {"number": data["number"]},
    }


@pytest.mark.matrix(
    "options",
    golden.values("arguments_of_datatrove", globals()),
    ids=" ".join,
)
def test_arguments_mean_what_they_mean_in_datatrove(options, tmp_path):
    given = (
        arguments(write(tmp_path / "in", "parquet"), "parquet", streaming=len(options) == 1)
        | options
    )
    documents = read_as_datatrove(given, 0, 2)
    assert_resumes_everywhere(given, documents, 0, 2)


@pytest.mark.matrix(("shuffle", "tasks"), [(True, 3), (False, 1), (False, 3)])
def test_a_dataset_on_disk(shuffle, tasks, tmp_path):
    import datasets

    datasets.Dataset.from_list(rows(40)).save_to_disk(tmp_path / "disk", num_shards=3)
    options = {
        "dataset": str(tmp_path / "disk"),
        "load_from_disk": True,
        "shuffle_files": shuffle,
        "batch_size": 8,
    }
    for rank in range(tasks):
        documents = read_as_datatrove(options, rank, tasks)
        assert_resumes_everywhere(options, documents, rank, tasks)


def test_damage_in_the_middle_stops(tmp_path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in/0.parquet"
    chance = np.random.default_rng(0)
    texts = [chance.bytes(20_000).hex() for _ in range(40)]
    pq.write_table(
        pa.table({"text": texts}), path, row_group_size=4, compression="none", use_dictionary=False
    )
    options = arguments(tmp_path / "in", "parquet", streaming=True, batch_size=4)
    metadata = pq.read_metadata(path)
    with path.open("r+b") as file:
        file.seek(metadata.row_group(4).column(0).data_page_offset)
        file.write(b"\xff" * 64)
    with pytest.raises(InputError, match=r"0\.parquet.*damaged or cut off"):
        read(HuggingFaceDatasetReader, options)


# Another input -----------------------------------------------------------------------------------


def test_changed_files_of_a_stream_are_refused(tmp_path):
    folder = write(tmp_path / "in", "parquet")
    options = arguments(folder, "parquet", streaming=True)
    last = read(HuggingFaceDatasetReader, options)[-1]
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}

    def resumed(**changed):
        for path in folder.iterdir():
            path.unlink()
        for name, data in (contents | changed).items():
            if data:
                (folder / name).write_bytes(data)
        return [document.metadata["number"] for document in resume(options, last)]

    one = contents["1.parquet"]
    with pytest.raises(CheckpointMismatch, match=r"2\.parquet' had \d+ bytes"):
        resumed(**{"2.parquet": one})
    for changed in ({"0.parquet": b""}, {"10.parquet": one}):
        with pytest.raises(CheckpointMismatch, match="are not the same now"):
            resumed(**changed)
    assert resumed(**{"3.parquet": one}) == [100]


@pytest.mark.matrix("on_disk", [True, False])
def test_other_rows_of_a_map_style_dataset_are_refused(on_disk, tmp_path):
    import datasets

    def store(content, name):
        dataset = datasets.Dataset.from_list(content)
        if on_disk:
            dataset.save_to_disk(tmp_path / name)
            return {"dataset": str(tmp_path / name), "load_from_disk": True}
        (tmp_path / "in").mkdir(exist_ok=True)
        dataset.to_parquet(tmp_path / "in/0.parquet")
        return arguments(tmp_path / "in", "parquet")

    options = store(rows(30), "a")
    document = read(HuggingFaceDatasetReader, options)[10]
    if on_disk:
        (tmp_path / "a").rename(tmp_path / "moved")
    store([*rows(29), {"text": "TEXT 29", "name": "n29", "number": 29}], "a")
    with pytest.raises(CheckpointMismatch, match="has changed"):
        resume(options, document)
    if on_disk:
        (tmp_path / "a").rename(tmp_path / "other")
    store(rows(31), "a")
    with pytest.raises(CheckpointMismatch, match=r"had \d+ bytes"):
        resume(options, document)


def test_changed_settings_are_refused_by_name(tmp_path):
    folder = write(tmp_path / "in", "parquet")
    options = arguments(folder, "parquet", streaming=True)
    document = read(HuggingFaceDatasetReader, options)[10]
    other = {"split": "train", "data_files": str(folder / "0.parquet")}
    changes = {"streaming": {"streaming": False}, "dataset_options": {"dataset_options": other}}
    for named, change in (changes | {"limit is now 3": {"limit": 3}}).items():
        with pytest.raises(CheckpointMismatch, match=named):
            resume(options | change, document)


# Commits and retries -----------------------------------------------------------------------------


def test_a_damaged_record_of_a_commit_is_an_error(tmp_path):
    Revisions(tmp_path).commit("org/data", "main", lambda: "a" * 40)
    (kept,) = tmp_path.iterdir()
    kept.write_text("{}")
    with pytest.raises(CheckpointCorrupt, match=kept.name):
        Revisions(tmp_path).commit("org/data", "main", lambda: "b" * 40)


# How much of the input is done -------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda shuffled: shuffled,
        lambda shuffled: shuffled.map(dict).filter(bool).take(5),
        "interleave_datasets",
        "concatenate_datasets",
    ],
)
def test_a_shuffled_stream_is_no_source_as_a_resume_loses_its_buffer(make):
    import datasets

    rows = datasets.Dataset.from_dict({"input_ids": [[1]] * 9})
    stream = rows.to_iterable_dataset(3)
    shuffled = stream.shuffle(seed=1, buffer_size=4)
    if isinstance(make, str):
        shuffled = getattr(datasets, make)([stream, shuffled])
    else:
        shuffled = make(shuffled)
    for wrap in (lambda source: Pack(source, 2), lambda source: Mix([source], [1])):
        wrap(stream)
        wrap(rows.shuffle(seed=1).to_iterable_dataset(3))
        with pytest.raises(ConfigError, match=r"loses the rows in its buffer.*ReaderDataset"):
            wrap(shuffled)
