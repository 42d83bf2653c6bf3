"""Reads batch files of OpenAI's form: each line is a request.

{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
"""

import copy
from itertools import islice
from typing import Any

import orjson
from datatrove.data import Document
from datatrove.io import DataFolderLike

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.readers.base import DamagedLine
from datatrove_ckpt.readers.inputs import BadRow, PositionedDocument, Row, list_input
from datatrove_ckpt.readers.jsonl import JsonlReader

_URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    *(f"{prefix}/{name}" for name in ("classify", "rerank", "score") for prefix in ("", "/v1")),
    "/v2/rerank",
)
# Checking so many lines takes a second and 10 MB; OpenAI accepts 50,000 in a file.
_CHECKED_LINES = 100_000


class BatchReader(JsonlReader):
    """Reads a request from each line, as a document: its id is the ``custom_id``, its text the
    ``body``, and its metadata has the ``url``.

    A line that is no request becomes a document with a ``problem`` in its metadata, and appears in
    the output.
    """

    format = JsonlReader.format
    suffixes = ""

    def __init__(
        self,
        data_folder: DataFolderLike,
        *arguments: object,
        max_skipped: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(data_folder, *arguments, max_skipped=max_skipped, **options)

    def check(self) -> None:
        """Checks the first 100,000 lines of all files together.

        Raises:
            ConfigError: a line is no request, or has the ``custom_id`` of an earlier line.
        """
        strict = copy.deepcopy(self)
        strict.max_skipped = 0
        remaining = _CHECKED_LINES
        earlier = set[str]()
        for name in list_input(self).names:
            try:
                requests = strict.documents_of(name, strict.blocks(name, ()))
                for request, position in islice(requests, remaining):
                    remaining -= 1
                    custom_id = getattr(request, "id", "")
                    if custom_id in earlier:
                        raise ConfigError(
                            f"`{name}`, line {position[1]}: an earlier line also has the custom_id "
                            f"{custom_id!r}. Correct or remove the line."
                        )
                    earlier.add(custom_id)
            except DamagedLine as error:
                raise ConfigError(f"The input seems to be a batch file: {error}") from None

    def get_document_from_dict(
        self, data: Row, source_file: str, id_in_file: int | str
    ) -> Document:
        name = data.get("custom_id")
        text = ""
        problem = _problem(data)
        if not problem:
            try:
                text = orjson.dumps(data["body"]).decode()
            except TypeError as error:
                problem = f"its body cannot be sent as it is written: {error}"
        if problem:
            line = f"line {int(id_in_file) + 1}"
            document = self.skip_damaged(source_file, line, BadRow(problem))
            document.metadata["custom_id"] = name
            return document
        return PositionedDocument(text, name, metadata={"url": _url_of(data)})

    def skip_damaged(
        self, file: str, where: str, bad: BadRow, in_training: bool = False
    ) -> Document:
        super().skip_damaged(file, where, bad, in_training)
        problem = f"`{file}`, {where}: {bad.error}"
        return PositionedDocument(
            problem, problem, metadata={"problem": problem, "custom_id": None}
        )


def _url_of(data: Row) -> object:
    """Returns the path of a line's request; Azure's batch files omit /v1."""
    url = data.get("url")
    if url not in _URLS and f"/v1{url}" in _URLS:
        return f"/v1{url}"
    return url


def _problem(data: Row) -> str:
    body = data.get("body")
    if not isinstance(data.get("custom_id"), str) or not data["custom_id"]:
        return "it has no custom_id that is a text"
    if data.get("method", "POST") != "POST":
        return f"its method is {data['method']!r}, and requests are sent by POST"
    if "params" in data:
        return "it has params, as Anthropic's batches: write OpenAI's form, a url and a body"
    if _url_of(data) not in _URLS:
        return f"its url is {data.get('url')!r}, and not one of {', '.join(_URLS)}"
    if not isinstance(body, dict) or not body:
        return "its body is no object with keys"
    if extras := {"extra_body", "extra_headers", "extra_query"} & body.keys():
        return (
            f"its body has {min(extras)}, which is for OpenAI's client: write the keys of "
            "extra_body into the body, and remove the others"
        )
    if body.get("stream"):
        return "its body requests a stream, and answers are read as a whole: remove stream"
    return ""
