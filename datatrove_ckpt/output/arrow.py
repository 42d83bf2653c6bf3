"""Arrow beside an event loop: what it does with the interpreter's lock held should be short.

A batch of documents becomes Arrow's in one call, under the lock. What takes long in there is not the copying: Arrow's
default allocator, mimalloc, takes memory from the system afresh and gives it back soon, page by page. With the system's
allocator 1000 documents of 2 kB take 1 to 4 ms, and not 20 to 50 now and then; of 200 kB 0.26 s, and not 2.4
(measured, Arrow 26).
"""

from __future__ import annotations

import os

from datatrove.pipeline.writers import ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter


def prepare_arrow(writer: DiskWriter) -> None:
    """Before the loop runs. Has effect only for a ParquetWriter; an allocator that the user has chosen stays."""
    if not isinstance(writer, ParquetWriter):
        return
    import pyarrow as pa

    if pa.default_memory_pool().backend_name == "mimalloc" and "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        pa.set_memory_pool(pa.system_memory_pool())
    pa.array([""])  # imports pandas, where it is installed
