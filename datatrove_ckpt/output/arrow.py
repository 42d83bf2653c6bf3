"""Keeps Arrow from holding the interpreter's lock for long, which would block the event loop.

Arrow converts a batch of documents in one call, under the lock. The slow part of that call is memory, not copying:
Arrow's default allocator, mimalloc, gets memory from the system and soon returns it, page by page. With the system's
allocator 1000 documents of 2 kB take 1 to 4 ms instead of sometimes 20 to 50 ms, and of 200 kB 0.26 s instead of 2.4 s
(measured, Arrow 26).
"""

from __future__ import annotations

import os

from datatrove.pipeline.writers import ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter


def prepare_arrow(writer: DiskWriter) -> None:
    """Chooses Arrow's allocator for a ParquetWriter, unless the user has chosen one. Call it before the loop runs."""
    if not isinstance(writer, ParquetWriter):
        return
    import pyarrow as pa

    if pa.default_memory_pool().backend_name == "mimalloc" and "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        pa.set_memory_pool(pa.system_memory_pool())
    pa.array([""])  # imports pandas, if it is installed
