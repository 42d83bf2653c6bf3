"""A server that is never the bottleneck: answers what no model would have to think about, and
counts.

    python -m tests.bench.mock_server

Prints its port, and ends with whoever started it, killed or not: when its stdin closes. Each
payload is expected to hold ``#<number>#``, the number of its document, so that lost and repeated
requests show by document. What holds none is answered, not counted: some clients probe before they
ask.

    GET /v1/models                         readiness
    POST /v1/chat/completions              an answer, after the latency
    GET /count                             what was counted
    GET /reset?latency-ms=200              counts from zero, with another latency; 100-300: each
                                           document has its own, so that answers come one by one
    GET /wait?answers=500                  an answer once so many were given

Times are ``time.monotonic()``, which all processes of a machine share. uvloop is used where it is
installed.
"""

import asyncio
import json
import re
import resource
import sys
import time
from collections import Counter

try:
    import uvloop
except ImportError:
    uvloop = None

_NUMBER = re.compile(rb"#(\d+)#")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
# Not the same for each document, and without a loop: both would be counted.
_TEXT = (
    "Answer 00000000 is about a river in the north, and about the people who live on its banks "
    "since the old days of the kingdom: they fish, they trade and they sing, and in winter the "
    "river freezes, so that children skate."
)
_ANSWER = json.dumps(
    {
        "id": "mock",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": _TEXT},
            }
        ],
        "usage": {"prompt_tokens": 500, "completion_tokens": 60, "total_tokens": 560},
    }
).encode()


def _response(body):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


_BEFORE, _, _AFTER = _response(_ANSWER).partition(b"00000000")
_MODELS = _response(b'{"object":"list","data":[{"id":"mock","object":"model"}]}')


class Counts:
    """What was asked since the last reset."""

    def __init__(self, shortest=0.0, longest=0.0):
        self.shortest = shortest  # seconds
        self.longest = longest
        self.asked = Counter()
        self.first = self.last = 0.0
        self.answered = 0
        self.known = set()  # documents whose answer was sent, and read as far as TCP tells
        self.twice = 0
        self.waiting = {}  # connections by the number of answers that they wait for

    def ask(self, body):
        """Returns the document's number; None if it has none."""
        if match := _NUMBER.search(body):
            self.last = time.monotonic()
            self.first = self.first or self.last
            number = int(match[1])
            self.asked[number] += 1
            self.twice += number in self.known
            return number
        return None

    def latency(self, number):
        # Numbers that follow each other are far apart.
        return self.shortest + (self.longest - self.shortest) * ((number or 0) * 0.618 % 1)

    def to_json(self):
        times = Counter(self.asked.values())
        return json.dumps(
            {
                "requests": self.asked.total(),
                "by_times_asked": times,
                "asked_after_their_answer": self.twice,
                "unanswered": len(self.asked) - len(self.known),
                "first": self.first,
                "last": self.last,
            }
        ).encode()


class Server(asyncio.Protocol):
    """One connection, kept alive unless the client says otherwise."""

    counts = Counts()

    def connection_made(self, transport):
        self._transport = transport
        self._received = bytearray()
        self._needed = 0  # bytes of the request under way, once its header is known
        self._answered = None  # the last document

    def connection_lost(self, exc):
        # The other side has ended: reset instead of closed if there was something unread.
        if exc is not None:
            self.counts.known.discard(self._answered)

    def data_received(self, data):
        self._received += data
        while (
            len(self._received) >= self._needed and (end := self._received.find(b"\r\n\r\n")) >= 0
        ):
            head = bytes(self._received[:end])
            length = _LENGTH.search(head)
            self._needed = end + 4 + (int(length[1]) if length else 0)
            if len(self._received) < self._needed:
                return
            body = bytes(self._received[end + 4 : self._needed])
            del self._received[: self._needed]
            self._needed = 0
            self._handle(head, body, _CLOSE.search(head) is not None)

    def _handle(self, head, body, close):
        _, path, _ = head.split(b" ", 2)
        if head.startswith(b"POST"):
            counts = self.counts
            number = counts.ask(body)
            if counts.longest:
                loop = asyncio.get_running_loop()
                latency = counts.latency(number)
                loop.call_later(latency, self._answer, counts, number, close)
            else:
                self._answer(counts, number, close)
            return
        if path.startswith(b"/wait"):
            Server.counts.waiting[int(path.partition(b"=")[2])] = self
            return
        if path.startswith(b"/reset"):
            shortest, _, longest = path.partition(b"=")[2].partition(b"-")
            Server.counts = Counts(float(shortest) / 1000, float(longest or shortest) / 1000)
        self._send(_MODELS if path == b"/v1/models" else _response(Server.counts.to_json()), close)

    def _answer(self, counts, number, close):
        counts.answered += 1
        if number is not None and not self._transport.is_closing():
            counts.known.add(number)
            self._answered = number
            if waiting := counts.waiting.pop(len(counts.known), None):
                waiting._send(_MODELS, close=True)
        self._send(b"%b%08d%b" % (_BEFORE, counts.answered, _AFTER), close)

    def _send(self, response, close):
        if not self._transport.is_closing():
            self._transport.write(response)
            if close:
                self._transport.close()


async def serve():
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    server = await loop.create_server(Server, "127.0.0.1", 0, backlog=8192)
    print(server.sockets[0].getsockname()[1], flush=True)
    await ended.wait()
    server.close()


def main():
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    factory = uvloop.new_event_loop if uvloop is not None else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve())


if __name__ == "__main__":
    main()
