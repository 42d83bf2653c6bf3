"""Encodes a document before its rollout, so that its bytes identify it, whatever it holds.

A document may come with an image, a tensor or a file that the rollout removes. A text replaces each
value that ``document_codec.encode`` cannot write: its type, and a hash of content that is equal
after each start:

- PIL images: mode, size and pixels of the first frame. Most images have no encoded bytes any more.
- numpy arrays of objects or records, torch tensors: type, shape and content
- the decoders of videos and sound that ``datasets`` makes: their encoded bytes, or else the name of
  their file

Of other objects only the type counts: attributes may be addresses, times and counters, and a run
must not refuse its own input.
"""

from __future__ import annotations

import base64
import sys
from typing import Any, NamedTuple

import numpy as np
import orjson
import xxhash
from datatrove.data import Document

from datatrove_ckpt.common.formatting import safe_text
from datatrove_ckpt.output.document_codec import (
    TAG,
    as_plain,
    document_fields,
    dump,
    trim,
    wrap_deep,
)

# Below the limits of orjson and of Python's stack.
_DEEPEST = 50


class EncodedInput(NamedTuple):
    """A document as it was read.

    Attributes:
        data: fields as JSON, for its fingerprint and a dead letter.
        size: rough size in memory, in bytes, with images and tensors.
    """

    data: bytes
    size: int


def as_read(document: Document) -> EncodedInput:
    """Encodes any document, and never fails. Equal documents give equal bytes in any process.

    A lone surrogate survives. A container that contains itself is cut off where it repeats.
    """
    describe = _ValueDescription()
    try:
        data = dump(document_fields(document), describe)
    except Exception:
        fields = {
            name: getattr(document, name, None) for name in ("text", "id", "media", "metadata")
        }
        data = trim(orjson.dumps(describe.wrap(fields, _DEEPEST)))
    return EncodedInput(data, len(data) + describe.hashed_bytes)


class _ValueDescription:
    """Describes values of a document that cannot be encoded. Never raises.

    ``wrap`` makes plain JSON from any value: surrogates, keys of any type, containers that contain
    themselves.
    """

    def __init__(self) -> None:
        self.hashed_bytes = 0
        self._inside = False
        self._above: set[int] = set()

    def __call__(self, value: object) -> str:
        try:
            return _named(value, self._facts(value))
        except Exception:  # a damaged image, a closed decoder
            return _named(value)

    def _facts(self, value: object) -> str:
        # A module that is not imported has made no value.
        image = sys.modules.get("PIL.Image")
        if image is not None and isinstance(value, image.Image):
            return self._image(value)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            return f"{value.dtype} {tuple(value.shape)} {self._hash(data)}"
        # Datasets' video and audio decoders.
        if isinstance(encoded := getattr(value, "_hf_encoded", None), dict):
            if encoded.get("bytes") is not None:
                return self._hash(encoded["bytes"])
            # A cache may be elsewhere on the next node.
            return safe_text(encoded.get("path")).rpartition("/")[2]
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.hasobject:
                described = self._items(value.ravel().tolist())
            else:
                described = self._hash(value.tobytes())
            return f"{value.dtype} {value.shape} {described}"
        return ""

    def _image(self, image: Any) -> str:
        self.hashed_bytes += image.width * image.height * len(image.getbands())
        digest = xxhash.xxh3_128(image.tobytes())
        digest.update(bytes(image.getpalette() or b"") if image.mode in ("P", "PA") else b"")
        return f"{image.mode} {image.width}x{image.height} {digest.hexdigest()}"

    def _items(self, items: list[object]) -> str:
        if self._inside:  # they may hold each other
            return ""
        self._inside = True
        try:
            return self._hash(orjson.dumps(self.wrap(items, _DEEPEST)))
        finally:
            self._inside = False

    def _hash(self, data: Any) -> str:
        self.hashed_bytes += len(data)
        return str(xxhash.xxh3_128_hexdigest(data))

    def wrap(self, value: object, depth: int) -> object:
        try:
            plain = as_plain(value)
            if not isinstance(plain, str | dict | list | tuple):
                wrapped = wrap_deep(plain, self)
                orjson.dumps(wrapped)
                return wrapped
        except Exception:
            return _named(value)
        if isinstance(plain, str):
            try:
                plain.encode()
            except UnicodeEncodeError:
                data = base64.b64encode(plain.encode("utf-8", "surrogatepass"))
                return {TAG: ["surrogates", data.decode()]}
            return plain
        if id(value) in self._above:
            return _named(value, "that holds itself")
        if depth == 0:
            return _named(value)
        self._above.add(id(value))
        wrapped = self._wrap_items(plain, depth - 1)
        self._above.discard(id(value))
        return wrapped

    def _wrap_items(self, value: Any, depth: int) -> object:
        if isinstance(value, dict):
            return {
                TAG: [
                    "dict",
                    [
                        [self.wrap(key, depth), self.wrap(item, depth)]
                        for key, item in value.items()
                    ],
                ]
            }
        return [self.wrap(item, depth) for item in value]


def _named(value: object, facts: str = "") -> str:
    kind = type(value)
    if kind.__module__ == "builtins":
        name = kind.__qualname__
    else:
        name = f"{kind.__module__}.{kind.__qualname__}"
    return f"<{safe_text(name)}{' ' if facts else ''}{safe_text(facts)}, which cannot be kept>"
