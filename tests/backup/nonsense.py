"""A storage that answers nonsense: it keeps objects as S3 does, and a seed draws which requests it answers otherwise."""

from __future__ import annotations

import contextlib
import http.server
import random
import threading
import urllib.parse
from collections.abc import Iterator
from xml.sax.saxutils import escape

STATUSES = (200, 200, 200, 204, 206, 301, 304, 400, 401, 403, 404, 409, 412, 416, 429, 500, 501, 503)
BODIES = (
    b"",
    b"<html><body>Welcome to the wireless network of the hotel</body></html>",
    b"<?xml version='1.0'?><ListBucketResult><Name>other</Name></ListBucketResult>",
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>later</Message></Error>",
    b"<?xml version='1.0'?><ListBucketResult><Contents><Key></Key></Contents></ListBucketResult>",
    b'{"error": null}',
    b"\xff\xfe\x00" * 99,
)


class Nonsense:
    """What a server answers.

    Attributes:
        share: The share of the requests that are answered with nonsense.
        draw: The random numbers that choose the requests and the answers.
        only: The status and body of all nonsense; None draws them.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self.draw = random.Random(0)
        self.only: tuple[int, bytes] | None = None
        self.objects: dict[str, bytes] = {}
        self._stale: dict[str, bytes] = {}

    def restart(self, seed: int) -> None:
        """Forgets all objects, and draws from `seed` how much nonsense follows."""
        self.draw = random.Random(seed)
        self.objects.clear()
        self._stale.clear()
        self.share = self.draw.choice((0.01, 0.05, 0.2, 0.5, 1.0))

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes, int]:
        """Returns the status, the body and the number of bytes that the header announces."""
        status, content = self._sensible(method, path, body)
        announced = len(content)
        if self.draw.random() >= self.share:
            self._stale.setdefault(path, content)
            return status, content, announced
        if self.only:
            return *self.only, len(self.only[1])
        kind = self.draw.choice(("any", "any", "stale", "truncated", "cut off", "flipped"))
        if kind == "any":
            content = self.draw.choice(BODIES)
            return self.draw.choice(STATUSES), content, len(content)
        if kind == "stale":
            content = self._stale.get(path, b"")
            return 200, content, len(content)
        if kind == "truncated":
            content = content[: len(content) // 2]
            return status, content, len(content)
        if kind == "cut off":
            return status, content[: len(content) // 2], announced
        return status, bytes(byte ^ 1 for byte in content), announced

    def _sensible(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        url = urllib.parse.urlsplit(path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        _, bucket, *name = urllib.parse.unquote(url.path).split("/", 2)
        key = "".join(name)
        if not key and method == "GET":
            return 200, self._listing(bucket, query.get("prefix", ""), query.get("delimiter", "")).encode()
        if method == "PUT":
            self.objects[key] = body
            return 200, b""
        if method == "POST":  # the removal of several objects
            for part in body.decode().split("<Key>")[1:]:
                self.objects.pop(part.partition("<")[0], None)
            return 200, b"<?xml version='1.0'?><DeleteResult></DeleteResult>"
        if method == "DELETE":
            self.objects.pop(key, None)
            return 204, b""
        if key not in self.objects:
            return 404, b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>"
        return 200, self.objects[key]

    def _listing(self, bucket: str, prefix: str, delimiter: str) -> str:
        folders = set()
        contents = []
        for key in sorted(self.objects):
            if not key.startswith(prefix):
                continue
            head, mark, _ = key[len(prefix) :].partition(delimiter or "\0")
            if mark:
                folders.add(prefix + head + mark)
            else:
                contents.append(key)
        text = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;0&quot;</ETag></Contents>"
            for key in contents
        )
        text += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders))
        count = len(contents) + len(folders)
        return (
            f"<?xml version='1.0'?><ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{count}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{text}</ListBucketResult>"
        )


@contextlib.contextmanager
def serving() -> Iterator[tuple[int, Nonsense]]:
    """Serves a storage, and yields its port and what it answers."""
    nonsense = Nonsense()
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet for headers and body, else the client waits 40 ms
        disable_nagle_algorithm = True

        def handle_expect_100(self) -> bool:
            goes_on = super().handle_expect_100()
            self.wfile.flush()
            return goes_on

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                status, content, announced = nonsense.answer(self.command, self.path, body)
            self.send_response(status)
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.send_header("ETag", '"0"')
            if status not in (204, 304):
                self.send_header("Content-Length", str(announced))
            self.end_headers()
            if self.command != "HEAD" and status not in (204, 304):
                self.wfile.write(content)
            self.close_connection = announced != len(content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_address[1], nonsense
        finally:
            server.shutdown()
            thread.join(30)
