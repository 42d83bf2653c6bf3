"""One schema for all files of an input, whose columns may have other types in each.

Unified within a shuffled window, a row's type would depend on its neighbours, and on where a run
was resumed. So the types of all files count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from datatrove_ckpt.errors import ConfigError, InputError
from datatrove_ckpt.readers.block_file import check_columns

if TYPE_CHECKING:
    import pyarrow as pa


class Unified:
    """The types of all rows.

    Args:
        schemas: each serialized schema, and a file that has it.
        columns: the columns that are read, which all files must have; None: all columns of all
            files.

    Raises:
        ConfigError: a file lacks a column, or the types of a column cannot be unified.
    """

    def __init__(self, schemas: Iterable[tuple[bytes, str]], columns: Sequence[str] | None) -> None:
        import pyarrow as pa

        unified = pa.schema([])
        for serialized, name in schemas:
            found = pa.ipc.read_schema(pa.py_buffer(serialized))
            wanted = found.names if columns is None else columns
            check_columns(found.names, wanted, name)
            schema = pa.schema([(column, found.field(column).type) for column in wanted])
            if not unified.names:
                unified = schema
            elif schema != unified:
                try:
                    unified = pa.unify_schemas(
                        [_plain_schema(unified), _plain_schema(schema)],
                        promote_options="permissive",
                    )
                except pa.ArrowException as error:
                    raise ConfigError(
                        f"The input file {name!r} and files before it have values that are none of "
                        f"one column: {error}. Write the files with one type, choose other "
                        "columns, or read without shuffle_seed."
                    ) from error
        self._schema = unified

    def apply(self, table: pa.Table, name: str) -> pa.Table:
        import pyarrow as pa

        schema = self._schema
        if table.column_names == schema.names and table.schema.types == schema.types:
            return table
        # Casts do not add the fields of a struct, as this does.
        tables = [plain(table), schema.empty_table()]
        try:
            return pa.concat_tables(tables, promote_options="permissive").select(schema.names)
        except pa.ArrowException as error:
            raise InputError(
                f"The input file {name!r} has a value that does not fit the types of all files: "
                f"{error}. Write the files with one type, or read without shuffle_seed."
            ) from error


def plain(table: pa.Table) -> pa.Table:
    """Decodes dictionaries and views."""
    return table.cast(_plain_schema(table.schema))


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    import pyarrow as pa

    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    fields = []
    for field in schema:
        kind = field.type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        fields.append((field.name, views.get(kind, kind)))
    return pa.schema(fields)
