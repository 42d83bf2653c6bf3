"""``answers.jsonl``: the answers of committed documents, if the user keeps them for a fork with another prompt.

A commit drops its chunk's rows of the request cache. With ``keep_answers`` they are appended here first, as sealed
lines. A crash between the two appends them twice, which does no harm: the rows have keys. Nothing is synced: a power
loss costs answers that nobody may ever need, and a damaged line is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import orjson

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.checkpoint.lines import scan_lines, seal


def append_answers(path: Path, rows: Iterable[tuple[int, str, tuple[int, str, int], bytes | None]]) -> None:
    """Appends answers: ordinal, document id, key, and JSON of the result. Permanent errors (None) are left out."""
    lines = [
        seal(orjson.dumps({"ordinal": ordinal, "doc_id": doc_id, "key": [*key], "result": result.decode()}))
        for ordinal, doc_id, key, result in rows
        if result is not None
    ]
    if lines:
        files.disk.append(path, b"".join(lines))


def read_answers(path: Path) -> Iterator[tuple[int, str, tuple[int, str, int], bytes]]:
    """What ``append_answers`` got, in its order. Lines that are damaged are left out."""
    for _, _, line in scan_lines(path):
        if line is not None:
            content = orjson.loads(line.body)
            rollout_idx, payload_hash, occurrence = content["key"]
            key = rollout_idx, payload_hash, occurrence
            yield content["ordinal"], content["doc_id"], key, content["result"].encode()
