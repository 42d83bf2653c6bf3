"""datatrove's bars of a reader: one over the documents, one over the files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from datatrove.pipeline.readers.base import BaseDiskReader
from tqdm import tqdm


@contextmanager
def progress_bars(reader: BaseDiskReader, files: int) -> Iterator[tuple[tqdm, tqdm]]:
    """The bars of documents and of so many files. Shown as the reader's settings say."""
    limit = reader.limit if reader.limit != -1 else None
    documents_bar = tqdm(total=limit, desc="Document progress", unit="doc", disable=not reader.doc_progress)
    files_bar = tqdm(total=files, desc="File progress", unit="file", disable=not reader.file_progress)
    with closing(documents_bar), closing(files_bar):
        yield documents_bar, files_bar
