"""File names hold what documents say, which is not trusted: they stay in the folder, and rank and
chunk are ours.
"""

from functools import partial

import orjson
import pytest
from datatrove.data import Document
from datatrove.pipeline.writers import JsonlWriter

from datatrove_ckpt import InferenceRunner
from datatrove_ckpt.errors import InvalidFileName, OutputFailed
from datatrove_ckpt.output.file_managers import StagedFiles
from datatrove_ckpt.output.file_names import STAGING
from datatrove_ckpt.testing import outputs
from tests.jobs import ask, config, letters, run_job, runner

BY_LANGUAGE = "${lang}/${rank}_${chunk_index}.jsonl"


def writer(folder, template):
    return JsonlWriter(str(folder / "output"), template, compression=None)


@pytest.fixture
def start(tmp_path, server):
    return partial(runner, tmp_path, server)


def without_checkpoints(folder, server, output_writer):
    return InferenceRunner(ask, config(server), output_writer, records_per_chunk=2)


def ids(folder):
    return {
        name: [orjson.loads(line)["id"] for line in data.splitlines()]
        for name, data in outputs(folder).items()
    }


def about(number, **metadata):
    return Document(text=f"text {number}", id=f"id {number}", metadata=metadata)


# rank and chunk are ours -------------------------------------------------------------------------


@pytest.mark.matrix("checkpoints", [True, False])
def test_metadata_never_replaces_the_rank_the_chunk_or_the_id(tmp_path, server, checkpoints):
    output = writer(tmp_path, "${rank}_${chunk_index}_${id}.jsonl")
    make = runner if checkpoints else without_checkpoints
    for rank in range(2):
        make(tmp_path, server, output_writer=output).run(
            [about(rank, rank=7, chunk_index="x", id="other")], rank, 2
        )
    found_ids = ids(tmp_path / "output")
    assert found_ids == {"00000_00000_id 0.jsonl": ["id 0"], "00001_00000_id 1.jsonl": ["id 1"]}
    line = orjson.loads((tmp_path / "output/00000_00000_id 0.jsonl").read_bytes())
    assert line["metadata"]["rank"] == 7, "the document keeps what it says"


def test_the_rows_of_a_document_are_in_the_file_of_its_id(tmp_path, start):
    output = writer(tmp_path, "${id}_${rank}_${chunk_index}.jsonl")
    start(output_writer=output, explode=True).run([about(0)])
    assert ids(tmp_path / "output") == {"id 0_00000_00000.jsonl": ["id 0/0"]}


def test_a_template_may_have_an_empty_part(tmp_path, start):
    for lines in (1, 2):
        output = writer(tmp_path, "${lang}//${rank}_${chunk_index}.jsonl")
        start(output_writer=output, records_per_chunk=1).run(
            [about(number, lang="en") for number in range(lines)]
        )
    assert list(ids(tmp_path / "output")) == ["en/00000_00000.jsonl", "en/00000_00001.jsonl"]


# names stay inside -------------------------------------------------------------------------------

OUTSIDE = {
    "../../x": "leaves the output folder",
    "/x": "leaves the output folder",
    "..": "leaves the output folder",
    "": "has an empty part",
    "s3://bucket/x": "has an empty part",
    "a\0b": "has a control character",
    "..\\x": "has a control character or a backslash",
    "x" * 256: "has a part of 256 bytes",
    STAGING: "is in a folder",
}


@pytest.mark.matrix("lang", OUTSIDE, ids=ascii)
def test_a_name_that_leaves_the_folder_stops_the_rank_and_names_document_and_field(
    tmp_path, server, lang
):
    folder = tmp_path / "a/b"
    with pytest.raises(InvalidFileName) as failed:
        runner(folder, server, output_writer=writer(folder, BY_LANGUAGE)).run([about(0, lang=lang)])
    message = str(failed.value)
    assert message.startswith("Document 'id 0': with its lang = ")
    assert OUTSIDE[lang] in message
    assert "on_document_error=" in message
    assert outputs(tmp_path)
    with pytest.raises(InvalidFileName):
        without_checkpoints(folder, server, writer(tmp_path / "c/d", BY_LANGUAGE)).run(
            [about(0, lang=lang)]
        )
    assert all(name.startswith(("a/b/checkpoints/", "a/b/.output.")) for name in outputs(tmp_path))


def test_a_document_without_the_field_or_with_a_bad_one_can_be_a_dead_letter(tmp_path, start):
    step = start(
        output_writer=writer(tmp_path, BY_LANGUAGE),
        on_document_error="dead_letter",
    )
    step.output_writer.max_file_size = 2**30
    bad = [about(1), about(2, lang="../x"), about(4, lang="x" * 252)]
    step.run([about(0, lang="en"), *bad, about(3, lang="en/uk")])
    assert ids(tmp_path / "output") == {
        "en/000_00000_00000.jsonl": ["id 0"],
        "en/uk/000_00000_00002.jsonl": ["id 3"],
    }
    errors = {letter["id"]: letter for letter in letters(tmp_path)}
    assert errors["id 1"]["error"].startswith(
        "Document 'id 1' has no metadata 'lang', which output_filename"
    )
    assert "'../x/00000_00001.jsonl', which leaves" in errors["id 2"]["error"]
    assert {letter["kind"] for letter in errors.values()} == {"InvalidFileName"}


def test_a_name_in_the_checkpoint_below_the_output_folder_is_refused(tmp_path, start):
    output = JsonlWriter(str(tmp_path), "${lang}/chunk_${chunk_index}.jsonl", compression=None)
    with pytest.raises(InvalidFileName, match="is in a folder of the checkpoint"):
        start(output_writer=output).run([about(0, lang="Checkpoints/00000")])


def test_a_field_that_the_rollout_sets_is_checked_too(tmp_path, server):
    async def rollout(document, generate):
        document.metadata["lang"] = "\ud800"
        return True

    with pytest.raises(InvalidFileName, match="has characters that are no Unicode text"):
        run_job(tmp_path, server, 1, rollout, output_writer=writer(tmp_path, BY_LANGUAGE))


def test_names_that_the_file_system_takes_for_one_are_refused_instead_of_overwritten(tmp_path):
    output = writer(tmp_path, BY_LANGUAGE)
    staged = StagedFiles(tmp_path / "staging", output.output_mg)
    staged.get_file("en/0.jsonl").write(b"x")
    (tmp_path / "staging/EN").symlink_to("en")  # as a file system that ignores case
    with pytest.raises(
        OutputFailed, match=r"EN/0\.jsonl and another name of this chunk are one file"
    ):
        staged.get_file("EN/0.jsonl")
    staged.abandon()


def test_two_chunks_that_would_write_one_file_are_refused(tmp_path, start):
    output = writer(tmp_path, "${lang}${chunk_index}${tail}")

    def found(number):  # chunk 0 and chunk 1 are both named "0000000001"
        return [about(0, lang="", tail="00001"), about(1, lang="00000", tail="")][:number]

    step = start(output_writer=output, records_per_chunk=1)
    step.run(found(1))
    for _ in range(2):  # chunk 0 is known from its commit
        with pytest.raises(
            OutputFailed, match="Chunks 0 and 1 of task 0 would both write 0000000001"
        ):
            step.run(found(2))
    assert ids(tmp_path / "output")["0000000001"] == ["id 0"]


def test_a_template_that_begins_with_a_dot_names_files_of_this_run(tmp_path, server, start):
    output = writer(tmp_path, f"./{BY_LANGUAGE}")
    for _ in range(2):  # the second time there is nothing to do
        start(output_writer=output).run([about(0, lang="en")])
    assert list(ids(tmp_path / "output")) == ["en/00000_00000.jsonl"]
    other = tmp_path / "other"
    with pytest.raises(InvalidFileName, match="of staged files"):
        runner(other, server, output_writer=writer(other, f"./{BY_LANGUAGE}")).run(
            [about(0, lang=STAGING)]
        )
