"""Texts: a file is a document.

A ``FilePosition`` is (1,): the file is read. Its text is not kept, so the base compares the file by
size and fingerprint.
"""

from datatrove.pipeline.readers.base import BaseDiskReader

from datatrove_ckpt.checkpoint.skipped import WITHOUT_TEXT
from datatrove_ckpt.errors import InputError
from datatrove_ckpt.readers.base import SeekingReader
from datatrove_ckpt.readers.jsonl import JsonlReader
from datatrove_ckpt.readers.no_document import MAX_LINE_BYTES
from datatrove_ckpt.readers.positions import FilePosition, FileRead


class TextReader(SeekingReader, BaseDiskReader):  # type: ignore[misc, unused-ignore]
    """Makes a document of each file: its text, and its path below the folder as the id.

    Args:
        shuffle_seed: shuffles the files by this number; ``shuffle_files`` is refused.

    The other arguments are those of datatrove's readers of files.
    """

    format = "text"
    compression = "infer"
    codec = JsonlReader.codec
    open_content = JsonlReader.open_content

    def _read(self, name: str, file_position: FilePosition) -> FileRead:
        self._file_extent.per = self._file_extent.size
        if file_position:
            return
        with self.track_time(), self.open_content(name) as file:
            content = file.read(MAX_LINE_BYTES + 1)
        if len(content) > MAX_LINE_BYTES:
            raise InputError(
                f"The input file {name!r} is longer than {MAX_LINE_BYTES} bytes. Split it, or move "
                "it out of the folder, and run the same command again."
            )
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(
                f"The input file {name!r} is no text in UTF-8: {error}. Save it as UTF-8, or move "
                "it out of the folder, and run the same command again."
            ) from None
        document = None
        if text:
            document = self.get_document_from_dict({"text": text, "id": name}, name, 0)
        yield document or WITHOUT_TEXT, (1,)
