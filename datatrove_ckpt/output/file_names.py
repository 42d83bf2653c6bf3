"""Fills in the names of output files from documents, checks them, and recognises them in a listing.

``${rank}``, ``${chunk_index}`` and ``${id}`` of a template are filled in by this package. Other
fields come from untrusted metadata: the name must stay inside the output folder, outside the
folders of this package, and be valid on file systems; "/" in a value makes a subfolder.
"""

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template

from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.common.formatting import safe_repr
from datatrove_ckpt.errors import InvalidFileName
from datatrove_ckpt.output.formats import FORMATS

STAGING = layout.OUTPUT_STAGING

_MAX_PART_BYTES = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")

_OTHER_SUFFIXES = (
    ".json .ndjson .arrow .csv .tsv .txt .warc .gz .gzip .zst .zstd .bz2 .xz .lz4 .snappy"
)
_SUFFIXES = [*(output_format.suffix for output_format in FORMATS), *_OTHER_SUFFIXES.split()]
_ENDING = "|".join(map(re.escape, _SUFFIXES))
_ENDINGS = re.compile(f"(?:{_ENDING})+$")

_RANK = r"\d{5}|[1-9]\d{5,}"
_RETRY = r"(?:retry\d+_)?"
_CHUNK = r"\d{5,}"


def fields_of_documents(template: Template) -> list[str]:
    return [name for name in template.get_identifiers() if name not in ("rank", "chunk_index")]


class FileNames:
    """The names of one rank's output files.

    Args:
        checkpoints: ``checkpoints_local_dir``, in which no document may name a file.
    """

    def __init__(
        self, writer: DiskWriter, rank: int, prefix: str = "", checkpoints: Path | None = None
    ) -> None:
        template = writer.output_filename
        self.template = template.template
        self.fields = fields_of_documents(template)
        self.rank = rank
        self._prefix = prefix
        self._number = 0
        if writer.max_file_size > 0:
            self._number = len("000_")
        self._reserved = [(STAGING,), *_checkpoints_below(writer, checkpoints)]

    def chunk_field(self, chunk_index: int) -> str:
        return f"{self._prefix}{chunk_index:05d}"

    def check(self, document: Document, chunk_index: int) -> None:
        """Raises InvalidFileName if the document's file cannot be an output file."""
        if self.fields:
            values = {**document.metadata, "id": document.id}
            self.fill(values | self.keywords(document, chunk_index))

    def keywords(self, document: Document, chunk_index: int) -> dict[str, str]:
        keywords = {"chunk_index": self.chunk_field(chunk_index)}
        if "id" in self.fields:
            keywords["id"] = document.id
        return keywords

    def fill(self, values: Mapping[str, object]) -> str:
        """Returns the template's name for these values and this rank. Raises InvalidFileName."""
        try:
            name = Template(self.template).substitute(values, rank=f"{self.rank:05d}")
        except KeyError as error:
            raise InvalidFileName(
                f"Document {values['id']!r} has no metadata {error.args[0]!r}, which "
                f"output_filename {self.template!r} needs. Set it in an earlier step or the "
                "rollout, or choose another output_filename."
            ) from error
        problem = self._problem(values, name) if self.fields else None
        if problem:
            values_text = ", ".join(
                f"{field} = {safe_repr(values[field])}" for field in self.fields
            )
            raise InvalidFileName(
                f"Document {values['id']!r}: with its {values_text}, output_filename "
                f"{self.template!r} gives the file name {safe_repr(name)}, which {problem}. "
                "Correct the documents, or choose another output_filename; "
                'on_document_error="dead_letter" sets such documents aside.'
            )
        return name

    def _problem(self, values: Mapping[str, object], name: str) -> str | None:
        if _CONTROL.search("".join(str(values[field]) for field in self.fields)):
            return "has a control character or a backslash"
        try:
            parts = [part.encode() for part in name.split("/")]
        except UnicodeEncodeError:
            return "has characters that are no Unicode text"
        if _odd_parts(name) > _odd_parts(self.template):
            return 'leaves the output folder, or has an empty part, "." or ".."'
        longest = max(map(len, parts)) + self._number
        if longest > _MAX_PART_BYTES:
            return f"has a part of {longest} bytes, of at most {_MAX_PART_BYTES}"
        folded = tuple(plain(name).casefold().split("/"))
        if any(folded[: len(reserved)] == reserved for reserved in self._reserved):
            return "is in a folder of the checkpoint or of staged files"
        return None


class OurTemplate(Template):
    """Replaces a writer's ``output_filename``, which datatrove fills twice for each document.

    Args:
        filled: the name for all documents; "": the name is filled in for each document.
    """

    def __init__(self, names: FileNames, filled: str) -> None:
        super().__init__(names.template)
        self._names = names
        self._filled = filled

    def substitute(self, values: Mapping[str, object]) -> str:  # type: ignore[override]  # as datatrove calls it
        return self._filled or self._names.fill(values)


def _checkpoints_below(writer: DiskWriter, checkpoints: Path | None) -> list[tuple[str, ...]]:
    if checkpoints is None or not writer.output_folder.is_local():
        return []
    folder = Path(writer.output_folder.resolve_paths("")).absolute()
    if not checkpoints.is_relative_to(folder):
        return []
    return [tuple(part.casefold() for part in checkpoints.relative_to(folder).parts)]


def _odd_parts(name: str) -> int:
    return sum(part in ("", ".", "..") for part in name.split("/"))


def plain(name: str) -> str:
    normalized = posixpath.normpath(name)
    if normalized == name:
        return name  # no second copy: there may be a million
    return normalized


# recognising names -------------------------------------------------------------------------------


def output_pattern(template: str, any_writer: bool = False) -> re.Pattern[str]:
    """Returns a pattern for the names of a writer's ``output_filename``. Chunks of a retry have
    names such as retry1_00000.

    Args:
        any_writer: whether to match names of datatrove's own InferenceRunner, and other endings.
    """
    numbers = {"rank": _RANK, "chunk_index": _RETRY + _CHUNK}
    endings = ""
    if any_writer:
        template = stem(template)
        endings = f"(?:{_ENDING})*"
        # datatrove's own InferenceRunner does not pad the number.
        numbers["chunk_index"] = _RETRY + r"\d+"
    seen = set()

    def expression(match: re.Match[str]) -> str:
        name = match[1]
        if name == "":
            return r"(?:\d{3,}_)?"  # a writer with max_file_size puts it in front of each name
        if name not in numbers:
            return ".*"
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        return f"(?P<{name}>{numbers[name]})"

    folder, slash, name = plain(template).rpartition("/")
    marked = Template(f"{folder}{slash}\0\0{name}")
    fields = {field: f"\0{field}\0" for field in marked.get_identifiers()}
    expressions = re.sub("\0(.*?)\0", expression, re.escape(marked.safe_substitute(fields)))
    return re.compile(expressions + endings, re.DOTALL)


def stem(template: str) -> str:
    """Returns the template without the endings of formats and compressions, which writers may add
    or omit.
    """
    return _ENDINGS.sub("", plain(template))


def rank_and_chunk(match: re.Match[str]) -> tuple[layout.RankAddress, int]:
    names = match.groupdict()
    retry, _, index = (names.get("chunk_index") or "0").rpartition("_")
    root = ""
    if retry:
        root = layout.retry_folder(Path(), int(retry.removeprefix("retry"))).name
    return layout.RankAddress(root, int(names.get("rank") or 0)), int(index)


def writer_name(writer: DiskWriter) -> str:
    """Returns the class with its module; for classes of datatrove and this package, whose modules
    may move, with the package.
    """
    kind = type(writer)
    module = kind.__module__
    package = module.partition(".")[0]
    if package in ("datatrove", "datatrove_ckpt"):
        module = package
    if module == "__mp_main__":
        module = "__main__"
    return f"{module}.{kind.__qualname__}"
