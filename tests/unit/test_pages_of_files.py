"""``PageReader``: pages of PDFs and pictures as documents."""

import io
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datatrove_ckpt.errors import CheckpointMismatch, InputError
from datatrove_ckpt.readers import PageReader, position_state
from datatrove_ckpt.rollouts.media import InvalidMedia, resized
from datatrove_ckpt.testing import FakeServer

Image = pytest.importorskip("PIL.Image")
pypdfium2 = pytest.importorskip("pypdfium2")


def picture(color, form="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (8, 4), color).save(file, form)
    return file.getvalue()


def pdf(*colors):
    """A PDF with a page of each color, of 72 x 36 points."""
    file = io.BytesIO()
    first, *others = [Image.new("RGB", (72, 36), color) for color in colors]
    first.save(file, "PDF", save_all=True, append_images=others, resolution=72)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "scans").mkdir()
    for name, content in (
        ("a.pdf", pdf("red", "green", "blue")),
        ("b.png", picture("white")),
        ("c.jpg", picture("black", "JPEG")),
    ):
        (tmp_path / "scans" / name).write_bytes(content)
    return str(tmp_path / "scans")


def color_of(document):
    (media,) = document.media
    with Image.open(io.BytesIO(media.media_bytes)) as shown:
        # A PDF holds pictures as JPEG.
        return shown.size, [round(part / 64) for part in shown.convert("RGB").getpixel((1, 1))]


def test_a_page_is_a_document_and_the_rest_is_the_same_after_each(folder):
    whole = list(PageReader(folder, dpi=144).run())
    assert [document.id for document in whole] == [
        "a.pdf#1",
        "a.pdf#2",
        "a.pdf#3",
        "b.png",
        "c.jpg",
    ]
    assert [color_of(document) for document in whole[1:4]] == [
        ((144, 72), [0, 2, 0]),
        ((144, 72), [0, 0, 4]),
        ((8, 4), [4, 4, 4]),
    ]
    assert whole[3].media[0].media_bytes == Path(folder, "b.png").read_bytes()
    assert [document.metadata.get("page") for document in whole] == [1, 2, 3, None, None]
    for done, document in enumerate(whole, 1):
        resumed = PageReader(folder, dpi=144)
        resumed.load_state_dict(position_state(document))
        assert [one.id for one in resumed.run()] == [one.id for one in whole[done:]]
    sharper = PageReader(folder, dpi=300)
    sharper.load_state_dict(position_state(whole[0]))
    with pytest.raises(CheckpointMismatch, match="dpi=144, now 300"):
        next(sharper.run())


def tiff(*images, previews=()):
    """A TIFF of these images; those with the numbers in ``previews`` are no pages."""
    file = io.BytesIO()
    first, *others = [image.copy() for image in images]
    for number, image in enumerate(others, 1):
        image.encoderinfo = {"tiffinfo": {254: int(number in previews)}}
    first.save(file, "TIFF", save_all=True, append_images=others)
    return file.getvalue()


GREYS = Image.new("L", (8, 4), "white")
RED, GREEN = Image.new("RGB", (8, 4), "red"), Image.new("CMYK", (8, 4), (255, 0, 255, 0))


def test_each_page_of_a_tiff_is_a_document(tmp_path):
    path = tmp_path / "a.tiff"
    path.write_bytes(tiff(RED, RED, GREEN, GREYS, previews=[1]))
    whole = list(PageReader(str(tmp_path)).run())
    assert [document.id for document in whole] == ["a.tiff#1", "a.tiff#2", "a.tiff#3"]
    assert [document.metadata["page"] for document in whole] == [1, 2, 3]
    shown = [color_of(document)[1] for document in whole]
    assert shown == [[4, 0, 0], [0, 4, 0], [4, 4, 4]]
    for done, document in enumerate(whole, 1):
        resumed = PageReader(str(tmp_path))
        resumed.load_state_dict(position_state(document))
        assert [later.id for later in resumed.run()] == [later.id for later in whole[done:]]
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(InputError, match=r"'a.tiff(#\d)?' is damaged"):
        list(PageReader(str(tmp_path)).run())
    for images in ([GREYS], [RED, RED]):
        path.write_bytes(tiff(*images, previews=[1]))
        (alone,) = PageReader(str(tmp_path)).run()
        assert (alone.id, alone.media[0].media_bytes) == ("a.tiff", path.read_bytes())


def test_a_picture_of_floats_is_refused(tmp_path):
    floats = Image.new("F", (8, 4))
    with pytest.raises(InvalidMedia, match="mode F"):
        resized(tiff(floats), 4)
    Path(tmp_path, "a.tiff").write_bytes(tiff(RED, floats))
    with pytest.raises(InputError, match=r"'a.tiff#2' .*mode F"):
        list(PageReader(str(tmp_path)).run())


def test_a_pdf_may_begin_after_other_bytes_and_a_page_may_be_too_large(folder):
    path = Path(folder, "a.pdf")
    path.write_bytes(b"MIME-Version: 1.0\r\n\r\n" + path.read_bytes())
    assert len(list(PageReader(folder, glob_pattern="a.pdf").run())) == 3
    pdf = pypdfium2.PdfDocument.new()
    pdf.new_page(72, 72)
    pdf.new_page(90_000, 90_000)
    pdf.save(path)
    with pytest.raises(InputError, match=r"'a.pdf#2' is damaged.* 90000 x 90000 points"):
        list(PageReader(folder, glob_pattern="a.pdf").run())


def test_a_damaged_pdf_is_named(folder):
    file = Path(folder, "a.pdf")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(InputError, match=r"'a.pdf' is damaged, or has a password"):
        list(PageReader(folder).run())


def test_tasks_that_overlap_draw_one_page_at_a_time(folder, monkeypatch):
    """PDFium ends the process when two threads call it."""
    drawing = []
    render = pypdfium2.PdfPage.render

    def slowly(page, **options):
        drawing.append(threading.get_ident())
        time.sleep(0.02)
        assert len(drawing) == 1
        drawing.clear()
        return render(page, **options)

    monkeypatch.setattr(pypdfium2.PdfPage, "render", slowly)
    Path(folder, "b.png").write_bytes(pdf("red", "green", "blue"))
    with ThreadPoolExecutor() as threads:
        read = list(threads.map(lambda rank: list(PageReader(folder).run(None, rank, 2)), range(2)))
    assert [len(documents) for documents in read] == [4, 3]


def test_the_short_form_sends_each_page(folder, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with FakeServer() as server:
        job = ["run", "--input", "scans/*.pdf", "--prompt", "Read this page.", "--model=m"]
        command(*job, "--endpoint", server.url, "--run-folder=x", "--dpi=72")
        parts = [payload["messages"][0]["content"] for payload in server.payloads]
        command(*job, "--endpoint", server.url, "--run-folder=x", "--dpi=72")
        assert len(server.payloads) == 3
    assert {part["type"] for part in parts[0]} == {"image_url", "text"}
    rows = [json.loads(line) for line in next(Path("x/output").iterdir()).read_text().splitlines()]
    assert [row["id"] for row in rows] == ["a.pdf#1", "a.pdf#2", "a.pdf#3"]
    assert [row["page"] for row in rows] == [1, 2, 3]
    assert [row["media"][0]["media_bytes"] for row in rows] == [None] * 3
