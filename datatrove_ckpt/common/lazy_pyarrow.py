"""Modules that are slow to import, and that few runs need: each is imported when a name of it is
used first.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["pa", "pq"]


class _LazyModule:
    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        value = getattr(import_module(self._module), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa = _LazyModule("pyarrow")
    pq = _LazyModule("pyarrow.parquet")
