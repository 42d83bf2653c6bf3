"""Sends the requests of batch files, and writes output lines in OpenAI's form."""

# No postponed annotations: the YAML loader evaluates them.

from dataclasses import dataclass

import orjson
import xxhash
from datatrove.data import Document
from datatrove.pipeline.inference.types import InferenceError
from loguru import logger

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.errors import RequestRejected
from datatrove_ckpt.rollouts.interface import Generate

_LINE = "batch_line"


@dataclass
class BatchRollout:
    """Sends a document of ``BatchReader`` unchanged. ``batch_line`` writes the answer, or the error
    of a rejected request, as a line of the output.
    """

    async def __call__(self, document: Document, generate: Generate, **shared: object) -> object:
        metadata = document.metadata
        digest = xxhash.xxh3_128_hexdigest(f"{document.id} {document.text}".encode())
        line = {
            "id": f"batch_req_{digest}",
            "custom_id": metadata.get("custom_id", document.id),
            "response": None,
            "error": None,
        }
        text = ""
        if "problem" in metadata:
            line["error"] = {"code": "invalid_request", "message": metadata["problem"]}
        else:
            try:
                body = orjson.loads(document.text)
                answer = await generate(body, path=metadata["url"], whole=True)
                text = answer.text
                line["response"] = _response(200, answer.response_id, answer.answer)
            except InferenceError as failed:
                line |= _failure(failed.error)
                logger.warning(f"The line of {document.id!r} has an error: {failed.error}")
        document.text = ""  # the journal needs no request
        document.metadata = {_LINE: line}
        return line["error"] or text


def batch_line(writer: object, document: Document) -> JsonObject:
    """Returns a line of the output: the ``adapter`` of a writer."""
    line: JsonObject = document.metadata.get(_LINE, document.metadata)
    return line


def _failure(error: str | Exception) -> JsonObject:
    if not isinstance(error, RequestRejected):
        return {"error": {"code": type(error).__name__, "message": str(error)}}
    try:
        body = orjson.loads(error.body)
    except orjson.JSONDecodeError:
        body = {"error": {"message": error.body}}
    return {
        "response": _response(error.status, "", body),
        "error": {"code": str(error.status), "message": error.body},
    }


def _response(status: int, request_id: str, body: object) -> JsonObject:
    return {"status_code": status, "request_id": request_id, "body": body}
