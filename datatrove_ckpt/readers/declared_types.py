"""Converts columns of JSON lines and CSV to the types that a user declares."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from decimal import Decimal

from datatrove_ckpt.common.formatting import missing_package, safe_repr
from datatrove_ckpt.common.lazy_pyarrow import pa
from datatrove_ckpt.errors import ConfigError, DocumentNotSerializable
from datatrove_ckpt.readers.inputs import Row

_TEXTS = ("string", "large_string", "string_view")
_BYTES = ("binary", "large_binary", "binary_view")


@dataclass
class DeclaredTypes:
    names: dict[str, str]
    _kinds: dict[str, pa.DataType] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if missing := missing_package("pyarrow"):
            raise ConfigError(f"types: {missing}")
        for name, kind in self.names.items():
            try:
                self._kinds[name] = pa.type_for_alias(kind)
            except ValueError:
                raise ConfigError(
                    f"types: {kind!r} of the column {name!r} is no type of Arrow. Write one such "
                    "as int64, string, date32 or timestamp[us]."
                ) from None

    def schema(self) -> pa.Schema:
        return pa.schema([*self._kinds.items()])

    def convert(self, row: Row) -> None:
        """Gives values their declared types, in place."""
        for name, kind in self._kinds.items():
            value = row.get(name)
            if value == "" and str(kind) not in (*_TEXTS, *_BYTES):
                value = None
            if value is None:
                row[name] = None
                continue
            try:
                row[name] = _converted(value, kind)
            except (pa.ArrowException, TypeError, ValueError, ArithmeticError) as error:
                raise DocumentNotSerializable(
                    f"the column {name!r} has {safe_repr(value)}, which is no {kind}"
                ) from error


def _converted(value: object, kind: pa.DataType) -> object:
    plain = value
    if isinstance(value, int | float) and str(kind) in _TEXTS:
        plain = json.dumps(value)  # Arrow writes 1.0 as 1
    elif isinstance(value, int) and value >= 2**63:
        plain = str(value)
    scalar = pa.scalar(plain).cast(kind)
    converted = scalar.as_py()
    if isinstance(converted, bool):
        is_equal = isinstance(value, str) or value == converted
    elif isinstance(converted, int | float):
        is_equal = _is_equal(Decimal(value if isinstance(value, bool) else str(value)), converted)
    else:
        is_equal = pa.scalar(converted, kind).equals(scalar)
    if not is_equal:
        raise ValueError(f"it would be {converted!r}")
    return converted


def _is_equal(exact_value: Decimal, converted: float) -> bool:
    """Whether a float is the value, or rounds its fraction, but not to 0 or infinity."""
    exact = Decimal(converted)
    if exact_value in (exact, Decimal(repr(converted))) or (
        exact_value.is_nan() and exact.is_nan()
    ):
        return True
    is_fraction = exact_value.is_finite() and exact_value != exact_value.to_integral_value()
    return is_fraction and exact.is_finite() and bool(exact)
