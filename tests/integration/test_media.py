"""Pictures, sound and files of documents in requests: sent whole, not written, named when they are
damaged.
"""

import asyncio
import base64
import copy
import dataclasses
import io
import json
import os
import shutil
import signal
import struct
import tracemalloc
from pathlib import Path

import pytest
from datatrove.data import Document, Media
from datatrove.pipeline.writers import JsonlWriter
from fsspec.implementations.local import LocalFileSystem
from PIL import Image

import datatrove_ckpt.rollouts.media
from datatrove_ckpt.common import retrying
from datatrove_ckpt.errors import CkptError, ConfigError, Preempted
from datatrove_ckpt.output.document_codec import as_read
from datatrove_ckpt.rollouts import PromptRollout
from datatrove_ckpt.rollouts.media import kind_of, resized
from datatrove_ckpt.testing import FakeServer
from tests import golden
from tests.jobs import letters, rows, runner
from tests.pages import ROOT
from tests.pictures import media, picture
from tests.preempted import DRAINS, signal_once, when_logged

PDF = b"%PDF-1.7 a page"
WAV = b"RIFF\x24\0\0\0WAVEfmt and sound"


def pages(number):
    return [
        Document(f"page {index}", f"id {index}", [media(picture(index), f"m{index}")])
        for index in range(number)
    ]


def ask(folder, server, *documents, step=None, **rollout):
    """Runs a rollout with these settings. ``step``: settings of the runner."""
    asks = PromptRollout(**{"images": "media", **rollout})
    runner(folder, server, asks, **(step or {})).run(documents)


def part_of(url):
    return {"type": "image_url", "image_url": {"url": url}}


def parts(server, number=-1):
    return server.payloads[number]["messages"][-1]["content"]


def sent(server, number=-1):
    """The bytes of the pictures in a payload."""
    urls = [
        part["image_url"]["url"] for part in parts(server, number) if part["type"] == "image_url"
    ]
    return [base64.b64decode(url.partition(";base64,")[2]) for url in urls]


def url_of(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# what is sent ------------------------------------------------------------------------------------


def test_media_follow_the_text_and_their_bytes_are_not_written(server, tmp_path):
    document = Document(
        "Read.",
        "0",
        [media(picture(), "a", path="a.png"), media(WAV, "b"), media(PDF, path="x/c.pdf")],
    )
    ask(tmp_path, server, document)
    assert parts(server) == [
        {"type": "text", "text": "Read."},
        part_of(url_of(picture())),
        {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"},
        },
        {
            "type": "file",
            "file": {"filename": "c.pdf", "file_data": url_of(PDF, "application/pdf")},
        },
    ]
    (row,) = rows(tmp_path)
    assert [one["media_bytes"] for one in row["media"]] == [None] * 3
    assert [one["id"] for one in row["media"]] == ["a", "b", ""]
    assert [one["path"] for one in row["media"]] == ["a.png", None, "x/c.pdf"]


def test_a_writer_that_saves_media_gets_them(server, tmp_path):
    template = "${rank}_chunk_${chunk_index}.jsonl"
    saves = JsonlWriter(str(tmp_path / "output"), template, compression=None, save_media_bytes=True)
    ask(tmp_path, server, *pages(1), step={"output_writer": saves})
    assert base64.b64decode(rows(tmp_path)[0]["media"][0]["media_bytes"]) == picture()


@pytest.mark.parametrize(
    "value",
    [
        picture(),
        url_of(picture()),
        {"bytes": picture(), "path": "a.png"},
        {"bytes": None, "path": "a.png"},
        "a.png",
        [picture()],
    ],
    ids=["bytes", "data URL", "datasets", "datasets path", "path", "list"],
)
def test_a_column_may_hold_each_form_of_a_picture(server, tmp_path, value):
    (tmp_path / "a.png").write_bytes(picture())
    document = Document("x", "0", metadata={"page": value, "other": 1})
    settings = {"prompt": "What is it?", "images": "page", "media_folder": str(tmp_path)}
    ask(tmp_path, server, document, **settings)
    assert sent(server) == [picture()]
    assert parts(server)[0] == {"type": "text", "text": "What is it?"}
    (row,) = rows(tmp_path)
    assert "iVBOR" not in str(row)
    assert "PNG" not in str(row)


def test_a_url_of_an_allowed_host_is_sent_as_it_is_and_a_file_is_read_from_where_the_media_says(
    server, tmp_path
):
    (tmp_path / "all.bin").write_bytes(b"12345" + picture() + b"67")
    at = media(None, path="all.bin", offset=5, length=len(picture()))
    document = Document("Read.", "0", [media(None, url="https://example.com/a.png"), at])
    ask(tmp_path, server, document, media_folder=str(tmp_path), media_urls=["example.com"])
    urls = ["https://example.com/a.png", url_of(picture())]
    assert parts(server, 0)[1:] == list(map(part_of, urls))


def test_media_join_the_last_user_message_of_a_conversation(server, tmp_path):
    said = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "At what?"}]
    document = Document("x", "0", [media(picture())], {"said": said})
    ask(tmp_path, server, document, prompt_column="said")
    first, second = server.payloads[0]["messages"]
    assert [part["type"] for part in first["content"]] == ["text", "image_url"]
    assert second == said[1]
    assert rows(tmp_path)[0]["metadata"]["said"] == said


# what goes wrong ---------------------------------------------------------------------------------

BAD = [*golden.sections("bad_media")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A media folder, reached through a link, with entries that are no files of it."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("root:x:0:0")
    found = tmp_path / "media"
    (tmp_path / "real").mkdir()
    found.symlink_to("real")
    (found / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(found / "FIFO")
    (found / "text").write_text("root:x:0:0")
    (found / "large").write_bytes(PDF + bytes(20_000))
    monkeypatch.setattr(datatrove_ckpt.rollouts.media, "_MAX_FILE_BYTES", 20_000, raising=False)
    return found


def test_a_bad_medium_is_one_clear_dead_letter(server, tmp_path, folder):
    settings = {"media_folder": str(folder), "media_urls": ["example.com"], "max_image_side": 20}
    documents = [Document("bad", str(n), [eval(bad)]) for n, bad in enumerate(BAD)] + pages(1)
    ask(tmp_path, server, *documents, step={"on_document_error": "dead_letter"}, **settings)
    found = letters(tmp_path)
    assert len(found) == len(BAD)
    assert "FileNotFoundError" in str(found)
    for letter in found:
        assert letter["kind"] == "InvalidMedia"
        said = ": ".join(letter["error"].split(": ")[:3])  # others are of libraries
        golden.hold("bad_media", BAD[int(letter["id"])], said, FOLDER=folder)
        assert "\n" not in letter["error"]
        assert "root:x" not in letter["error"]
    assert [row["id"] for row in rows(tmp_path)] == ["id 0"]
    assert len(server.payloads) == 1


@pytest.mark.parametrize("column", ["images", "prompt_column"])
def test_a_run_that_stopped_at_a_url_goes_on_when_its_host_is_allowed(server, tmp_path, column):
    url = "https://Example.com:8000/a.png"
    first = picture()
    value = url
    if column == "prompt_column":
        first = "first"
        value = [{"role": "user", "content": ["Look.", part_of(url)]}]
    documents = [
        Document("first", "0", metadata={"at": first}),
        Document("Look.", "1", metadata={"at": value}),
    ]
    with pytest.raises(
        CkptError,
        match=r"'1'.*InvalidMedia: .*media_urls does not allow 'example.com'.*accept_changes",
    ):
        runner(tmp_path, server, PromptRollout(**{column: "at"})).run(copy.deepcopy(documents))
    for allowed in (["example.com"], ["*"]):
        rollout = PromptRollout(**{column: "at"}, media_urls=allowed)
        runner(tmp_path, server, rollout, accept_changes=True).run(copy.deepcopy(documents))
    assert [row["id"] for row in rows(tmp_path)] == ["0", "1"]
    assert len(server.payloads) == 2
    assert url in json.dumps(server.payloads)


def test_an_outage_of_the_storage_is_waited_for(server, tmp_path, monkeypatch):
    failures = [ConnectionResetError("reset"), TimeoutError("late")]
    real = LocalFileSystem.open

    def flaky(self, path, *arguments, **options):
        if str(path).endswith("a.png") and failures:
            raise failures.pop()
        return real(self, path, *arguments, **options)

    monkeypatch.setattr(LocalFileSystem, "open", flaky)
    monkeypatch.setattr(retrying, "READING", dataclasses.replace(retrying.READING, first=0.01))
    (tmp_path / "a.png").write_bytes(picture())
    document = Document("x", "0", [media(None, path="a.png")])
    ask(tmp_path, server, document, media_folder=str(tmp_path))
    assert sent(server) == [picture()]
    assert failures == []


def test_a_file_is_read_only_below_a_folder_that_was_named(server, tmp_path):
    document = Document("x", "0", metadata={"page": str(tmp_path / "a.png")})
    with pytest.raises(ConfigError, match=r"names a file.*Set media_folder"):
        ask(tmp_path, server, document, images="page")
    (tmp_path / "a.png").write_bytes(picture())
    settings = {"images": "page", "media_folder": str(tmp_path)}
    ask(tmp_path, server, document, step={"accept_changes": True}, **settings)
    assert sent(server) == [picture()]


def test_a_dead_letter_keeps_the_picture_for_a_retry(server, tmp_path):
    server._status = lambda payload, times: 400 if "image_url" in str(payload) else None
    changes = {"skip_bad_requests": True}
    large = picture(1, (400, 300))
    document = Document("x", "0", [media(large, "a")])
    ask(tmp_path, server, document, step=changes)
    (letter,) = letters(tmp_path)
    assert "base64" not in letter["error"] + letter["traceback"]
    server._status = lambda payload, times: None
    ask(tmp_path, server, step={"retry_dead_letters": True, "retry_errors": True, **changes})
    assert sent(server) == [large]


def test_a_dead_letter_has_a_large_document_as_it_was_read(server, tmp_path):
    async def rollout(document, generate):
        document.media[0].media_bytes = None
        document.media[0].metadata["page"].append(2)
        document.metadata["a"]["b"] = document.text = "changed"
        raise ValueError("no")

    large = Media("m", 0, "", media_bytes=picture(1, (400, 300)), metadata={"page": [1]})
    document = Document("x", "0", [large], {"a": {"b": 1}})
    expected = as_read(copy.deepcopy(document)).data
    runner(tmp_path, server, rollout, on_document_error="dead_letter").run([document])
    assert json.dumps(letters(tmp_path)[0]["document"], separators=(",", ":")) == expected.decode()


# once --------------------------------------------------------------------------------------------


def test_pictures_in_flight_are_in_memory_once(server, tmp_path):
    size, number, held = 10**6, 10, []

    async def rollout(document, generate):
        held.append(tracemalloc.get_traced_memory()[0] - before)
        while len(held) < number:
            await asyncio.sleep(0)
        return ""

    read = (Document("page", str(index), [media(os.urandom(size))]) for index in range(number))
    step = runner(
        tmp_path,
        server,
        rollout,
        config={"max_concurrent_documents": number},
        records_per_chunk=number,
        on_document_error="dead_letter",
    )
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        step.run(read)
    finally:
        tracemalloc.stop()
    assert 0.9 * number * size < held[-1] < 1.4 * number * size


def test_a_rank_that_is_stopped_while_documents_wait_for_memory_ends_and_goes_on(
    tmp_path, monkeypatch
):
    for module in ("rollouts.media", "inference.servers.host"):
        monkeypatch.setattr(f"datatrove_ckpt.{module}.media_bytes", lambda: 1)
    size = (400, 300)
    for index in range(4):
        (tmp_path / f"{index}.png").write_bytes(picture(index, size))

    def read():
        return [Document(f"page {n}", str(n), [media(None, path=f"{n}.png")]) for n in range(4)]

    rollout = PromptRollout(images="media", media_folder=str(tmp_path))
    with FakeServer(hold_after=0) as held:
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        with (
            signal_once(lambda: held.payloads),
            when_logged(DRAINS, held.release),
            pytest.raises(Preempted),
        ):
            runner(tmp_path, held, rollout, drain_seconds=20).run(read())
        signal.signal(signal.SIGTERM, before)
        assert len(held.payloads) == 1
        runner(tmp_path, held, rollout).run(read())
        assert len({sent(held, n)[0] for n in range(4)}) == len(held.payloads) == 4
    assert [row["id"] for row in rows(tmp_path)] == ["0", "1", "2", "3"]


def test_other_pictures_and_sizes_are_other_requests(server, tmp_path):
    async def rollout(document, generate):
        for number, side in ((0, None), (1, None), (0, 10), (0, 20), (0, 1000)):
            document.media[0].media_bytes = picture(number)
            await PromptRollout(images="media", max_image_side=side)(document, generate)

    runner(tmp_path, server, rollout).run(pages(1))
    assert len(server.payloads) == 5


# pictures ----------------------------------------------------------------------------------------


def test_the_first_bytes_tell_the_type():
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PDF"):
        assert kind_of(picture(form=form)) == (
            "application/pdf" if form == "PDF" else f"image/{form.lower()}"
        )
    sounds = {"mp3": b"ID3\x04", "flac": b"fLaC", "ogg": b"OggS", "wav": WAV}
    for name, data in sounds.items():
        assert kind_of(data) == f"audio/{name}"
    for other in (b"", b"RIFF....AVI ", b"\xff", b"<svg>"):
        assert kind_of(other) is None


def image(data):
    return Image.open(io.BytesIO(data))


def test_a_large_picture_is_made_smaller_in_the_same_way_each_time():
    for form in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"):
        data = picture(size=(60, 40), form=form)
        small = resized(data, 30)
        assert small == resized(data, 30)
        assert image(small).size == (30, 20)
        assert image(small).format == ("JPEG" if form == "JPEG" else "PNG")
        assert resized(data, 60) is data


def test_a_picture_keeps_its_turn_its_transparency_and_its_16_bits():
    exif = Image.Exif()
    exif[0x112] = 6  # to be turned by 90 degrees
    assert image(resized(picture(size=(60, 40), form="JPEG", exif=exif), 30)).size == (20, 30)
    made = io.BytesIO()
    Image.new("P", (60, 40), 0).save(made, "PNG", transparency=0)
    assert image(resized(made.getvalue(), 30)).mode == "RGBA"
    made = io.BytesIO()
    Image.frombytes("I;16", (60, 40), struct.pack("<H", 32768) * 2400).save(made, "PNG")
    assert image(resized(made.getvalue(), 30)).getpixel((5, 5)) == 128


# jobs --------------------------------------------------------------------------------------------


def test_the_config_for_ocr_runs(here, command, server):
    shutil.copytree(ROOT / "configs", "configs")
    Path("scans").mkdir()
    for index in range(4):
        Path(f"scans/{index}.png").write_bytes(picture(index))
    Path("scans/2.png").write_bytes(picture(2)[:-700])
    endpoint = ["--server-type", "endpoint", "--endpoint-url", server.url]
    command("run", "configs/ocr.yaml", "--input=scans/*.png", *endpoint)
    output = rows(Path("ocr"))
    assert [one["id"] for one in output] == [f"{index}.png" for index in (0, 1, 3)]
    assert {len(one["rollout_results"]) for one in output} == {1}
    (letter,) = letters(Path("ocr"))
    assert "medium 1 is damaged, or no whole picture" in letter["error"]
    assert sorted(sent(server, number)[0] for number in range(3)) == sorted(
        picture(index) for index in (0, 1, 3)
    )
