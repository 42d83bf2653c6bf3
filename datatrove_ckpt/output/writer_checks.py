"""Refuses or replaces a writer, and refuses its folder, before anything runs.

A step's output must be outside its checkpoint, the job's input, and the output of other steps.

``HuggingFaceDatasetWriter`` and ``HuggingFaceBucketWriter`` upload and commit when they are closed,
so a chunk could not be published in one step. Parquet writers with a folder on the hub replace
them, with their settings and their class names, which are in the run's identity.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import signature
from itertools import combinations
from pathlib import Path

from datatrove.io import DataFolder, get_datafolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers.base import BaseDiskReader
from datatrove.pipeline.writers import ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter
from fsspec.core import has_magic
from fsspec.utils import glob_translate

from datatrove_ckpt.checkpoint.layout import RETRIES, SAMPLES
from datatrove_ckpt.common.redaction import check_no_secrets, refuse_variables
from datatrove_ckpt.common.retrying import file_system_call
from datatrove_ckpt.errors import ConfigError, setting_name, step_place
from datatrove_ckpt.output.file_managers import missing_codec
from datatrove_ckpt.output.file_names import plain
from datatrove_ckpt.output.hub import BUCKET, MAIN, HubFolder

_DATATROVE = "datatrove.pipeline.writers.huggingface"
_OURS = re.compile(rf"(\d{{5,}}|last_chunk|{RETRIES}.*|{SAMPLES}.*)(/.*)?")


def check_writer(writer: DiskWriter, checkpoints: bool) -> None:
    """Refuses, when a runner is constructed, a writer that would later lose data or reveal a
    secret.

    Raises:
        ConfigError: the writer has no file names, a secret in its folder, a compression that cannot
            work, or file names that cannot be right.
    """
    template = getattr(getattr(writer, "output_filename", None), "template", None)
    if template is None:
        raise ConfigError(
            f"output_writer: {type(writer).__name__} is not a DiskWriter (it has no "
            "output_filename)."
        )
    check_no_secrets(writer.output_folder, "output_writer")
    refuse_variables("output_folder", writer.output_folder.path)
    compression = writer.output_mg.compression
    advice = missing_codec(compression, template)
    if advice:
        raise ConfigError(f"output_writer: compression: {advice}")
    ending = re.search(r"\.(gz|zst|bz2|xz|zip)$", template)
    if compression is None and ending:
        raise ConfigError(
            f"output_writer: output_filename {template!r} ends in {ending[0]}, and compression "
            "is null. Set compression to infer, or remove the ending."
        )
    if template.startswith("/") or ".." in template.split("/"):
        raise ConfigError(f"output_writer: output_filename {template!r} leaves the output folder.")
    if checkpoints and not template_uses(writer, "chunk_index"):
        raise ConfigError(
            f"output_writer: each chunk is one file, so output_filename {template!r} needs "
            f"${{chunk_index}}. Example: '{_example(template)}'."
        )


def check_rank_in_template(writer: DiskWriter, world_size: int) -> None:
    """Refuses a writer by which several tasks would write one file."""
    if world_size > 1 and not template_uses(writer, "rank"):
        template = writer.output_filename.template
        raise ConfigError(
            f"output_writer: {world_size} tasks would write the same files, so output_filename "
            f"{template!r} needs ${{rank}}. Example: '{_example(template)}'."
        )


def _example(template: str) -> str:
    _, _, end = template.rpartition("/")[2].rpartition("}")
    endings = re.findall(r"(?:\.\w+)+$", end)
    return "${rank}_chunk_${chunk_index}" + "".join(endings)


def template_uses(writer: DiskWriter, name: str) -> bool:
    template = writer.output_filename
    return bool(template.safe_substitute({name: "0"}) != template.safe_substitute({name: "1"}))


def check_output_folder(writer: DiskWriter, checkpoints: str | None) -> None:
    if checkpoints is None:
        return
    below = _below(get_datafolder(checkpoints), writer.output_folder)
    if below is not None and (below == "" or _OURS.fullmatch(below)):
        raise ConfigError(
            f"output_writer: output_folder {_path(writer.output_folder)!r} is in "
            f"checkpoints_local_dir {checkpoints!r}. Choose another folder for one."
        )


def refuse_own_output(name: str, step: object, writer_path: str, writer: DiskWriter) -> None:
    """Refuses output that a step of the pipeline would read at the next start."""
    if (
        isinstance(step, BaseDiskReader)
        and not getattr(step, "paths_file", None)
        and _reads(step, writer)
    ):
        raise ConfigError(
            f"{writer_path}: {_path(writer.output_folder)!r} is inside the folder that {name} "
            f"reads, {_path(step.data_folder)!r}, and would be its input. Choose another "
            f"{setting_name('output_folder')}, or let {setting_name('glob_pattern')} leave out "
            f"{_sample(writer)}."
        )


def refuse_equal_folders(pipeline: Sequence[PipelineStep]) -> None:
    for (place, writer), (other_place, other) in combinations(writers_of(pipeline), 2):
        files = _path(writer.output_folder), _sample(writer)
        if files == (_path(other.output_folder), _sample(other)):
            raise ConfigError(
                f"{other_place} writes the same files as {place}: {'/'.join(files)}, for "
                "example. Choose another output folder or output_filename for one."
            )
    seen: dict[Path, int] = {}
    for index, step in enumerate(pipeline):
        folder = getattr(step, "checkpoints_local_dir", None)
        if folder is not None and seen.setdefault(Path(folder).absolute(), index) != index:
            raise ConfigError(
                f"{step_place(index, step)}: {setting_name('checkpoints_local_dir')} {folder!r} "
                "is also an earlier step's. Each step needs its own."
            )


def writers_of(pipeline: Sequence[PipelineStep]) -> Iterator[tuple[str, DiskWriter]]:
    for index, step in enumerate(pipeline):
        place = step_place(index, step)
        for name in ("output_writer", "exclusion_writer"):
            writer = getattr(step, name, None)
            if isinstance(writer, DiskWriter):
                yield f"{place}: {setting_name(name)}", writer
        if isinstance(step, DiskWriter):
            yield place, step


def _reads(reader: BaseDiskReader, writer: DiskWriter) -> bool:
    below = _below(reader.data_folder, writer.output_folder)
    if below is None:
        return False
    name = posixpath.join(below, _sample(writer))
    if not reader.recursive and "/" in name:
        return False
    pattern = reader.glob_pattern
    if not pattern:
        return True
    if not has_magic(pattern):
        pattern = f"*{pattern}"
    numbered = posixpath.join(posixpath.dirname(name), f"000_{posixpath.basename(name)}")
    return any(re.match(glob_translate(pattern), candidate) for candidate in (name, numbered))


def _sample(writer: DiskWriter) -> str:
    template = writer.output_filename
    fields = dict.fromkeys(template.get_identifiers(), "x") | {
        "rank": "00000",
        "chunk_index": "00000",
    }
    return plain(template.safe_substitute(fields))


def _below(folder: DataFolder, other: DataFolder) -> str | None:
    """Returns the path of ``other`` below the folder; "" if they are equal, None if outside."""
    parent = _path(folder)
    child = _path(other)
    if child == parent:
        return ""
    if not child.startswith(f"{parent}/"):
        return None
    return child.removeprefix(f"{parent}/")


def _path(folder: DataFolder) -> str:
    path = str(folder.resolve_paths(""))
    if folder.is_local():
        return str(Path(path).resolve())
    hub = HubFolder.of(folder)
    if hub is None:
        return path.rstrip("/")
    if hub.branch in (MAIN, f"refs/heads/{MAIN}"):
        hub = replace(hub, revision=None)
    return hub.url


def stands_elsewhere(recorded: str, folder: DataFolder) -> bool:
    other = get_datafolder(recorded)
    try:
        with file_system_call():
            if _path(other) == _path(folder):
                return False
            # Not ``exists``: on the hub it returns False for any error.
            other.info("")
            return True
    except FileNotFoundError:
        return False
    except OSError:
        return True  # the folder may exist


class HuggingFaceDatasetWriter(ParquetWriter):  # type: ignore[misc]
    """Writes to a dataset repository. If it is missing, it is made ``private`` or public."""

    private: bool


class HuggingFaceBucketWriter(ParquetWriter):  # type: ignore[misc]
    private: bool


def with_our_uploads(writer: DiskWriter) -> DiskWriter:
    """Returns the writer, or the replacement of datatrove's writer for the hub.

    Raises:
        ConfigError: the writer's class is derived from datatrove's, or would empty a bucket first.
    """
    kinds = [kind.__name__ for kind in type(writer).__mro__ if kind.__module__ == _DATATROVE]
    if not {"HuggingFaceDatasetWriter", "HuggingFaceBucketWriter"}.intersection(kinds):
        return writer
    if type(writer).__module__ != _DATATROVE:
        raise ConfigError(
            f"output_writer: {type(writer).__name__} changes {kinds[0]}, which uploads when it "
            "is closed. Derive it from ParquetWriter, with an output_folder "
            "hf://datasets/OWNER/NAME or hf://buckets/OWNER/NAME."
        )
    if not hasattr(writer, "bucket"):
        repository = HubFolder("dataset", writer.dataset, writer.revision)
        return _take_over(writer, HuggingFaceDatasetWriter, repository)
    if writer.overwrite:
        raise ConfigError(
            "output_writer: overwrite=True would delete what earlier attempts have written. "
            "Delete the bucket's files before the first start, and leave overwrite out."
        )
    return _take_over(
        writer,
        HuggingFaceBucketWriter,
        HubFolder(BUCKET, writer.bucket, path=writer.prefix),
    )


def _take_over(writer: DiskWriter, kind: type[ParquetWriter], folder: HubFolder) -> ParquetWriter:
    settings = {name: getattr(writer, name) for name in signature(ParquetWriter).parameters}
    settings["output_folder"] = folder.url
    settings["output_filename"] = writer.output_filename.template
    settings["adapter"] = getattr(writer.adapter, "__func__", writer.adapter)
    replacement = kind(**settings)
    replacement.private = writer.private
    return replacement
