"""Where a run is found: in a checkpoint folder, its mirror at a path or URL, or by the YAML file of
the run.
"""

import os
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from datatrove_ckpt.checkpoint.identity import FORMAT
from datatrove_ckpt.errors import CheckpointCorrupt, ConfigError, StorageFailed
from datatrove_ckpt.mirror.manifests import Manifest, Version, VersionStore
from datatrove_ckpt.run_folder.run_location import RunNotStarted, open_location
from tests.rank_folders import write_rank

NONCE = f"{0:016x}"
RUN = {
    "format": FORMAT,
    "tasks": 3,
    "owner": {"nonce": NONCE, "earlier": {}, "host": "node", "pid": 1, "fence": 1},
}


pytestmark = pytest.mark.usefixtures("empty_memory_file_system")


def mirror(url, number=1, finished=False, **files):
    """Writes one version of a rank."""
    versions = VersionStore(url)
    names = {name.replace("_jsonl", ".jsonl"): data for name, data in files.items()}
    parts = {
        name: [versions.put_object(f"{NONCE}-{number:03d}{index:03d}", data)]
        for index, (name, data) in enumerate(names.items())
    }
    manifest = Manifest(RUN, parts, [], finished, f"2026-01-01T00:00:{number:02d}Z")
    versions.write_manifest(Version(number, NONCE), manifest)


def refused(
    message,
    what,
    found=None,
    error=ConfigError,
):
    with pytest.raises(error, match=message):
        open_location(what, found).__enter__()


def config(folder, remote=None, **executor):
    arguments = {"checkpoints_local_dir": folder, "checkpoints_remote_dir": remote}
    runner = {
        "class_path": "InferenceRunner",
        "init_args": {k: v for k, v in arguments.items() if v is not None},
    }
    pipeline = [{"class_path": "JsonlReader", "init_args": {"data_folder": "in"}}, runner]
    return {
        "executor": {
            "class_path": "LocalPipelineExecutor",
            "init_args": {"pipeline": pipeline, **executor},
        }
    }


def test_a_run_folder_stands_for_its_checkpoints_output_and_logs(tmp_path):
    write_rank(tmp_path / "checkpoints")
    (tmp_path / "output").mkdir()
    with open_location(str(tmp_path)) as place:
        assert (place.folder, place.given) == (tmp_path / "checkpoints", [str(tmp_path)])
        assert (place.output, place.logging_dir) == (f"{tmp_path}/output", None), (
            "there are no logs"
        )
    write_rank(tmp_path)
    with open_location(str(tmp_path)) as place:
        assert (place.folder, place.output) == (tmp_path, None)


def test_a_mirror_in_a_run_folder_is_read(tmp_path):
    mirror(f"{tmp_path}/checkpoints/00000", commits_jsonl=b"a\n")
    with open_location(str(tmp_path)) as place:
        assert (place.is_copy, place.what) == (True, f"{tmp_path}/checkpoints")


@pytest.mark.parametrize("where", ["folder", "file://", "memory://"])
def test_a_mirror_is_copied_and_the_copy_removed(tmp_path, where):
    url = {
        "folder": str(tmp_path / "m"),
        "file://": f"file://{tmp_path}/m",
        "memory://": "memory://where/m",
    }[where]
    mirror(f"{url}/00000", commits_jsonl=b"old\n")
    mirror(f"{url}/00000", 2, commits_jsonl=b"new\n", dead_letters_jsonl=b"dead\n")
    mirror(f"{url}/retry-00001/00002", finished=True, commits_jsonl=b"retried\n")
    with open_location(url, wants_file=lambda name, size: name == "commits.jsonl") as place:
        assert place.is_copy
        found = {
            str(path.relative_to(place.folder))
            for path in place.folder.rglob("*")
            if path.is_file()
        }
        assert found == {
            "00000/run.json",
            "00000/commits.jsonl",
            "00000/lock",  # not finished
            "retry-00001/00002/run.json",
            "retry-00001/00002/commits.jsonl",
        }
        assert (place.folder / "00000/commits.jsonl").read_bytes() == b"new\n"
        error = CheckpointCorrupt(place.folder / "00000/commits.jsonl", " is damaged")
        assert str(error) == f"{place.what}/00000/commits.jsonl is damaged"
        assert place.mirror.ranks["00000"].when == 1767225602
        copy = place.folder
    assert not copy.exists()


def test_a_copy_is_brought_up_to_date(tmp_path):
    mirror(f"{tmp_path}/00000", chunk_00000_jsonl=b"a\n")
    with open_location(str(tmp_path)) as place:
        mirror(f"{tmp_path}/00000", 2, finished=True, commits_jsonl=b"b\n")
        mirror(f"{tmp_path}/00001")
        place.refresh()
        assert sorted(path.name for path in (place.folder / "00000").iterdir()) == [
            "commits.jsonl",
            "run.json",
        ]
        assert (place.folder / "00001/run.json").exists()


def test_a_url_that_cannot_work_is_refused():
    refused("memory://nothing contains no mirror", "memory://nothing")
    refused("WHAT: 'sthree://x' cannot be used", "sthree://x")


# YAML --------------------------------------------------------------------------------------------


def test_the_mirror_is_read_if_it_has_ranks_that_this_node_has_not(tmp_path):
    local, remote = tmp_path / "local", str(tmp_path / "remote")
    mirror(f"{remote}/00000")
    with open_location("job.yaml", config(str(local), remote)) as place:
        assert place.is_copy
    write_rank(local, 0)
    with open_location("job.yaml", config(str(local), remote)) as place:
        assert not place.is_copy
    mirror(f"{remote}/00001")
    with open_location("job.yaml", config(str(local), remote)) as place:
        assert place.is_copy
        assert place.what == remote


def test_the_mirror_is_read_where_the_folders_variable_is_not_set(tmp_path):
    assert "NO_SUCH_VARIABLE" not in os.environ
    mirror(f"{tmp_path}/remote/00000")
    with open_location("job.yaml", config("$NO_SUCH_VARIABLE/c", f"{tmp_path}/remote")) as place:
        assert place.is_copy
    refused("NO_SUCH_VARIABLE is not set on", "job.yaml", config("$NO_SUCH_VARIABLE/c"))


def test_without_the_network_the_folder_is_read(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("no route to host")

    monkeypatch.setattr(MemoryFileSystem, "ls", refuse)
    found = config(str(tmp_path), "memory://where/m")
    for what, settings in (("memory://where/m", None), ("job.yaml", found)):
        said = r"Could not read the mirror memory://where/m: .*no route to host"
        refused(said, what, settings, StorageFailed)
    write_rank(tmp_path)
    with open_location("job.yaml", found) as place:
        assert not place.is_copy


def of_jobs(logging_dir):
    found = config("checkpoints", logging_dir=logging_dir)
    found["executor"]["class_path"] = "JobsPipelineExecutor"
    return found


def test_of_hugging_face_jobs_the_mirror_is_read_and_never_a_folder_of_this_machine(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        write_rank(Path("checkpoints"), number)
    said = r"job.yaml: nothing has started yet: no task .* in memory://r/logs/checkpoints, its mirror.*hf jobs"
    refused(said, "job.yaml", of_jobs("memory://r/logs"))
    mirror("memory://r/logs/checkpoints/00000")
    with open_location("job.yaml", of_jobs("memory://r/logs/")) as place:
        assert (place.what, place.is_copy) == ("memory://r/logs/checkpoints", True)


def test_a_run_folder_at_a_url_is_its_mirror_below_the_logs():
    mirror("memory://bucket/x/logs/checkpoints/00000")
    with open_location("memory://bucket/x/") as place:
        assert (place.what, place.given) == (
            "memory://bucket/x/logs/checkpoints",
            ["memory://bucket/x/"],
        )
        assert (place.output, place.logging_dir) == (
            "memory://bucket/x/output",
            "memory://bucket/x/logs",
        )


def test_output_without_its_checkpoint_is_no_run_that_waits(tmp_path):
    found = config(f"{tmp_path}/checkpoints")
    writer = {"init_args": {"output_folder": f"{tmp_path}/output"}}
    found["executor"]["init_args"]["pipeline"][1]["init_args"]["output_writer"] = writer
    (tmp_path / "logs").mkdir()
    wanted = [("job.yaml", found), (str(tmp_path), None), (f"{tmp_path}/checkpoints", None)]
    for what, content in wanted:
        refused("nothing has started yet", what, content, RunNotStarted)
    (tmp_path / "logs/logs").mkdir()
    (tmp_path / "logs/executor.json").touch()
    with open_location(f"{tmp_path}/logs") as place:
        assert place.folder == tmp_path / "logs"
    (tmp_path / "output").mkdir()
    (tmp_path / "output/00000_chunk_00000.jsonl").touch()
    for what, content in wanted:
        with pytest.raises(ConfigError, match="but no task has a checkpoint") as error:
            open_location(what, content).__enter__()
        assert type(error.value) is ConfigError


def test_logs_in_a_checkpoint_folder_are_no_run_that_waits(tmp_path):
    write_rank(tmp_path)
    (tmp_path / "logs").mkdir()
    with open_location(str(tmp_path)) as place:
        assert place.folder == tmp_path
