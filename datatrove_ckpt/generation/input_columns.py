"""Reads the types of the input's columns, which the output writes again.

The types cannot be inferred from values: a date has no unit, an integer no width, and a column may
begin with values of a narrower type. So the first task that starts reads the schemas of all input
files, and saves their union in the job's folder. Each task saves a copy, which moves with it to
another node. A column keeps its input's type in each chunk with unchanged values. If a step or a
rollout has changed the values, the column has the type of its values. A task that wrote output
without such files continues without them.
"""

from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.checkpoint import files, layout
from datatrove_ckpt.common.lazy_pyarrow import pa, pq
from datatrove_ckpt.errors import CheckpointCorrupt, InputError
from datatrove_ckpt.output.arrow_types import (
    NO_TYPES,
    DataType,
    Schema,
    TypeConflict,
    Types,
    unify_types,
)
from datatrove_ckpt.output.chunk_writing import infers_schema
from datatrove_ckpt.output.document_codec import is_usual
from datatrove_ckpt.output.formats import CSV
from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.pipeline import steps_before

_METADATA = "metadata."


def input_types(documents: Iterable[Document], folder: Path, writer: DiskWriter) -> Types:
    """Returns the types of the input's columns, by their paths in the writer's rows.

    Raises:
        InputError: two files have types of a column that no type can hold.
    """
    is_table = CSV.is_written_by(writer) and writer.expand_metadata
    has_columns = infers_schema(writer) or is_table
    if not has_columns or not is_usual(writer):
        return NO_TYPES
    path = folder / layout.COLUMNS
    if not path.exists():
        shared = folder.parent / layout.COLUMNS
        if (folder / layout.COMMITS).exists() or not _is_made(documents, shared):
            return NO_TYPES
        _read_schema(shared)
        files.keep_first(path, shared.read_bytes())
    types = {field.name: field.type for field in _read_schema(path)}
    if not writer.expand_metadata:
        return types
    return {name.removeprefix(_METADATA): kind for name, kind in types.items()}


def _is_made(documents: Iterable[Document], shared: Path) -> bool:
    """Saves the job's types, unless they exist. Returns False if the input has none, or a task
    wrote output without them.
    """
    if shared.exists():
        return True
    root = shared.parent
    if any(
        (layout.rank_folder(root, rank) / layout.COMMITS).exists()
        for rank in layout.rank_numbers(root)
    ):
        return False
    types = _input_types(documents)
    if types:
        files.keep_first(shared, pa.schema(list(types.items())).serialize().to_pybytes())
    return bool(types)


def _read_schema(path: Path) -> Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(path.read_bytes()))
    except pa.ArrowException as error:
        raise CheckpointCorrupt(
            path,
            f" should hold the columns' types, and cannot be read ({error}). Restore it from a "
            "copy, or remove it: values then decide.",
        ) from error


def _input_types(documents: Iterable[Document]) -> dict[str, DataType]:
    steps = [step for step, _, _ in steps_before(documents)]
    readers = [step for step in steps if isinstance(step, SeekingReader)]
    types: dict[str, DataType] = {}
    files: dict[str, str] = {}
    changed = set()
    for reader in reversed(readers):
        if not reader.has_default_adapter():
            continue
        for file, schema in reader.schemas():
            for path, kind in _columns(reader, schema):
                try:
                    types[path] = unify_types(types.get(path), kind, path)
                except TypeConflict as clash:
                    if len(readers) == len(steps):
                        name = path.removeprefix(_METADATA)
                        raise InputError(
                            f"The column {name!r} has the type {clash.old} in {files[path]!r} "
                            f"and {clash.new} in {file!r}. Convert the files to one type, or "
                            "write output_format: jsonl."
                        ) from None
                    changed.add(path)  # a step may convert or remove it
                files.setdefault(path, file)
    return {
        path: written
        for path, kind in types.items()
        if path not in changed and (written := _written_type(kind)) is not None
    }


def _columns(reader: SeekingReader, schema: Schema) -> Iterator[tuple[str, DataType]]:
    document_fields = {reader.text_key or "text": "text", reader.id_key: "id", "media": None}
    metadata: dict[str, DataType] = {}
    for field in schema:
        kind = field.type
        if pa.types.is_dictionary(kind):  # an index of 8 bits may be too small for all files
            kind = pa.dictionary(pa.int32(), kind.value_type)
        path = document_fields.get(field.name, field.name)
        if field.name in document_fields:
            if path is not None:
                yield path, kind
        elif field.name == "metadata" and pa.types.is_struct(kind):
            metadata = {inner.name: inner.type for inner in kind} | metadata
        else:
            metadata[field.name] = kind
    for name, kind in metadata.items():
        yield _METADATA + name, kind


def _written_type(kind: DataType) -> "DataType | None":
    file = BytesIO()
    try:
        pq.write_table(pa.table({"": pa.array([], kind)}), file)
        return pq.read_schema(file).field(0).type
    except (pa.ArrowException, OSError):  # OSError: a decimal of negative scale
        return None
