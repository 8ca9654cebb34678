"""A process that has imported TensorFlow and Keras, and forks test programs: each starts in 0.3 s in place of 2.8 s.

A test runs `command("tests.multiprocess.fit_program", "mirrored")` where it would run `python -m` with the same words. What it
starts is `fork_client`, a small process that launchers, `timeout`, `unshare` and signals treat as the program itself. The server
forks the program with the client's arguments, folder, environment, standard streams and network namespace.

What differs from a real process: TensorFlow has read its environment already (`TF_CPP_MIN_LOG_LEVEL`); all programs have one
seed of Python's hashes; SIGSTOP to the client does not stop the program, and SIGKILL ends it some while later (`kill` waits for that).
Tests of how tasks start (`tfdist.train`, launchers, schedulers) therefore run real processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
CLIENT = ROOT / "tests/helpers/fork_client.py"
PRELOADED = ("tensorflow", "keras", "tfdist.training.trainer", "tfdist.strategies.factory")
_LOCK = threading.Lock()  # two threads of a test may ask at once


def command(module: str, *args: str) -> list[str]:
    """Returns the words that run a module as `python -m` does, forked from this process's server."""
    with _LOCK:
        return [sys.executable, "-IS", str(CLIENT), _start_server(), module, *args]


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process, and waits until it has ended; with what `command` has started, the program itself."""
    is_client = str(CLIENT) in process.args  # type: ignore[operator]
    process.send_signal(signal.SIGUSR1 if is_client else signal.SIGKILL)
    process.wait()


@functools.cache
def _start_server() -> str:
    """Starts the server, which ends with this process; returns the path of its socket."""
    path = os.path.join(tempfile.mkdtemp(prefix="forks-"), "socket")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    environ.pop("TF_CONFIG", None)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.fork_server", path],
        stdin=subprocess.PIPE,  # the server ends when this is closed
        stdout=subprocess.PIPE,
        env=environ,
        cwd=ROOT,
    )
    assert server.stdout and server.stdout.readline() == b"ready\n"
    atexit.register(server.__exit__, None, None, None)
    return path


class Request(NamedTuple):
    """What a client asks for."""

    argv: list[str]
    folder: str
    environ: dict[str, str]
    files: list[int]  # its standard streams and its network namespace


def serve(path: str) -> Request:
    """Forks a process for each client. Returns in those processes alone, with what the client asks for."""
    for each in PRELOADED:
        importlib.import_module(each)
    eager_context = importlib.import_module("tensorflow.python.eager.context")
    assert eager_context._context is None, "TensorFlow has started threads, which a fork would lose"
    gc.freeze()  # or each collection in a program copies the pages it shares
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        client = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            words, files, _, _ = socket.recv_fds(client, 1 << 18, 4)
            if (program := os.fork()) == 0:
                client.close()
                return Request(*json.loads(words), files)
            _watch(client, program)
        client.close()
    os._exit(0)


def _watch(client: socket.socket, program: int) -> None:
    """Passes a client's signals to its program, and the program's end to its client; does not return."""
    with contextlib.suppress(ConnectionError):  # the client may be gone
        end = os.pidfd_open(program)
        while end not in select.select([client, end], [], [])[0]:
            number = client.recv(1)
            os.kill(program, number[0] if number else signal.SIGKILL)
        client.send(os.waitpid(program, 0)[1].to_bytes(4, "big"))
    os._exit(0)


def run(request: Request) -> None:
    """Becomes the program."""
    os.setsid()
    for number, file in enumerate(request.files[:3]):
        os.dup2(file, number)
    network = request.files[3]
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
        assert ctypes.CDLL(None, use_errno=True).setns(network, 0) == 0, os.strerror(ctypes.get_errno())
    for file in request.files:
        os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environ)
    sys.argv[:] = request.argv
    importlib.import_module("numpy").random.seed()  # or all ranks would draw the same numbers
    runpy.run_module(request.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run(serve(sys.argv[1]))
