"""One schema for all files of an input, whose columns may have other types in each.

Rows of several files come together: in a shuffled window, in a batch of arrays. pyarrow would unify the types of those
that happen to be there, so that a row's type would depend on its neighbours, and on where a run was resumed. Here the
types of all files count, whoever reads what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from datatrove_ckpt.errors import ConfigError, InputError
from datatrove_ckpt.readers.block_files import check_columns

if TYPE_CHECKING:
    import pyarrow as pa


class Unified:
    """The types that all rows get.

    Args:
        schemas: each schema that occurs, serialized, and a file that has it.
        columns: the columns that are read, which all files must have; None: all that some file has. Where a file lacks
            one, its rows have None.

    Raises:
        ConfigError: a file lacks a column, or the types of a column cannot be unified.
    """

    def __init__(self, schemas: Iterable[tuple[bytes, str]], columns: Sequence[str] | None) -> None:
        import pyarrow as pa

        kinds: dict[str, dict[pa.DataType, str]] = {}
        for serialized, name in schemas:
            schema = pa.ipc.read_schema(pa.py_buffer(serialized))
            check_columns(schema.names, schema.names if columns is None else columns, name)
            for column in schema.names if columns is None else columns:
                kinds.setdefault(column, {}).setdefault(schema.field(column).type, name)
        self._schema = pa.schema([(column, _unify(column, files)) for column, files in kinds.items()])

    def apply(self, table: pa.Table, name: str) -> pa.Table:
        """The table in these types.

        Args:
            name: of its file.

        Raises:
            InputError: a value does not fit the type.
        """
        import pyarrow as pa

        schema = self._schema
        if table.column_names == schema.names and table.schema.types == schema.types:
            return table
        columns = []
        for field in schema:
            if field.name not in table.column_names:
                columns.append(pa.nulls(table.num_rows, field.type))
                continue
            try:
                columns.append(_cast(table[field.name], field.type))
            except pa.ArrowException as error:
                raise InputError(
                    f"The input file {name!r} has {field.name!r} as {table[field.name].type}, other files have it in "
                    f"types that make it {field.type}, and a value does not fit: {error}. Write the files with one "
                    "type, or read without shuffle_seed and arrays."
                ) from error
        return pa.table(columns, schema=schema)


def _unify(column: str, kinds: dict[pa.DataType, str]) -> pa.DataType:
    found = None
    for kind, name in kinds.items():
        before, found = found, kind if found is None else _common(found, kind)
        if found is None:
            first = next(file for other, file in kinds.items() if other == before or _common(other, kind) is None)
            raise ConfigError(
                f"The column {column!r} is {kind} in the input file {name!r} and {before} in {first!r}, which are no "
                "values of one column. Write the files with one type, choose other columns, or read without "
                "shuffle_seed and arrays."
            )
    assert found is not None
    return found


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    import pyarrow as pa

    for kinds in ((one, other), (_plain(one), _plain(other))):
        try:
            schemas = [pa.schema([("", kind)]) for kind in kinds]
            return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        except pa.ArrowException:
            pass
    return None


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of the values of a dictionary, or of views of texts."""
    import pyarrow as pa
    import pyarrow.types as types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return views.get(kind, kind)


def _cast(column: Any, kind: pa.DataType) -> Any:
    import pyarrow as pa

    if column.type != kind and _plain(column.type) != column.type and _plain(kind) == kind:
        column = column.cast(_plain(column.type))
    if column.type == kind:
        return column
    # Casts do not add the fields of a struct; this does, as it has unified the types.
    tables = [pa.table({"": column}), pa.table({"": pa.array([], kind)})]
    unified = pa.concat_tables(tables, promote_options="permissive").column(0)
    return pa.chunked_array([chunk for chunk in unified.chunks if len(chunk)], kind)
