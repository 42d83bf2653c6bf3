"""The answers that datatrove's runner kept, read from a copy of its database: opening it would change the original."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from datatrove_ckpt.checkpoint.layout import CACHE_LOGS
from datatrove_ckpt.checkpoint.lines import is_count

TheirAnswer: TypeAlias = tuple[str, int, str, bytes | None, str | None]
"""Id of the document, rollout, hash of the payload, result as JSON, error."""

_QUERY = "SELECT doc_id, rollout_idx, payload_hash, result, error_message FROM request_cache WHERE chunk_index = ?"


class TheirAnswers:
    """``replay.sqlite3`` of a rank of datatrove's run.

    Attributes:
        problem: why it cannot be read; "" if it can, or if there is none.

    Args:
        path: it need not exist.
        scratch: a folder for the copy.
    """

    def __init__(self, path: Path, scratch: Path) -> None:
        self.problem = ""
        self._connection: sqlite3.Connection | None = None
        if not path.is_file():
            return
        for suffix in ("", *CACHE_LOGS):
            if (found := path.with_name(path.name + suffix)).exists():
                shutil.copy(found, scratch / found.name)
        try:
            self._connection = sqlite3.connect(scratch / path.name)
            self._connection.execute(_QUERY, (-1,)).fetchall()
        except sqlite3.Error as error:
            if "no such table" not in str(error):  # a kill came before it was made
                self.problem = f"{path} cannot be read ({error}), so its answers are requested again"
            self.close()

    def last_chunk(self) -> int:
        """The last chunk with an answer; -1: there is none."""
        if self._connection is None:
            return -1
        try:
            found = self._connection.execute("SELECT max(chunk_index) FROM request_cache").fetchone()[0]
        except sqlite3.Error:
            return -1
        return found if is_count(found) else -1

    def of_chunk(self, index: int) -> Iterator[TheirAnswer]:
        """The answers that were kept for the documents of a chunk."""
        if self._connection is None:
            return
        try:
            for doc_id, rollout, name, result, error in self._connection.execute(_QUERY, (index,)):
                if isinstance(doc_id, str) and isinstance(rollout, int) and isinstance(name, str):
                    yield doc_id, rollout, name, result if isinstance(result, bytes) else None, error
        except sqlite3.Error as error:
            self.problem = f"answers of chunk {index} cannot be read ({error}), so they are requested again"

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
