"""The page of `tfdist stacks --serve`: a text, computed for each request, for the browsers of this host that know the page's token."""

from __future__ import annotations

import hmac
import html
import http
import http.server
import secrets
import threading
from collections.abc import Callable

from tfdist.errors import ConfigError

_HOST = "127.0.0.1"
_REFRESH_SECONDS = 5
_REQUEST_SECONDS = 30.0  # a client that sends nothing is closed
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{seconds}"><title>tfdist stacks</title></head>
<body><pre>{text}</pre></body></html>
"""


def serve(port: int, read: Callable[[], str]) -> None:
    """Serves a page until Ctrl-C, and prints its address.

    Args:
        port: 0 means any free port.
        read: Returns the page's text.

    Raises:
        ConfigError: The port is taken.
    """
    path = f"/{secrets.token_urlsafe(24)}"
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:
            if not hmac.compare_digest(self.path.encode(), path.encode()):
                self.send_error(http.HTTPStatus.NOT_FOUND)
                return
            with lock:  # two requests at once would read each other's answers
                text = read()
            page = _PAGE.format(seconds=_REFRESH_SECONDS, text=html.escape(text)).encode()
            self.send_response(http.HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            """Logs nothing: a line for each request would show the token."""

    try:
        # With threads, because browsers open connections that they do not use.
        server = http.server.ThreadingHTTPServer((_HOST, port), Handler)
    except OSError as e:
        raise ConfigError(f"cannot serve at {_HOST}:{port}: {e.strerror}. Choose another port: --serve=PORT.") from e
    with server:
        print(f"http://{_HOST}:{server.server_port}{path} shows the tasks until Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
