"""Documents as read may hold anything. Their fingerprints are stable, and those of JSON are what they always were."""

from __future__ import annotations

import array
import asyncio
import copy
import datetime
import enum
import io
import json
import subprocess
import sys
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datatrove.data import Document, Media

from datatrove_ckpt.documents import decode, encode, fingerprint
from datatrove_ckpt.errors import CheckpointMismatch, DocumentFailed, DocumentNotSerializable
from datatrove_ckpt.generation.as_read import as_read
from datatrove_ckpt.testing import FakeServer
from tests.integration.test_whose_fault import letters
from tests.jobs import ask, documents, runner


class Color(enum.Enum):
    RED = "red"


@dataclass
class Box:
    size: int
    content: object = None


class Decoder:
    """As ``datasets`` marks those of videos and sound."""

    def __init__(self, path: str | None, data: bytes | None) -> None:
        self._hf_encoded = {"path": path, "bytes": data}


def document(value: Any) -> Document:
    return Document("text", "id", metadata={"before": 1, "value": value, "after": [None, {"x": 0.5}]})


def shown(value: Any) -> Any:
    return decode(as_read(document(value)).data).metadata["value"]


def digest(value: Any) -> str:
    return fingerprint(as_read(document(value)).data)


def image(color: int = 7, mode: str = "L", size: tuple[int, int] = (3, 2)) -> Any:
    pil = pytest.importorskip("PIL.Image")
    return pil.new(mode, size, color)


def opened(picture: Any, kind: str) -> Any:
    """The image as it comes from a file: not loaded yet."""
    data = io.BytesIO()
    picture.save(data, kind)
    return pytest.importorskip("PIL.Image").open(data)


# identity ------------------------------------------------------------------------------------------------------------

NOW = datetime.datetime(2026, 11, 20, 3, 4, 5, 678, tzinfo=datetime.UTC)
# As version 0.1.0 wrote them into journals and commits.
FINGERPRINTS = {
    "none": (None, "9e218f4b542274da"),
    "text": ("ä\u2028\n", "c8e05005b32a4563"),
    "numbers": ([1, -2.5, True, 2**63], "a606ba02d58c664e"),
    "beyond 64 bits": (2**70, "98fdb59cca3b458d"),
    "nan": (float("nan"), "cbd9b81255a813cc"),
    "nested": ({"a": [{"b": {}}], "$py": 1}, "0be5ce0b93b9abed"),
    "integer keys": ({1: {None: "x"}}, "439d93ad37393ea1"),
    "time": (NOW, "fd06bdf159b64779"),
    "date": (NOW.date(), "a717dc8ee254abba"),
    "bytes": (b"\x00\xff", "cf652d59feb1bed6"),
    "decimal": (Decimal("1.10"), "1bd403a8cbbc1ca9"),
    "set": ({"b", "a"}, "74d353cacef8fadb"),
    "path": (Path("a/b"), "8213e556564f7f87"),
    "complex": (1 + 2j, "36034f872c6105e7"),
    "array": (np.arange(4, dtype="i2").reshape(2, 2), "c6b12916a4479c53"),
    "scalar": (np.float32(0.5), "552d24b7c53bd698"),
    "tuple": ((1, 2), "e940f2e24137da70"),
    "media": (Media("m", 0, "u", media_bytes=b"\xff"), "80212f6eb65f1de2"),
}


@pytest.mark.parametrize(("value", "expected"), FINGERPRINTS.values(), ids=FINGERPRINTS.keys())
def test_what_could_be_kept_always_has_the_fingerprint_that_it_always_had(value: Any, expected: str) -> None:
    assert digest(value) == expected
    assert as_read(document(value)).data == encode(document(value))


def differing() -> dict[str, tuple[Any, ...]]:
    """Values that are equal for each kind if made twice, and differ from each other."""
    fortran = np.array([["a", None], [1, b"x"]], dtype=object, order="F")
    return {
        "images": (image(), image(8), image(mode="RGB"), image(size=(2, 3))),
        "palettes": (image(mode="P"), opened(image(9, mode="P"), "PNG")),
        "arrays of objects": (fortran, fortran[:1], np.array([object], dtype=object)),
        "records": (np.zeros(2, dtype=[("a", "i4")]), np.ones(2, dtype=[("a", "i4")])),
        "a record": (np.zeros(2, dtype=[("a", "i4")])[0], np.ones(2, dtype=[("a", "i4")])[0]),
        "buffers": (bytearray(b"x"), bytearray(b"y"), memoryview(b"x"), array.array("i", [1]), array.array("q", [1])),
        "deques": (deque([1, b"x"]), deque([1, b"y"]), deque([Box(1)])),
        "decoders": (Decoder("a.mp4", None), Decoder("b.mp4", None), Decoder("a.mp4", b"x"), Decoder(None, b"y")),
        "inside": ({1: object()}, Box(1, object()), [object()], {"a": image()}, Box(2, image()), (Color.RED, image())),
        "surrogates beside objects": ([object(), "\ud800"], [object(), "\udfff"], {"\ud800": object()}),
        "beyond 64 bits, beside an object": ([2**70, object()], [2**71, object()], [float("nan"), object()]),
    }


KINDS = ["images", "palettes", "arrays of objects", "records", "a record", "buffers", "deques", "decoders", "inside"]
KINDS += ["surrogates beside objects", "beyond 64 bits, beside an object"]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_values_have_equal_fingerprints_and_others_differ(kind: str) -> None:
    values, again = differing()[kind], differing()[kind]
    assert [digest(value) for value in values] == [digest(value) for value in again]
    assert len({digest(value) for value in values}) == len(values)


def test_an_image_is_its_pixels_however_it_came() -> None:
    picture = image()
    for kind in ("PNG", "BMP"):
        lazy = opened(picture, kind)
        assert digest(lazy).__class__ is str
        assert shown(lazy).split(" ", 1)[1] == shown(picture).split(" ", 1)[1]
    lazy = opened(picture, "PNG")
    before = digest(lazy)
    lazy.load()
    assert digest(lazy) == before
    assert shown(picture).startswith("<PIL.Image.Image L 3x2 ")


def test_a_damaged_image_counts_by_its_type() -> None:
    data = io.BytesIO()
    image(size=(300, 200)).save(data, "PNG")
    cut = pytest.importorskip("PIL.Image").open(io.BytesIO(data.getvalue()[:60]))
    assert shown(cut) == "<PIL.PngImagePlugin.PngImageFile, which cannot be kept>"


def test_a_decoder_without_bytes_counts_by_the_name_of_its_file_wherever_that_is_cached() -> None:
    assert digest(Decoder("/node1/cache/a.mp4", None)) == digest(Decoder("/node2/a.mp4", None))


class Tensor:
    """What of ``torch.Tensor`` is used."""

    def __init__(self, values: Any, dtype: str = "torch.int16") -> None:
        self._values = np.asarray(values, dtype="i2")
        self.dtype, self.shape = dtype, self._values.shape

    def detach(self) -> Tensor:
        return self

    cpu = contiguous = detach

    def flatten(self) -> Tensor:
        return Tensor(self._values.ravel(), self.dtype)

    def view(self, dtype: object) -> Tensor:
        assert dtype == "torch.uint8"
        return self

    def numpy(self) -> Any:
        return self._values.view("u1")


def test_a_tensor_counts_by_type_shape_and_content(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(Tensor=Tensor, uint8="torch.uint8")
    monkeypatch.setitem(sys.modules, "torch", fake)
    tensors = [Tensor([1, 2]), Tensor([[1, 2]]), Tensor([1, 3]), Tensor([1, 2], "torch.float16"), Tensor(1)]
    assert len({digest(tensor) for tensor in tensors}) == len(tensors)
    assert digest(tensors[0]) == digest(Tensor([1, 2]))


def test_of_any_other_object_only_the_type_counts() -> None:
    class Any1:
        def __init__(self, value: int) -> None:
            self.value = value

    assert digest(Any1(1)) == digest(Any1(2))
    assert digest(Any1(1)) != digest(object())
    assert digest({object(), Color}) == digest({Color, object()})


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        "import json, sys\nfrom tests.unit.test_as_read import *\n"
        "print(json.dumps({kind: [digest(value) for value in differing()[kind]] for kind in KINDS}))"
    )
    pytest.importorskip("PIL.Image")
    here = {kind: [digest(value) for value in differing()[kind]] for kind in KINDS}
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(there.stdout) == here


def test_a_value_that_cannot_even_be_looked_at_counts_by_its_type() -> None:
    class Hostile:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("no")

        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "Hostile" in shown(Hostile())
    assert "Hostile" in shown([Hostile(), "\ud800"])[0]


# containers that hold themselves --------------------------------------------------------------------------------------


def itself(width: int) -> list[Any]:
    value: list[Any] = ["x"] * 20_000
    value += [value] * width
    return value


def dict_of_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value |= {"a": value, "b": [value]}
    return value


def all_hold_all(number: int) -> list[Any]:
    lists: list[list[Any]] = [[] for _ in range(number)]
    for one in lists:
        one += lists
    return lists


def box_of_itself() -> Box:
    box = Box(1)
    box.content = [box, {"again": box}]
    return box


def array_of_itself() -> Any:
    value = np.empty(50, dtype=object)
    value[:] = [value] * 50
    return value


LOOPS: dict[str, Callable[[], Any]] = {
    "itself": lambda: itself(1),
    "itself often": lambda: itself(5),
    "dict": dict_of_itself,
    "all hold all": lambda: all_hold_all(40),
    "box": box_of_itself,
    "array": array_of_itself,
    "deque": lambda: (lambda value: value.append(value) or value)(deque([1])),
}


@pytest.mark.parametrize("name", LOOPS)
def test_containers_that_hold_themselves_are_looked_at_once(name: str) -> None:
    data = as_read(document(LOOPS[name]())).data
    assert data == as_read(document(LOOPS[name]())).data
    assert len(data) < 2_000_000
    assert decode(data).id == "id"


@pytest.mark.parametrize("name", ["itself", "itself often", "dict", "all hold all", "box"])
def test_what_holds_itself_and_is_to_be_written_is_a_clear_error(name: str) -> None:
    with pytest.raises(DocumentNotSerializable, match="that holds itself"):
        encode(document(LOOPS[name]()))


def test_a_list_that_is_there_twice_is_kept_twice() -> None:
    shared = [1, object()]
    assert shown([shared, shared, "\ud800"])[0] == shown([shared, "\ud800"])[0]
    assert digest([shared, shared]) == digest([shared, list(shared)])


# in a run -------------------------------------------------------------------------------------------------------------


def test_memory_of_images_counts_in_what_is_read_ahead() -> None:
    assert as_read(document(image(mode="RGB", size=(100, 100)))).size > 30_000
    assert as_read(document("x" * 1000)).size == len(encode(document("x" * 1000)))
    media = Document("t", "i", media=[Media("m", 0, "u", media_bytes=b"x" * 3000)])
    assert as_read(media).data == encode(media)


async def looks(document: Document, generate: Any) -> Any:
    picture = document.metadata.pop("image")
    document.metadata["width"] = picture.width
    return await ask(document, generate)


def with_images(number: int, color: int = 1) -> list[Document]:
    found = documents(number)
    for index, one in enumerate(found):
        one.metadata["image"] = image(color + index)
        one.metadata["time"] = [NOW, Decimal("1.1"), Path("a"), {1}]
    return found


async def takes(document: Document, generate: Any) -> Any:
    document.metadata.pop("time")
    return await looks(document, generate)


@pytest.mark.parametrize("checkpoints", [True, False])
def test_images_that_the_rollout_takes_out_pass(tmp_path: Path, server: FakeServer, checkpoints: bool) -> None:
    step = runner(tmp_path, server, takes)
    if not checkpoints:
        step.checkpoints_local_dir = None
    step.run(with_images(3))
    files = sorted((tmp_path / "output").iterdir())
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [line["metadata"]["width"] for line in lines] == [3, 3, 3]


def test_another_image_after_a_restart_is_another_input(tmp_path: Path, server: FakeServer) -> None:
    log = tmp_path / "checkpoints" / "00000" / "commits.jsonl"

    async def fails(document: Document, generate: Any) -> Any:
        while document.id == "id 2":
            await asyncio.sleep(0.001)
            if log.exists() and log.stat().st_size:
                raise ValueError("stop here")
        return await takes(document, generate)

    with pytest.raises(DocumentFailed):
        runner(tmp_path, server, fails).run(with_images(3))
    with pytest.raises(CheckpointMismatch, match="is not the one"):
        runner(tmp_path, server, takes, accept_changes=True).run(with_images(3, color=9))
    runner(tmp_path, server, takes, accept_changes=True).run(with_images(3))


def test_a_dead_letter_of_what_is_no_json_is_written_and_can_be_retried(tmp_path: Path, server: FakeServer) -> None:
    async def fails(document: Document, generate: Any) -> Any:
        raise ValueError("no")

    odd = with_images(1)
    odd[0].metadata["loop"] = dict_of_itself()
    odd[0].metadata["any"] = object()
    runner(tmp_path, server, fails, on_document_error="dead_letter").run(copy.copy(odd))
    (letter,) = letters(tmp_path)
    text = json.dumps(letter["document"])
    for part in ("PIL.Image.Image L 3x2", "<object, which cannot be kept>", "holds itself"):
        assert part in text

    async def forgets(document: Document, generate: Any) -> Any:
        assert isinstance(document.metadata["image"], str)
        document.metadata.clear()
        return await ask(document, generate)

    runner(tmp_path, server, forgets, retry_dead_letters=True, accept_changes=True).run([])
