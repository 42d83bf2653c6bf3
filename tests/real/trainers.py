"""What the tests of Trainer and Accelerate share: an input, a model of a few weights, and the rows it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datatrove.data import Document
from transformers import GPT2Config, GPT2LMHeadModel

from datatrove_ckpt.readers import ParquetReader
from datatrove_ckpt.torch import ReaderDataset

ROWS = 48
BATCH = 8
STEPS = ROWS // BATCH  # in an epoch


def rows_as_parquet(folder: Path) -> str:
    """Three files with a number in each row."""
    for file in range(3):
        numbers = [str(i) for i in range(file, ROWS, 3)]
        pq.write_table(pa.table({"text": numbers}), folder / f"{file}.parquet", row_group_size=10)
    return folder.as_posix()


def tokens(document: Document) -> dict[str, torch.Tensor]:
    row = torch.full((4,), int(document.text))
    return {"input_ids": row, "labels": row}


def dataset(folder: str, **options: Any) -> ReaderDataset:
    return ReaderDataset(ParquetReader(folder), shuffle_seed=1, **{"transform": tokens, "batch_size": BATCH} | options)


class Recording(GPT2LMHeadModel):
    """A language model of a few hundred weights, made here and not downloaded. Keeps the rows of each batch."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # more would only wait for each other
        config = {"vocab_size": ROWS, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 1}
        super().__init__(GPT2Config(**config, bos_token_id=None, eos_token_id=None))
        self.batches: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kept: Any) -> Any:
        self.batches.append(input_ids[:, 0].tolist())
        return super().forward(input_ids=input_ids, labels=labels, **kept)
