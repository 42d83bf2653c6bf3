"""Reads whole files as documents: a text, a picture, or each page of a PDF.

A ``FilePosition`` is (documents of the file that were read,). Their content is not stored, so the
base class compares the file by size and fingerprint.
"""

import io
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from datatrove.data import MediaType
from datatrove.io import DataFileLike, DataFolderLike
from datatrove.pipeline.readers.base import BaseDiskReader

from datatrove_ckpt.common.formatting import install_extra
from datatrove_ckpt.common.retrying import failure_line
from datatrove_ckpt.errors import ConfigError, InputError
from datatrove_ckpt.readers.base import SeekingReader, TextFilesReader
from datatrove_ckpt.readers.empty_input import MAX_LINE_BYTES
from datatrove_ckpt.readers.positions import FilePosition, Row, RowBlock

_PDF = b"%PDF-"
_LOCK = threading.RLock()


class TextReader(TextFilesReader, BaseDiskReader):  # type: ignore[misc, unused-ignore]
    """Makes a document of each file: its text, and its path below the folder as the id.

    Args:
        shuffle_seed: shuffles the files by this number; ``shuffle_files`` is refused.
        encoding: encoding of the files, if it is not UTF-8, such as windows-1252.

    The other arguments are the same as in datatrove's readers of files.
    """

    format = "text"
    suffixes = ".txt .text .md .rst .html .htm"
    has_rows = False
    compression = "infer"
    _order_options = (*SeekingReader._order_options, "encoding")

    def blocks(self, name: str, file_position: FilePosition) -> Iterator[RowBlock]:
        self._file_extent.per = self._file_extent.size
        if file_position:
            return
        with self.open(name) as file:
            data = file.read(MAX_LINE_BYTES + 1)
            if len(data) > MAX_LINE_BYTES:
                raise InputError(
                    f"The input file {name!r} is longer than {MAX_LINE_BYTES} bytes. Split it, or "
                    "move it out of the folder, and run the same command again."
                )
            text = data.decode("utf-8-sig")
        row = None
        if text:
            row = {"text": text, "id": name}
        yield RowBlock("document {}", [(row, 0, (1,), 1)])


class PageReader(SeekingReader, BaseDiskReader):  # type: ignore[misc, unused-ignore]
    """Makes a document of each page of each PDF, and of each picture.

    The document's ``media`` is the page as a PNG, or the picture's file; its ``text`` what a PDF
    holds as text, "" for a scan; its id the file's path below the folder, of a PDF with ``#page``,
    from 1.

    Args:
        dpi: pixels in an inch of a PDF's page; A4 at 150 has 1240 x 1754.

    The other arguments are the same as in datatrove's readers of files.

    Raises:
        InputError: a PDF is damaged or has a password.
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
            is_pdf = file.read(len(_PDF)) == _PDF
            file.seek(0)
            pages: Iterator[Row]
            if is_pdf:
                pages = self._pages(file, name, first)
            else:
                self._file_extent.per = self._file_extent.size
                pages = iter([] if first else [{"id": name, "media": _media(name, file.read())}])
            for number, page in enumerate(pages, first + 1):
                yield RowBlock("page {}", [(page, number, (number,), number)])

    def _pages(self, file: io.IOBase, name: str, first: int) -> Iterator[Row]:
        try:
            import PIL  # noqa: F401 (for to_pil)
            import pypdfium2
        except ImportError as error:
            raise ConfigError(
                f"The input file {name!r} is a PDF, and {install_extra(str(error.name), 'media')}"
            ) from None

        with _pdfium(name):
            pdf = pypdfium2.PdfDocument(file)
            pages = len(pdf)
        try:
            self._file_extent.per = self._file_extent.size / max(1, pages)
            for number in range(first, pages):
                with _pdfium(name), closing(pdf[number]) as page:
                    text = page.get_textpage().get_text_bounded()
                    # A PDF's unit is a point, 72 in an inch.
                    with closing(page.render(scale=self.dpi / 72)) as bitmap:
                        image = bitmap.to_pil()
                png = io.BytesIO()
                image.save(png, "PNG")
                fields = {"text": text, "page": number + 1}
                name_of_page = f"{name}#{number + 1}"
                yield {**fields, "id": name_of_page, "media": _media(name_of_page, png.getvalue())}
        finally:
            with _pdfium(name):
                pdf.close()


@contextmanager
def _pdfium(name: str) -> Iterator[None]:
    """Admits one thread at a time: tasks overlap, and PDFium crashes with several threads."""
    import pypdfium2

    with _LOCK:
        try:
            yield
        except pypdfium2.PdfiumError as error:
            raise InputError(
                f"The input file {name!r} is damaged, or has a password: {failure_line(error)}. "
                "Repair it, or move it out of the folder, and run the same command again."
            ) from None


def _media(name: str, data: bytes) -> list[Row]:
    return [{"id": name, "type": MediaType.IMAGE, "url": "", "media_bytes": data}]
