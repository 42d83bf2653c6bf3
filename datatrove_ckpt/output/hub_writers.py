"""Replaces datatrove's writers for the hub with writers without uploads of their own.

``HuggingFaceDatasetWriter`` and ``HuggingFaceBucketWriter`` upload and commit when they are closed,
so a chunk could not be published in one step. Parquet writers with a folder on the hub replace
them, with their settings and their class names, which are in the run's identity.
"""

from inspect import signature

from datatrove.pipeline.writers import ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.output.hub import BUCKET, HubFolder

_DATATROVE = "datatrove.pipeline.writers.huggingface"


class HuggingFaceDatasetWriter(ParquetWriter):  # type: ignore[misc]
    """Writes to a dataset repository. If it is missing, it is made ``private`` or public."""

    private: bool


class HuggingFaceBucketWriter(ParquetWriter):  # type: ignore[misc]
    """Writes to a bucket."""

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
            f"output_writer: {type(writer).__name__} changes {kinds[0]}, which uploads by itself "
            "when it is closed, so a chunk could not be published in one step. Derive it from "
            "ParquetWriter, with an output_folder on the hub: hf://datasets/OWNER/NAME or "
            "hf://buckets/OWNER/NAME."
        )
    if not hasattr(writer, "bucket"):
        repository = HubFolder("dataset", writer.dataset, writer.revision)
        return _take_over(writer, HuggingFaceDatasetWriter, repository)
    if writer.overwrite:
        raise ConfigError(
            "output_writer: overwrite=True would delete what earlier attempts of this run have "
            "written. Delete the bucket's files yourself before the first start, and leave "
            "overwrite out."
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
