"""A process that has imported TensorFlow and Keras, and forks test programs: each starts in 0.3 s in place of 2.8 s.

A test runs `command("tests.multiprocess.fit_program", "mirrored")` where it would run `python -m` with the same words. What it
starts is `fork_client`, a small process that launchers, `timeout`, `unshare` and signals treat as the program itself. The server
forks the program with the client's arguments, folder, environment, standard streams and network namespace.

One server serves all processes of a test run. It imports TensorFlow when the first program is asked for, and ends with the
process that called `begin` first, however that one ends: then it also kills the programs that still run, and removes the folder of the run.

What differs from a real process: TensorFlow has read its environment already (`TF_CPP_MIN_LOG_LEVEL`); all programs have one
seed of Python's hashes; SIGSTOP to the client does not stop the program, and SIGKILL ends it some while later (`kill` waits for that).
Tests of how tasks start (`tfdist.train`, launchers, schedulers) therefore run real processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import NamedTuple

from tests.helpers import coverage_contexts

ROOT = pathlib.Path(__file__).parents[2]
CLIENT = ROOT / "tests/helpers/fork_client.py"
PRELOADED = ("tensorflow", "keras", "tfdist.training.trainer", "tfdist.strategies.factory")
RUN = "FOLDER_OF_TEST_RUN"  # the environment variable
_LOCK = threading.Lock()  # two threads of a test may ask at once


def begin() -> pathlib.Path:
    """Returns the folder of the test run. If there is none, begins one, which ends with this process, and starts its server."""
    with _LOCK:
        if RUN not in os.environ:
            os.environ[RUN] = str(_start_server())
        return pathlib.Path(os.environ[RUN])


def command(module: str, *args: str) -> list[str]:
    """Returns the words that run a module as `python -m` does, forked from the run's server."""
    return [sys.executable, "-IS", str(CLIENT), str(begin() / "socket"), module, *args]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides what TensorFlow writes to stderr while it is imported: `TF_CPP_MIN_LOG_LEVEL` holds from later on."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process, and waits until it has ended; with what `command` has started, the program itself."""
    is_client = str(CLIENT) in process.args  # type: ignore[operator]
    process.send_signal(signal.SIGUSR1 if is_client else signal.SIGKILL)
    process.wait()


def _start_server() -> pathlib.Path:
    """Starts a server that ends with this process; returns its folder, in which its socket is."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="forks-"))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    environ.pop("TF_CONFIG", None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fork_server", str(folder), str(listener.fileno()), *PRELOADED],
            stdin=subprocess.PIPE,  # the server ends when this is closed
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C in a terminal is for the run, which ends the server
            env=environ,
            cwd=ROOT,
        )
    atexit.register(server.__exit__, None, None, None)
    return folder


class Request(NamedTuple):
    """What a client asks for."""

    argv: list[str]
    folder: str
    environ: dict[str, str]
    files: list[int]  # its standard streams and its network namespace


def serve(folder: str, listener: socket.socket, preloaded: list[str]) -> Request:
    """Forks a process for each client. Returns in those processes alone, with what the client asks for."""
    if sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        _preload(preloaded)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
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
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _preload(modules: list[str]) -> None:
    """Imports what programs need."""
    with quiet():
        for each in modules:
            importlib.import_module(each)
    if eager_context := sys.modules.get("tensorflow.python.eager.context"):
        assert eager_context._context is None, "TensorFlow has started threads, which a fork would lose"
    gc.freeze()  # or each collection in a program copies the pages it shares


def _watch(client: socket.socket, program: int) -> None:
    """Passes a client's signals to its program, and the program's end to its client; does not return.

    Kills the program when the client or the run has ended.
    """
    with contextlib.suppress(ConnectionError):  # the client may be gone
        end = os.pidfd_open(program)
        while end not in (ready := select.select([client, end, sys.stdin], [], [])[0]):
            number = b"" if sys.stdin in ready else client.recv(1)
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
    coverage_contexts.switch_as_environment_says()
    if "TFDIST_PROGRESS" in os.environ:  # what `import tfdist` does in a process of its own
        importlib.import_module("tfdist.runtime.report.ending").listen()
    sys.argv[:] = request.argv
    importlib.import_module("numpy").random.seed()  # or all ranks would draw the same numbers
    runpy.run_module(request.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run(serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), sys.argv[3:]))
