"""`in_debugger` with real debuggers: pdb, IPython's, and debugpy with a client."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

# A thread prints each change, as one that looks for hangs would see it.
PROGRAM = """
import sys, threading, time
from tfdist.runtime.report.task_report import in_debugger
def watch():
    before = None
    while True:
        if (now := in_debugger()) != before:
            print("stopped" if now else "runs", flush=True)
        before = now
        time.sleep(0.01)
watcher = threading.Thread(target=watch, daemon=True)
watcher.pydev_do_not_trace = watcher.is_pydev_daemon_thread = True
watcher.start()
def fail():
    raise ValueError
"""
STOPS = {
    "pdb": "breakpoint()",
    "post mortem": "import pdb\ntry:\n    fail()\nexcept ValueError:\n    pdb.post_mortem()",
    "IPython": "from IPython.core.debugger import set_trace\nset_trace()",
    "IPython's terminal": "from IPython.terminal.debugger import set_trace\nset_trace()",
}
REST = "\nsys.stdin.readline()\n"


@pytest.fixture
def program(tmp_path):
    started = []

    def start(code):
        (tmp_path / "program.py").write_text(PROGRAM + code + REST)  # debugpy does not stop in code of `python -c`
        process = subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def await_line(process, text):
    for line in process.stdout:
        if line.strip().endswith(text):  # behind the debugger's own text
            return
    raise AssertionError(f"the program has ended without {text!r}")


@pytest.mark.parametrize("kind", STOPS)
def test_a_prompt_counts_and_the_program_behind_it_does_not(program, kind):
    process = program(f"time.sleep(0.1)\n{STOPS[kind]}")
    await_line(process, "runs")
    await_line(process, "stopped")
    process.stdin.write("c\n")
    process.stdin.flush()
    await_line(process, "runs")


class Client:
    """As much of a client of the Debug Adapter Protocol as stops and continues a program."""

    def __init__(self, port):
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._file = self._socket.makefile("rb")
        self._sent = 0

    def send(self, command, **arguments):
        self._sent += 1
        body = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        text = json.dumps(body).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(text), text))

    def await_event(self, name):
        while True:
            length = int(self._file.readline().split()[1])
            self._file.readline()
            message = json.loads(self._file.read(length))
            if message.get("event") == name:
                return message.get("body", {})

    def close(self):
        self._file.close()
        self._socket.close()


def test_a_breakpoint_of_debugpy_counts(program):
    process = program(
        "import debugpy\nprint(debugpy.listen(0)[1], flush=True)\ndebugpy.wait_for_client()\ndebugpy.breakpoint()\npass"
    )
    port = next(int(line) for line in process.stdout if line.strip().isdigit())
    client = Client(port)
    try:
        client.send("initialize", adapterID="test")
        client.send("attach", connect={})
        client.await_event("initialized")
        client.send("configurationDone")
        thread = client.await_event("stopped")["threadId"]
        await_line(process, "stopped")
        client.send("continue", threadId=thread)
        await_line(process, "runs")
    finally:
        client.close()
