"""datatrove's readers, with the same arguments and documents, and a position on each document.

Start at ``base.py`` (SeekingReader: files, resuming, positions, for all formats) and
``inputs.py`` (how a position gets from a document to the checkpoint and back).

A position is the reader's state right after a document, as plain JSON below 1 kB. In a pipeline
``InferenceRunner`` takes positions from documents, and returns a saved state through ``Reading``.

``docs/readers.md`` lists the lines that each reader skips, the inputs that continue an old input,
and the differences from datatrove's readers.
"""

from datatrove_ckpt.readers.base import DamagedLine, SeekingReader, Stateful
from datatrove_ckpt.readers.csv_rows import CSVReader
from datatrove_ckpt.readers.huggingface import HuggingFaceDatasetReader
from datatrove_ckpt.readers.inputs import PositionedDocument, Reading, position_state
from datatrove_ckpt.readers.jsonl import BatchReader, JsonlReader
from datatrove_ckpt.readers.tables import IpcReader, ParquetReader
from datatrove_ckpt.readers.whole_files import PageReader, TextReader

READERS: tuple[type[SeekingReader], ...] = (
    JsonlReader,
    ParquetReader,
    IpcReader,
    CSVReader,
    TextReader,
    PageReader,
    HuggingFaceDatasetReader,
    BatchReader,
)
"""The classes that have short names in YAML files, and that the short form can choose."""

__all__ = [
    "READERS",
    "BatchReader",
    "CSVReader",
    "DamagedLine",
    "HuggingFaceDatasetReader",
    "IpcReader",
    "JsonlReader",
    "PageReader",
    "ParquetReader",
    "PositionedDocument",
    "Reading",
    "SeekingReader",
    "Stateful",
    "TextReader",
    "position_state",
]
