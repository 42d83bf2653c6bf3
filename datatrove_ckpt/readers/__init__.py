"""datatrove's readers, with the same arguments and documents, and a position on each document.

    base.py            SeekingReader: files, resuming, positions, whatever the format; start reading
                       here
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
    pipeline.py        the readers among the steps before a runner; step_stats.py: the stats of
                       these steps
    step_records.py    the description of these steps
    shard.py           what a rank has read

A position is where its reader stands right after the document. Its state is plain JSON, below 1 kB
however many files there are. In a pipeline ``InferenceRunner`` finds the positions on the
documents, and hands the saved one back through ``Reading``. Elsewhere use ``state_dict()`` and
``load_state_dict()``, as in torchdata:

    state = reader.state_dict()        # after any document
    reader.load_state_dict(state)      # the next run() yields the documents after it

``docs/readers.md`` has what each reader skips, which inputs continue an old one, and what differs
from datatrove's.
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
