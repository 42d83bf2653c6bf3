"""The kinds of stores that tests run over: a new one is one more row of ``STORES``, and each test with
the fixture ``store_kind`` runs on it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import HfApi


class Kind(NamedTuple):
    """A kind of store.

    ``url``: takes a folder of the test. ``writes``: class and method of the library that writes a
    small object. ``creates_once``: the store itself keeps a second creator from writing.
    """

    url: Callable[[Any], str]
    writes: tuple[type, str]
    creates_once: bool = False


STORES = {
    "disk": Kind(lambda folder: str(folder / "kept" / "store"), (LocalFileSystem, "pipe_file")),
    "memory": Kind(lambda folder: "memory://store", (MemoryFileSystem, "pipe_file")),
    # As S3 and Google Cloud Storage.
    "conditions": Kind(lambda folder: "memory://store", (MemoryFileSystem, "pipe_file"), True),
    "bucket": Kind(lambda folder: "hf://buckets/org/job/store", (HfApi, "batch_bucket_files")),
}
