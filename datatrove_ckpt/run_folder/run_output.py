"""The result of ``datatrove_ckpt.run()``: a path that reads the documents below it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PosixPath
from typing import TYPE_CHECKING, Any

from datatrove.data import Document

from datatrove_ckpt.checkpoint.checksummed_lines import Json
from datatrove_ckpt.common.counts import DocumentCounts
from datatrove_ckpt.output.document_codec import document_of
from datatrove_ckpt.run_folder.documents import committed_files, read_rows
from datatrove_ckpt.run_folder.export import dataset
from datatrove_ckpt.run_folder.run_location import open_location
from datatrove_ckpt.run_folder.run_state import read_run_state

if TYPE_CHECKING:
    import datasets
    import pandas


class RunOutput:
    """The documents in the files that are committed, in the order of the input. Each use reads
    them.

    Raises, in all methods:
        CkptError: the checkpoint or a file cannot be read.
    """

    def __iter__(self) -> Iterator[Document]:
        return map(document_of, self._rows())

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a row for each document. No value changes its type, as in ``read_json``."""
        import pandas

        return pandas.DataFrame(self._rows())

    def to_dataset(self) -> datasets.Dataset:
        """Returns a dataset of the files, which may be larger than the memory."""
        with open_location(self._run_folder) as location:
            return dataset(location)

    def push_to_hub(self, repository: str, **options: Any) -> None:
        """Uploads the dataset, with ``options`` of its ``push_to_hub``, such as ``private``."""
        self.to_dataset().push_to_hub(repository, **options)

    @property
    def counts(self) -> DocumentCounts:
        """Documents, requests and tokens over all attempts."""
        with open_location(self._run_folder) as location:
            return read_run_state(location).delivered

    @property
    def _run_folder(self) -> str:
        return str(self).rpartition("/")[0] or "."

    def _rows(self) -> Iterator[Json]:
        with open_location(self._run_folder) as location:
            for folder, file, _ in committed_files(location):
                yield from read_rows(folder, file.path)


class OutputPath(RunOutput, PosixPath):
    """The output folder on this machine."""


class OutputUrl(RunOutput, str):
    """The output folder elsewhere."""
