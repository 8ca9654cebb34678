"""Headless Chromium, spoken to by the DevTools protocol over two pipes: `--remote-debugging-pipe`."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium")
# Looks for elements also in shadow roots, which `document.querySelectorAll` leaves out.
_FIND_ALL = """
function findAll(selector, root = document) {
  const found = [...root.querySelectorAll(selector)];
  for (const element of root.querySelectorAll("*"))
    if (element.shadowRoot) found.push(...findAll(selector, element.shadowRoot));
  return found;
}
"""


class Page:
    """A page in a browser.

    Attributes:
        errors: What the page has reported as an error: exceptions, `console.error`, requests that failed.
    """

    def __init__(self, read, write):
        self._read, self._write, self._rest = read, write, b""
        self._number, self._session = 0, None
        self.errors = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Emulation.setDeviceMetricsOverride", width=1200, height=800, deviceScaleFactor=1, mobile=False)
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """Returns the answer to a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer.get("method"), answer.get("params"))
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self, seconds=60):
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], seconds)[0], "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, method, params):
        if method == "Runtime.exceptionThrown" or (method == "Runtime.consoleAPICalled" and params["type"] == "error"):
            self.errors.append(params)
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"])

    def open(self, address):
        """Goes to an address."""
        self.send("Page.navigate", url=address)

    def evaluate(self, expression):
        """Returns the value of a JavaScript expression, in which `findAll(selector)` returns elements, wherever they are."""
        script = f"{_FIND_ALL};{expression}"
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression, is_there, seconds=60):
        """Returns the value of an expression once it is there, or when the time is over."""
        end = time.monotonic() + seconds
        while not is_there(value := self.evaluate(expression)) and time.monotonic() < end:
            time.sleep(0.2)
        return value

    def screenshot(self, path):
        """Writes a PNG of what is to be seen."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def page(folder):
    """Yields a page of a new browser, with a profile of its own in `folder`."""
    (theirs, write), (read, ours) = os.pipe(), os.pipe()
    # Chromium reads file descriptor 3 and writes 4; a shell can put them there.
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    flags += ["--no-first-run", "--disable-background-networking"]
    script = f'exec "$@" 3<&{theirs} 4>&{ours}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", "timeout", "280", CHROMIUM, *flags],
        pass_fds=(theirs, ours),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(theirs)
    os.close(ours)
    try:
        found = Page(read, write)
        yield found
        found.send("Browser.close")
    finally:
        process.terminate()
        process.wait(timeout=20)
        os.close(read)
        os.close(write)
