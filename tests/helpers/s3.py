"""A server of S3 in a process of its own, and a switch before it that lets it fail."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

SECRET = "a-secret-of-the-tests"
BUCKET = "backups"
_SERVER = """
import sys, threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()  # until the test ends
"""
# (method, path, body) -> the status to answer instead of the server, or None.
Rule = Callable[[str, str, bytes], "int | None"]
_ERRORS = {403: "AccessDenied", 500: "InternalError"}


class Server:
    """A running server.

    Attributes:
        url: The URL of the bucket.
        environ: The variables with which programs find it.
        rule: Answers requests in place of the server; None passes all on.
        requests: The methods and paths of all requests so far.
    """

    def __init__(self, port: int, environ: dict[str, str]):
        self.url, self.environ = f"s3://{BUCKET}", environ
        self.rule: Rule | None = None
        self.requests: list[tuple[str, str]] = []
        self._port = port

    def files(self) -> list[str]:
        """Returns the names of all files in the bucket, asked of the server itself."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        connection.request("GET", f"/{BUCKET}?list-type=2")
        return re.findall("<Key>(.*?)</Key>", connection.getresponse().read().decode())

    def create_bucket(self, name: str = BUCKET) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        connection.request("PUT", f"/{name}", headers={"Host": "127.0.0.1"})
        assert connection.getresponse().status == 200


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[Server]:
    """Starts a server with one empty bucket; `folder` takes its output."""
    with (folder / "moto").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out
        )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[1])
        with _switch(port) as (proxy, handler):
            environ = {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy}",
                "AWS_ACCESS_KEY_ID": "the-key-of-the-tests",
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
            }
            server = Server(port, environ)
            handler.server_of_test = server
            server.create_bucket()
            yield server
    finally:
        process.kill()
        process.communicate(timeout=30)


@contextlib.contextmanager
def _switch(port: int) -> Iterator[tuple[int, type]]:
    class Handler(http.server.BaseHTTPRequestHandler):
        """Passes a request on to the server, unless a rule answers it."""

        protocol_version = "HTTP/1.1"
        server_of_test: Server

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server = type(self).server_of_test
            server.requests.append((self.command, self.path))
            status = server.rule(self.command, self.path, body) if server.rule else None
            if status is not None:
                code = _ERRORS[status]
                content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} of the test</Message></Error>".encode()
                headers = [("Content-Type", "application/xml")]
                length = 0 if self.command == "HEAD" else len(content)
            else:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                kept = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
                connection.request(self.command, self.path, body, kept)
                response = connection.getresponse()
                status, content = response.status, response.read()
                skipped = ("transfer-encoding", "connection", "content-length", "server", "date")
                headers = [each for each in response.getheaders() if each[0].lower() not in skipped]
                length = response.getheader("Content-Length") if self.command == "HEAD" else len(content)
                connection.close()
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            if status != 204:
                self.send_header("Content-Length", str(length or 0))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        proxy.daemon_threads = True
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield proxy.server_address[1], Handler
        finally:
            proxy.shutdown()
            thread.join(30)


@pytest.fixture
def s3(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server whose variables are set in this process. For modules to import."""
    import s3fs

    with running(tmp_path_factory.mktemp("s3")) as server:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield server
        s3fs.S3FileSystem.clear_instance_cache()
