"""datatrove's readers, with the same arguments and documents, and a position on each document.

    base.py            SeekingReader: files, resuming, positions, whatever the format; start reading here
    jsonl.py           JsonlReader
    tables.py          ParquetReader, IpcReader
    huggingface.py     HuggingFaceDatasetReader; dataset_source.py: the dataset as its input
    revisions.py       the commit of a dataset on the hub that all ranks read
    positions.py       how a position gets from a document to the checkpoint and back
    extent.py          the size of the input, and how much of it is done
    inputs.py          the files of an input
    compressed.py      compressed files as streams
    input_errors.py    explains errors of the hub and of S3
    no_document.py     explains an input that has rows but no document
    pipeline.py        the readers among the steps before a runner; step_stats.py: the stats of these steps
    step_records.py    the description of these steps
    shard.py           what a rank has read

A position is where its reader stands right after the document. Its state is plain JSON, below 1 kB however many files
there are. Another input is refused with ``CheckpointMismatch``, unless it continues the old one: new files after the
current one, or a JSONL file that changed after the position.

    reader         resumes at                                     skips earlier documents by
    JsonlReader    byte offset and line number                    seeking; gzip, zstd...: decompressing, not parsing
    ParquetReader  row group and row                              not reading earlier row groups
    IpcReader      record batch and row                           seeking; with ``stream=True``: not converting
    HuggingFace... shard and row; index if not streaming          as ParquetReader; other formats: parsing the shard

``shuffle_seed`` replaces ``shuffle_files``, whose order changes with every start. It orders the files by a hash of seed
and name, so added files move no other file. Rows keep their order within a file; ``ReaderDataset`` shuffles rows, too.

In a pipeline ``InferenceRunner`` finds the positions on the documents, and hands the saved one back through
``Reading``. Elsewhere use ``state_dict()`` and ``load_state_dict()``, as in torchdata:

    state = reader.state_dict()        # after any document
    reader.load_state_dict(state)      # the next run() yields the documents after it

Differences from datatrove's readers: bytes that are not UTF-8 cost their line, not the rest of the file; a line whose
JSON is no object is a damaged line and does not end the rank; all frames of a zstd file are read, not only the first;
blank lines are skipped without a warning.
"""

from datatrove_ckpt.readers.base import SeekingReader, Stateful
from datatrove_ckpt.readers.huggingface import HuggingFaceDatasetReader
from datatrove_ckpt.readers.jsonl import DamagedLine, JsonlReader
from datatrove_ckpt.readers.positions import PositionedDocument, Reading, position_state
from datatrove_ckpt.readers.tables import IpcReader, ParquetReader

__all__ = [
    "DamagedLine",
    "HuggingFaceDatasetReader",
    "IpcReader",
    "JsonlReader",
    "ParquetReader",
    "PositionedDocument",
    "Reading",
    "SeekingReader",
    "Stateful",
    "position_state",
]
