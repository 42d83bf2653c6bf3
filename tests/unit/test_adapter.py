"""Our adapter returns what datatrove's default one returns, value for value and key for key."""

from __future__ import annotations

import datetime
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
from datatrove.data import Document, Media
from datatrove.pipeline.inference.types import InferenceResult
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from datatrove.pipeline.writers.disk_base import DiskWriter

from datatrove_ckpt.documents import decode, decode_plain, encode
from datatrove_ckpt.output.adapter import decode_for

RESULT = InferenceResult("answer", "stop", {"prompt_tokens": 1, "details": {"cached": 0}}, "because")
DOCUMENTS = {
    "text only": Document("text", "id"),
    "nothing": Document("", ""),
    "results": Document("text", "id", metadata={"rollout_results": [RESULT, RESULT], "x": [[{"y": RESULT}]]}),
    "values": Document(
        "text",
        "id",
        metadata={
            "date": datetime.date(2024, 1, 1),
            "array": np.arange(3),
            "score": np.float32(0.5),
            "nan": float("nan"),
            "set": {1, 2},
            "bytes": b"\x00",
            "keys": {1: {2: None}},
            "$py": ["media", 1],
            "none": None,
            "empty": {},
            "text": "another",
        },
    ),
    "media": Document(
        "text",
        "id",
        media=[Media("m", 0, "https://a.b", media_bytes=b"\xff", metadata={"k": [1]}), Media("n", 1, "")],
        metadata={"inside": Media("o", 2, "", media_bytes=b"\x01")},
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("expand_metadata", [False, True])
@pytest.mark.parametrize("save_media_bytes", [False, True])
@pytest.mark.parametrize("writer_class", [JsonlWriter, ParquetWriter])
def test_it_returns_what_the_default_one_returns(
    tmp_path: Path, name: str, expand_metadata: bool, save_media_bytes: bool, writer_class: Any
) -> None:
    writer = writer_class(
        str(tmp_path), "${rank}", None, expand_metadata=expand_metadata, save_media_bytes=save_media_bytes
    )
    data = encode(DOCUMENTS[name])
    expected = writer.adapter(decode(data))
    assert decode_for(writer) is decode_plain
    given = writer.adapter(decode_plain(data))
    assert repr(given) == repr(expected)  # also the order of keys and the types of values
    assert writer.adapter.__func__ is not DiskWriter._default_adapter


def test_other_adapters_are_left_alone(tmp_path: Path) -> None:
    class Own(JsonlWriter):  # type: ignore[misc]
        def _default_adapter(self, document: Document) -> dict[str, Any]:
            return {"own": document.id}

    def adapter(self: Any, document: Document) -> dict[str, Any]:
        return {"given": document.id}

    for writer in (Own(str(tmp_path), "${rank}", None), JsonlWriter(str(tmp_path), "${rank}", None, adapter=adapter)):
        before: MethodType = writer.adapter
        assert decode_for(writer) is decode
        assert writer.adapter is before
