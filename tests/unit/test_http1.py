"""AnswerParser: what is an answer and what is not, in one piece, in two at every byte, and byte by byte."""

from __future__ import annotations

import gc

import pytest

from datatrove_ckpt.inference.client import http1
from datatrove_ckpt.inference.client.http1 import AnswerParser, BadAnswer, Response

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
# What the server sends; the answer; whether the connection can be used again.
ANSWERS = {
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", Response(200, b"hello", ""), True),
    "no reason": (b"HTTP/1.1 200\r\ncontent-length:5\r\n\r\nhello", Response(200, b"hello", ""), True),
    "spaces": (b"HTTP/1.1 200 A B\r\nContent-Length: \t 5 \t\r\nX:\r\n\r\nhello", Response(200, b"hello", ""), True),
    "empty": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Response(200, b"", ""), True),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", Response(204, b"", ""), True),
    "304": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", Response(304, b"", ""), True),
    "retry": (b"HTTP/1.1 503 X\r\nretry-after: 7\r\nContent-Length: 1\r\n\r\nx", Response(503, b"x", "7"), True),
    "close": (b"HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 1\r\n\r\nx", Response(200, b"x", ""), False),
    "1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", Response(200, b"x", ""), False),
    "1.0 kept": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx",
        Response(200, b"x", ""),
        True,
    ),
    "continue first": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 X\r\nA: b\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
        Response(200, b"x", ""),
        True,
    ),
    "chunks": (CHUNKED + b"1\r\na\r\n00A\r\n0123456789\r\n0\r\n\r\n", Response(200, b"a0123456789", ""), True),
    "chunk with line breaks": (CHUNKED + b"4\r\n\r\n\r\n\r\n0\r\n\r\n", Response(200, b"\r\n\r\n", ""), True),
    "no chunk": (CHUNKED + b"0\r\n\r\n", Response(200, b"", ""), True),
    "extension": (CHUNKED + b'1 ;a="b;c"\r\na\r\n0;x\r\n\r\n', Response(200, b"a", ""), True),
    "trailer": (CHUNKED + b"1\r\na\r\n0\r\nA: b\r\nC: d\r\n\r\n", Response(200, b"a", ""), True),
    "both lengths": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: Chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        Response(200, b"a", ""),
        False,
    ),
}
BAD = {
    "another protocol": b"SSH-2.0-OpenSSH\r\n\r\n",
    "HTTP/2": b"HTTP/2 200 OK\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "status 0": b"HTTP/1.1 000 OK\r\n\r\n",
    "another protocol asked": b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\n\r\n",
    "a line break alone": b"HTTP/1.1 200 OK\nContent-Length: 1\r\n\r\nx",
    "a folded line": b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 1\r\n\r\nx",
    "a space before the colon": b"HTTP/1.1 200 OK\r\nContent-Length : 1\r\n\r\nx",
    "no colon": b"HTTP/1.1 200 OK\r\nContent-Length\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxy",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "a signed length": b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\nx",
    "a length in hexadecimal": b"HTTP/1.1 200 OK\r\nContent-Length: 0x1\r\n\r\nx",
    "no length": b"HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n",
    "too long": b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n",
    "far too long": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
    "compressed": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
    "gzip in chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    "chunked twice": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    "chunks in HTTP/1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no chunk size": CHUNKED + b"\r\na\r\n",
    "a bad chunk size": CHUNKED + b"0x1\r\na\r\n",
    "a negative chunk size": CHUNKED + b"-1\r\na\r\n",
    "a chunk that is too long": CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "a chunk of a petabyte": CHUNKED + b"FFFFFFFFFFFFF\r\n",
    "a chunk size too long": CHUNKED + b"FFFFFFFFFFFFFFFFF\r\n",
    "a nul": b"HTTP/1.1 200 OK\r\nA: \0\r\nContent-Length: 1\r\n\r\nx",
    "a header without end": b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000,
    "a long header": b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000 + b"\r\n\r\n",
    "a size line without end": CHUNKED + b"1;" + b"x" * 70_000,
    "a trailer without end": CHUNKED + b"0\r\nA: " + b"x" * 70_000,
}


def feed(pieces: list[bytes]) -> AnswerParser:
    """A parser whose answer is complete with the last piece and not before."""
    parser = AnswerParser()
    assert [parser.feed(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return parser


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_the_same_however_it_is_cut(name: str) -> None:
    raw, expected, reusable = ANSWERS[name]
    cuts = [[raw], [raw[i : i + 1] for i in range(len(raw))]]
    cuts += [[raw[:i], raw[i:]] for i in range(1, len(raw))]
    cuts += [[raw[:i], raw[i:j], raw[j:]] for i in range(1, len(raw)) for j in range(i + 1, len(raw))]
    for pieces in cuts:
        parser = feed(pieces)
        assert (parser.response(), parser.reusable) == (expected, reusable)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_connection_that_ends_inside_an_answer_gives_none(name: str) -> None:
    raw, _, _ = ANSWERS[name]
    for size in range(len(raw)):
        parser = AnswerParser()
        assert not parser.feed(raw[:size])
        assert not parser.end()


@pytest.mark.parametrize("name", ANSWERS)
def test_a_connection_on_which_more_comes_is_not_used_again(name: str) -> None:
    raw, expected, _ = ANSWERS[name]
    parser = feed([raw + b"H"])
    assert parser.response() == expected
    assert not parser.reusable


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nServer: x\r\n\r\n"])
def test_without_a_length_the_end_of_the_connection_ends_the_answer(head: bytes) -> None:
    parser = AnswerParser()
    for piece in (head, b"hel", b"lo"):
        assert not parser.feed(piece)
    assert parser.end()
    assert parser.response() == Response(200, b"hello", "")
    assert not parser.reusable


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_answer_is_an_error_however_it_is_cut(name: str) -> None:
    raw = BAD[name]
    steps = [1] if len(raw) < 1000 else [4096]
    for step in [len(raw), *steps]:
        parser = AnswerParser()
        with pytest.raises(BadAnswer):  # noqa: PT012 (one of the pieces)
            for start in range(0, len(raw), step):
                assert not parser.feed(raw[start : start + step])


def test_a_body_without_a_length_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "_MAX_BODY", 10)
    for head, body in ((b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 11), (CHUNKED, b"6\r\n123456\r\n5\r\n12345\r\n")):
        parser = AnswerParser()
        parser.feed(head)
        with pytest.raises(BadAnswer, match="longer than 10"):
            parser.feed(body)


def test_a_long_answer_in_many_pieces_is_read_in_linear_time() -> None:
    body = bytes(range(256)) * 40_000
    pieces = [body[i : i + 1000] for i in range(0, len(body), 1000)]
    for raw in (
        [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), *pieces],
        [CHUNKED, *(b"3E8\r\n%s\r\n" % piece for piece in pieces), b"0\r\n\r\n"],
        [CHUNKED, b"%x\r\n" % len(body), *pieces, b"\r\n0\r\n\r\n"],
    ):
        assert feed(raw).response().body == body


def test_a_parser_is_freed_without_a_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        for raw, _, _ in ANSWERS.values():
            feed([raw])
        assert gc.collect() == 0
    finally:
        gc.enable()
