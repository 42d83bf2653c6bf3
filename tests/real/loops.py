"""What tests of training loops share: input and samples, steps in a folder, a disk that is full."""

import errno
import itertools
import os
from pathlib import Path

import pyarrow as pa

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.errors import StorageFailed
from tests.unit.tables import reader_of, write_table


def write_rows(folder, rows, kind="jsonl", files=3):
    """Writes the rows to files one after the other, in small row groups. Returns their reader."""
    folder.mkdir()
    size = -(-len(rows) // files)
    for number in range(files):
        table = pa.Table.from_pylist(rows[number * size : (number + 1) * size])
        write_table(folder / f"{number}.{kind}", table, 6)
    return reader_of(folder, kind)


def text_of(row):
    return str(row["text"])


def take(batches, count=None):
    """The samples of batches that are lists."""
    return [one for batch in itertools.islice(batches, count) for one in batch]


def texts(batches):
    return [text for batch in batches for text in batch["text"]]


def assert_stops_change_nothing(train, tmp_path, stops):
    """``train(folder, stop)`` returns batches and weights of one process. Returns the batches of a
    training without a stop.
    """
    whole, weights = train(tmp_path / "whole", stops[-1])
    batches = []
    for stop in stops:
        seen, last = train(tmp_path / "run", stop)
        batches += seen
    assert batches == whole
    for key, value in weights.items():
        assert value.equal(last[key]), key
    return whole


def steps_in(folder):
    """The steps in a folder, or in a remote, by their numbers: "8", or "8.1" after a rollback."""
    found = Path(folder).glob("step-*/manifest.json")
    return {path.parent.name.removeprefix("step-").lstrip("0") for path in found}


class Full(files.Disk):
    """A disk that is full for a while: a file gets its first ``room`` bytes."""

    def __init__(self, room):
        super().__init__()
        self.is_full, self._room = True, room

    def write(self, fd, data, path):
        if (
            self.is_full
            and ".saving-" in str(path)
            and path.stat().st_size + len(data) > self._room
        ):
            raise StorageFailed(f"Could not write to {path}: {os.strerror(errno.ENOSPC)}.")
        super().write(fd, data, path)
