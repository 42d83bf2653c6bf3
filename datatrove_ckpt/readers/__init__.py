"""Readers that seek: datatrove's, with the same arguments and the same documents, and a position on each document.

A position is where its reader stands right after the document. As a state it is plain JSON, below 1 kB however many
files there are, and says which input it was made for; an input that is not a continuation of that one is refused with
``CheckpointMismatch``, naming the file. A continuation may have new files after the current one, and a plain JSONL
file that grew at its end.

    reader         goes on at                                     skips by
    JsonlReader    byte offset and line number                    seeking; gzip, zstd...: decompressing, not parsing
    ParquetReader  row group and row                              leaving out earlier row groups
    IpcReader      record batch and row                           seeking; with ``stream=True``: not converting

``shuffle_seed`` takes the place of ``shuffle_files``, whose order is another one on every start. It orders the files by
a hash of seed and name, so files that are added move no other file, and within a file the blocks (about 1 MiB of lines,
a row group, a record batch) and what is in each. Compressed lines and streams can't be entered in the middle: their
blocks keep their order. A document without an id of its own gets another than without shuffling: its place in the
file, because the number of documents before it is not known.

A pipeline needs nothing but these readers: ``InferenceRunner`` finds the positions on the documents and hands back the
saved one through ``Reading``. Elsewhere ``state_dict()`` and ``load_state_dict()`` do, as in torchdata:

    state = reader.state_dict()        # after any document
    reader.load_state_dict(state)      # the next run() yields what comes after it

Where these readers differ from datatrove's: bytes that are not UTF-8 cost their line, not the rest of the file; a line
whose JSON is no object is a damaged line, not the end of the rank; all frames of a zstd file are read, not only the
first; blank lines are passed without a warning.
"""

from datatrove_ckpt.readers.base import SeekingReader, Stateful
from datatrove_ckpt.readers.jsonl import DamagedLine, JsonlReader
from datatrove_ckpt.readers.positions import PositionedDocument, Reading, position_state
from datatrove_ckpt.readers.tables import IpcReader, ParquetReader

__all__ = [
    "DamagedLine",
    "IpcReader",
    "JsonlReader",
    "ParquetReader",
    "PositionedDocument",
    "Reading",
    "SeekingReader",
    "Stateful",
    "position_state",
]
