"""What a runner refuses of a writer, before anything runs."""

import re

from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.common.redaction import check_no_secrets, refuse_variables
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.output.file_managers import missing_codec


def check_writer(writer: DiskWriter, checkpoints: bool) -> None:
    """Refuses, when a runner is constructed, a writer that would later lose data or reveal a
    secret.

    Raises:
        ConfigError: see the messages.
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
            f"output_writer: output_filename {template!r} ends in {ending[0]}, and compression is "
            "null: readers would take the files for damaged ones. Set compression to infer, or "
            "remove the ending."
        )
    if template.startswith("/") or ".." in template.split("/"):
        raise ConfigError(f"output_writer: output_filename {template!r} leaves the output folder.")
    if checkpoints and not template_uses(writer, "chunk_index"):
        raise ConfigError(
            "output_writer: with checkpoints each chunk is one file, so output_filename "
            f"{template!r} needs ${{chunk_index}}. Example: '{_example(template)}'."
        )


def check_rank_in_template(writer: DiskWriter, world_size: int) -> None:
    """Refuses a writer by which several tasks would write one file. Raises ConfigError."""
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
