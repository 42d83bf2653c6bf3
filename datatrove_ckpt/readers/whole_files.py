"""Reads whole files as documents: a text, a picture, or each page of a PDF.

A ``FilePosition`` is (documents of the file that were read,). Their content is not stored, so the
base class compares the file by size and fingerprint.
"""

import io
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import IO, Any

from datatrove.data import MediaType
from datatrove.io import DataFileLike, DataFolderLike
from datatrove.pipeline.readers.base import BaseDiskReader

from datatrove_ckpt.common.formatting import install_extra
from datatrove_ckpt.common.pictures import tiff_pages, with_png_mode
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.readers.base import SeekingReader, TextFilesReader
from datatrove_ckpt.readers.empty_input import MAX_LINE_BYTES
from datatrove_ckpt.readers.inputs import FilePosition, Row, RowBlock, file_error

_PDF = b"%PDF-"
_PDF_BEGINS = 1024
_TIFF = (b"II*\0", b"MM\0*")
_MAX_PIXELS = 2**30  # take 4 GB
_LOCK = threading.RLock()


class TextReader(TextFilesReader, BaseDiskReader):  # type: ignore[misc, unused-ignore]
    """Makes a document of each file: its text, and its path below the folder as the id.

    Args:
        shuffle_seed, encoding: see ``JsonlReader``.

    The other arguments are the same as in datatrove's readers of files.
    """

    format = "text"
    suffixes = ".txt .text .md .rst .html .htm"
    has_rows = False
    compression = "infer"
    omitted = ("types",)
    _order_options = (*SeekingReader._order_options, "encoding")

    def blocks(self, name: str, file_position: FilePosition) -> Iterator[RowBlock]:
        self._file_extent.per = self._file_extent.size
        if file_position:
            return
        with self.open(name) as file:
            data = file.read(MAX_LINE_BYTES + 1)
            if len(data) > MAX_LINE_BYTES:
                problem = f"is longer than {MAX_LINE_BYTES} bytes"
                raise file_error(name, problem, "Split it, or move it away")
            text = data.decode("utf-8-sig")
        row = None
        if text:
            row = {"text": text, "id": name}
        yield RowBlock("document {}", [(row, 0, (1,), 1)])


class PageReader(SeekingReader, BaseDiskReader):  # type: ignore[misc, unused-ignore]
    """Makes a document of each page of each PDF or TIFF, and of each picture.

    The document's ``media`` is the page as a PNG, or the picture's file; its ``text`` what a PDF
    holds as text, "" for a scan; its id the file's path below the folder, of a page with ``#page``,
    from 1.

    Args:
        dpi: pixels in an inch of a PDF's page; A4 at 150 has 1240 x 1754.

    The other arguments are the same as in datatrove's readers of files.

    Raises:
        InputError: a PDF is damaged or has a password, or a page is too large.
    """

    format = "page"
    suffixes = ".pdf .png .jpg .jpeg .webp .gif .tif .tiff"
    has_rows = False
    _order_options = (*SeekingReader._order_options, "dpi")

    def __init__(
        self,
        data_folder: DataFolderLike,
        paths_file: DataFileLike | None = None,
        dpi: int = 150,
        text_key: str | None = None,
        **options: Any,
    ) -> None:
        if type(dpi) is not int or not 20 <= dpi <= 1200:
            raise ConfigError(f"dpi must be an integer from 20 to 1200, not {dpi!r}.")
        super().__init__(data_folder, paths_file, text_key=text_key, **options)
        self.dpi = dpi

    def blocks(self, name: str, file_position: FilePosition) -> Iterator[RowBlock]:
        first = file_position[0] if file_position else 0
        with self.data_folder.open(name, "rb") as file:
            begin = file.read(_PDF_BEGINS)
            file.seek(0)
            if _PDF in begin:
                pages = self._pdf_pages(file, name, first)
            elif begin.startswith(_TIFF):
                pages = self._tiff_pages(file, name, first)
            else:
                pages = self._picture(file, name, first)
            for number, page in enumerate(pages, first + 1):
                yield RowBlock("page {}", [(page, number, (number,), number)])

    def _picture(self, file: IO[bytes], name: str, first: int) -> Iterator[Row]:
        self._file_extent.per = self._file_extent.size
        if not first:
            yield {"id": name, "media": _media(name, file.read())}

    def _tiff_pages(self, file: IO[bytes], name: str, first: int) -> Iterator[Row]:
        with _drawing(name):
            from PIL import Image

            tiff = Image.open(file)
            numbers = tiff_pages(tiff)
        if len(numbers) == 1:
            file.seek(0)
            yield from self._picture(file, name, first)
            return
        self._file_extent.per = self._file_extent.size / len(numbers)
        for number in range(first, len(numbers)):
            with _drawing(f"{name}#{number + 1}"):
                tiff.seek(numbers[number])
                page = _page(name, number, with_png_mode(tiff))
            yield page

    def _pdf_pages(self, file: IO[bytes], name: str, first: int) -> Iterator[Row]:
        with _drawing(name):
            import PIL  # noqa: F401 (for to_pil)
            import pypdfium2

            pdf = pypdfium2.PdfDocument(file)
            pages = len(pdf)
        try:
            self._file_extent.per = self._file_extent.size / max(1, pages)
            scale = self.dpi / 72  # a PDF's unit is a point, 72 in an inch
            for number in range(first, pages):
                with _drawing(f"{name}#{number + 1}"), closing(pdf[number]) as page:
                    text = page.get_textpage().get_text_bounded()
                    width, height = page.get_size()
                    if width * height * scale**2 > _MAX_PIXELS:
                        raise ValueError(f"{width:.0f} x {height:.0f} points are too large")
                    with closing(page.render(scale=scale)) as bitmap:
                        image = bitmap.to_pil()
                yield {"text": text, **_page(name, number, image)}
        finally:
            with _drawing(name):
                pdf.close()


@contextmanager
def _drawing(place: str) -> Iterator[None]:
    """Admits one thread at a time: tasks overlap, and PDFium crashes with several threads."""
    with _LOCK:
        try:
            yield
        except ImportError as error:
            advice = install_extra(str(error.name), "media")
            raise ConfigError(f"The input file {place!r} has pages, and {advice}") from None
        except Exception as error:
            raise file_error(
                place,
                f"is damaged, or has a password or no page: {failure_line(error)}",
                "Repair it, or move it away",
            ) from None


def _page(name: str, number: int, image: Any) -> Row:
    png = io.BytesIO()
    image.save(png, "PNG")
    name_of_page = f"{name}#{number + 1}"
    return {
        "page": number + 1,
        "id": name_of_page,
        "media": _media(name_of_page, png.getvalue()),
    }


def _media(name: str, data: bytes) -> list[Row]:
    return [{"id": name, "type": MediaType.IMAGE, "url": "", "media_bytes": data}]
