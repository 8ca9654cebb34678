"""`WarmSpare`: a process that has imported TensorFlow and Keras, and forks tasks, which start without the imports. No TensorFlow here."""

from __future__ import annotations

import glob
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.launch.guardian import Guardian
from tfdist.launch.process import ForkedProcess, Process, spawn

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spare.py")
_DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/accel*")  # of GPUs and TPUs
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t].*", re.MULTILINE)
_MODULES = {"tensorflow": "tensorflow", "keras": "keras", "tfdist": "tfdist.training.trainer"}
# Variables that libraries read when they are imported. TF_CONFIG, TF_NUM_* and CUDA_VISIBLE_DEVICES are read later.
_READ_AT_IMPORT = re.compile(
    r"\b(?:(?!TF_CONFIG\b|TF_NUM_|CUDA_VISIBLE_DEVICES\b)"
    r"(?:TF|CUDA|XLA|OMP|MKL|KMP|GOMP|DNNL|ONEDNN|OPENBLAS|BLIS|NUMEXPR|MALLOC|GLIBC|GRPC|KERAS|LD|LC)_[A-Z]\w*|PYTHON[A-Z]\w*)"
)
_OF_TASK = re.compile(r"TF_CONFIG|CUDA_VISIBLE_DEVICES|TFDIST_\w+")  # variables that may differ between tasks
_LONGEST_TEXT = 1 << 20
_IMPORT_SECONDS = 60.0  # limit of the wait for the imports
_FORK_SECONDS = 20.0  # limit of the wait for a fork, for a machine that swaps


class WarmSpare:
    """Process that starts tasks by a fork, without the time of their imports; a context manager.

    It serves commands that run a Python script or module with this interpreter, and whose text imports TensorFlow, Keras or
    tfdist. All other tasks are spawned, and so are tasks whose environment differs in more than the cluster. Where a GPU is
    visible there is no spare, because the import may start the GPU's driver.

    Args:
        command: The command of the tasks. Empty if all tasks are to be spawned.
        environ: The environment of a task.
        guardian: Kills the spare if this process is killed.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], guardian: Guardian):
        self._command = list(command)
        self._environ = {name: value for name, value in environ.items() if name != "TF_CONFIG"}
        self._guardian = guardian
        self._here = os.getcwd()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False

    def __enter__(self) -> WarmSpare:
        if not _is_possible(self._environ):
            return self
        plan = plan_imports(self._command)
        if plan is None:
            return self
        folder, modules = plan
        # Packets: one `recv` returns one message, and an empty one means that the other end is closed.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [_PROGRAM, str(theirs.fileno()), folder, ",".join(modules), *self._command]
        with theirs, self._guardian.starting():
            self._process = subprocess.Popen(
                [self._command[0], *words],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the launcher
            )
            self._guardian.watch(self._process.pid)
        self._until = time.monotonic() + _IMPORT_SECONDS
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the spare. Tasks that it has started continue; later tasks are spawned."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._guardian.unwatch(self._process.pid)
            self._socket.close()
            self._process = None

    def wait(self, is_stopped: Callable[[], bool]) -> None:
        """Waits until the spare has finished its imports, which began earlier than those of a spawned task would, or `is_stopped`."""
        while self._process and not self._look(0.05) and not is_stopped():
            pass

    def _look(self, seconds: float) -> bool:
        """Waits at most `seconds`; returns whether the spare is ready. Closes a spare that has ended or takes too long."""
        if self._process and not self._is_ready:
            self._socket.settimeout(seconds)
            try:
                self._is_ready = self._socket.recv(64) == b"ready"
            except (TimeoutError, BlockingIOError):
                if time.monotonic() > self._until:
                    self.close()
                return False
            except OSError:  # the spare has been killed
                pass
            if not self._is_ready:
                self.close()
        return self._is_ready and self._process is not None

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], output: int, stdin: int = subprocess.DEVNULL
    ) -> Process:
        """Forks a task from the spare if possible; otherwise starts a new process. Arguments as for `spawn`.

        Raises:
            OSError: The command cannot be started.
        """
        if list(command) == self._command and os.getcwd() == self._here and self._look(0.0):
            names = {*environ, *self._environ}
            changes = {name: environ.get(name) for name in names if environ.get(name) != self._environ.get(name)}
            # Libraries have read the other variables at their import.
            if all(map(_OF_TASK.fullmatch, changes)):
                task = self._fork(changes, output, stdin)
                if task:
                    return task
        return spawn(command, environ, output, stdin)

    def _fork(self, changes: Mapping[str, str | None], output: int, stdin: int) -> ForkedProcess | None:
        """Returns a new task, which leads its group; None if the spare cannot start it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_FORK_SECONDS)
        self._socket.settimeout(_FORK_SECONDS)
        files = [output, theirs.fileno()]
        if stdin != subprocess.DEVNULL:  # else the task has the spare's standard input, which is empty
            files.append(stdin)
        try:
            # Closed here after it is sent: then `ours` ends when the process that holds the other copy does.
            with theirs:
                socket.send_fds(self._socket, [json.dumps(changes).encode()], files)
            return ForkedProcess(int(ours.recv(64)), ours)
        except (OSError, ValueError):  # the spare has been killed, or has no memory for a fork
            ours.close()
            self.close()
            return None


def _is_possible(environ: Mapping[str, str]) -> bool:
    """Returns whether no GPU is visible, and Python's path begins with the folder of the script."""
    hides_gpus = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    sees_gpu = not hides_gpus and any(map(glob.glob, _DEVICES))
    return sys.platform == "linux" and not sees_gpu and "PYTHONSAFEPATH" not in environ


def plan_imports(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """Returns the folder that a command searches first for modules, and the modules to import; None if its tasks are spawned."""
    if not command or not _is_this_python(command[0]):
        return None
    words = list(command[1:])
    if words[:1] == ["-u"]:
        del words[0]
    if not words:
        return None
    if words[0] == "-m" and len(words) > 1:
        folder = os.getcwd()
        text = _text_of_module(words[1])
    elif words[0].endswith(".py"):
        folder = os.path.dirname(os.path.realpath(words[0]))
        text = _text(pathlib.Path(words[0]))
    else:
        return None
    imported = set(re.findall(r"\w+", " ".join(_IMPORT.findall(text))))
    modules = [module for name, module in _MODULES.items() if name in imported]
    # A script that sets such a variable must do so before the imports.
    if not modules or _READ_AT_IMPORT.search(text):
        return None
    return folder, modules


def _is_this_python(word: str) -> bool:
    path = os.path.abspath(shutil.which(word) or "")
    # The links of several virtual environments may lead to one file.
    return os.path.dirname(path) == os.path.dirname(sys.executable) and os.path.samefile(path, sys.executable)


def _text_of_module(name: str) -> str:
    if name == "tfdist.train":  # it imports TensorFlow once the configuration has been checked
        return "import tfdist"
    for folder in (os.getcwd(), *sys.path):
        path = pathlib.Path(folder, *name.split("."))
        text = _text(path.with_name(f"{path.name}.py")) or _text(path / "__main__.py")
        if text:
            return text
    return ""


def _text(path: pathlib.Path) -> str:
    """Returns the text of a file; empty if it cannot be read."""
    try:
        if path.stat().st_size < _LONGEST_TEXT:
            return path.read_text(errors="replace")
    except (OSError, ValueError):  # a ValueError for a null byte in the path
        pass
    return ""
