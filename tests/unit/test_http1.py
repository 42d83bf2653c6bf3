"""ResponseParser: what is a response and what is not, in one piece, split at every byte, and split
at random.
"""

import gzip

import pytest

from datatrove_ckpt.inference.client import body as body_limits
from datatrove_ckpt.inference.client.http1 import (
    RemoteProtocolError,
    Response,
    ResponseParser,
    UnaskedBytes,
    usual_response,
)
from tests import golden

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def encoded(coding, body):
    return b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        coding,
        len(body),
        body,
    )


ANSWERS = golden.sections("http1")
BAD = golden.named("bad_http1", globals())


def feed(pieces):
    """A parser whose answer is complete with the last piece and not before."""
    parser = ResponseParser()
    assert [parser.feed(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return parser


@pytest.mark.parametrize("code", ANSWERS)
def test_an_answer_is_the_same_however_it_is_cut(code):
    raw = eval(code)
    cuts = [[raw], [raw[i : i + 1] for i in range(len(raw))]]
    cuts += [[raw[:i], raw[i:]] for i in range(1, len(raw))]
    cuts += [
        [raw[:i], raw[i:j], raw[j:]] for i in range(1, len(raw)) for j in range(i + 1, len(raw))
    ]
    parsers = map(feed, cuts)
    (found,) = {f"{parser.response()}, reusable: {parser.reusable}" for parser in parsers}
    golden.hold("http1", code, f"{found}\nusual: {usual_response(raw)}")


@pytest.mark.parametrize("code", ANSWERS)
def test_a_connection_that_ends_inside_an_answer_gives_none(code):
    raw = eval(code)
    for size in range(len(raw)):
        parser = ResponseParser()
        assert not parser.feed(raw[:size])
        assert not parser.end()
        assert usual_response(raw[:size]) is None


@pytest.mark.parametrize("code", ANSWERS)
def test_an_answer_with_which_more_comes_is_none(code):
    raw = eval(code) + b"H"
    with pytest.raises(UnaskedBytes):
        ResponseParser().feed(raw)
    assert usual_response(raw) is None


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nServer: x\r\n\r\n"]
)
def test_without_a_length_the_end_of_the_connection_ends_the_answer(head):
    parser = ResponseParser()
    for piece in (head, b"hel", b"lo"):
        assert not parser.feed(piece)
    assert parser.end()
    assert parser.response() == Response(200, b"hello")
    assert not parser.reusable


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_answer_is_an_error_however_it_is_cut(name):
    raw = BAD[name]
    for step in (len(raw), 1):
        parser = ResponseParser()
        with pytest.raises(RemoteProtocolError):  # noqa: PT012 (one of the pieces)
            for start in range(0, len(raw), step):
                assert not parser.feed(raw[start : start + step])


def test_a_body_without_a_length_has_a_limit(monkeypatch):
    monkeypatch.setattr(body_limits, "LARGE_ANSWER_BYTES", 0)
    monkeypatch.setattr(body_limits, "MAX_ANSWER_BYTES", 10)
    for head, body in (
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 11),
        (CHUNKED, b"6\r\n123456\r\n5\r\n12345\r\n"),
        (CHUNKED, b"FFFFFFFFFFFFF\r\n12345678901"),
        # 1 MB of zeros is 1 kB in gzip; less than 1 MB has become 4 GB.
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", gzip.compress(bytes(1 << 20))),
    ):
        parser = ResponseParser()
        parser.feed(head)
        with pytest.raises(RemoteProtocolError, match="longer than 10"):
            parser.feed(body)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nA: ", CHUNKED + b"0\r\nA: "])
def test_a_field_without_end_does_not_fill_the_memory(head):
    parser = ResponseParser()
    assert not parser.feed(head)
    with pytest.raises(RemoteProtocolError, match="too long"):  # noqa: PT012 (one of the pieces)
        for _ in range(40):
            assert not parser.feed(b"x" * (1 << 20))


def test_the_body_is_no_part_of_the_header():
    parser = ResponseParser()
    assert not parser.feed(CHUNKED)
    for _ in range(40):
        assert not parser.feed(b"100000\r\n%b\r\n" % (b"x" * (1 << 20)))
