"""Types that a user declares of the columns of JSON lines and CSV, which have few or none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from datatrove_ckpt.common.formatting import missing_package, safe_repr
from datatrove_ckpt.errors import ConfigError, DocumentNotSerializable
from datatrove_ckpt.readers.positions import Row

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class DeclaredTypes:
    """``names``: Arrow's, by column."""

    names: dict[str, str]
    _kinds: dict[str, pa.DataType] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if missing := missing_package("pyarrow"):
            raise ConfigError(f"types: {missing}")
        import pyarrow as pa

        for name, kind in self.names.items():
            try:
                self._kinds[name] = pa.type_for_alias(kind)
            except ValueError:
                raise ConfigError(
                    f"types: {kind!r} of the column {name!r} is no type of Arrow. Write one such "
                    "as int64, float64, string, bool, date32 or timestamp[us]."
                ) from None

    def schema(self) -> pa.Schema:
        import pyarrow as pa

        return pa.schema([*self._kinds.items()])

    def convert(self, row: Row) -> None:
        """Gives values their declared types, in place. Raises DocumentNotSerializable."""
        import pyarrow as pa

        for name, kind in self._kinds.items():
            value = row.get(name)
            if value == "" and not pa.types.is_string(kind):
                value = None
            if value is None:
                row[name] = None
                continue
            try:
                row[name] = pa.scalar(value).cast(kind).as_py()
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise DocumentNotSerializable(
                    f"the column {name!r} has {safe_repr(value)}, which is no {kind}"
                ) from error


def declared_types(names: dict[str, str] | None) -> DeclaredTypes | None:
    return DeclaredTypes(names) if names else None
