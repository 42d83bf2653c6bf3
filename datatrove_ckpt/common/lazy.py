"""Packages that are imported when they are first used, because they are optional, or slow."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any


class LazyModule(ModuleType):
    """Stands for a module that may be missing: then its first use raises ImportError."""

    def __getattr__(self, name: str) -> Any:
        module = import_module(self.__name__)
        vars(self).update(vars(module))
        return getattr(module, name)


if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa = LazyModule("pyarrow")
    pq = LazyModule("pyarrow.parquet")

__all__ = ["pa", "pq"]
