"""`WarmSpare`: a process that has imported TensorFlow and Keras, and forks tasks, which start without the imports. No TensorFlow here."""

from __future__ import annotations

import ctypes
import glob
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.launch.guardian import Guardian
from tfdist.launch.process import Process, spawn
from tfdist.launch.spare import sitecustomize as program

_FOLDER = os.path.dirname(os.path.abspath(program.__file__))
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
_SET_SUBREAPER, _GET_SUBREAPER = 36, 37  # of prctl


class WarmSpare:
    """Process that starts tasks by a fork, without the time of their imports; a context manager.

    It serves commands that run a Python script or module with this interpreter, and whose text imports TensorFlow, Keras or
    tfdist. All other tasks are spawned, and so are tasks whose environment differs in more than the cluster. Where a GPU is
    visible there is no spare, because the import may start the GPU's driver.

    Args:
        command: The command of the tasks. None means that all tasks are spawned.
        environ: The environment of a task.
        guardian: Kills the spare if this process is killed.
    """

    def __init__(self, command: Sequence[str] | None, environ: Mapping[str, str], guardian: Guardian):
        self._command = list(command or ())
        self._environ = {name: value for name, value in environ.items() if name != "TF_CONFIG"}
        self._guardian = guardian
        self._here = os.getcwd()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False

    def __enter__(self) -> WarmSpare:
        plan = _plan(self._command) if self._command and _is_possible(self._environ) else None
        if plan is None:
            return self
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = self._environ.get("PYTHONPATH")
        environ = {
            **self._environ,
            "PYTHONPATH": _FOLDER if before is None else f"{_FOLDER}{os.pathsep}{before}",
            program.VARIABLE: json.dumps([theirs.fileno(), before, *plan]),
        }
        with theirs, self._guardian.starting():
            self._process = subprocess.Popen(
                self._command,
                env=environ,
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
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._guardian.unwatch(self._process.pid)
            self._socket.close()
            self._process = None

    def wait(self, is_stopped: Callable[[], bool]) -> None:
        """Waits until the spare has finished its imports, which began earlier than those of a spawned task would.

        Args:
            is_stopped: Returns whether to stop waiting.
        """
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
        """Forks a task from the spare if possible; otherwise starts a new process.

        Args:
            command: The command.
            environ: The task's environment.
            output: The descriptor for its standard output and error.
            stdin: The descriptor of its standard input.

        Raises:
            OSError: The command cannot be started.
        """
        if list(command) == self._command and os.getcwd() == self._here and self._look(0.0):
            names = {*environ, *self._environ}
            changes = {name: environ.get(name) for name in names if environ.get(name) != self._environ.get(name)}
            if all(map(_OF_TASK.fullmatch, changes)) and (pid := self._fork(changes, output, stdin)):
                return ForkedProcess(pid)
        return spawn(command, environ, output, stdin)

    def _fork(self, changes: Mapping[str, str | None], output: int, stdin: int) -> int | None:
        """Returns the process id of a new task, which leads its group; None if the spare cannot start it."""
        prctl = ctypes.CDLL(None).prctl
        before = ctypes.c_int()
        prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        self._socket.settimeout(_FORK_SECONDS)
        prctl(_SET_SUBREAPER, 1, 0, 0, 0)  # this process becomes the parent of the task
        try:
            # Without the last, the task has the spare's standard input, which is empty.
            files = [output, output] if stdin == subprocess.DEVNULL else [output, output, stdin]
            socket.send_fds(self._socket, [json.dumps(changes).encode()], files)
            answers = {self._socket.recv(64), self._socket.recv(64)} - {b"forked"}
            return int(answers.pop())
        except (OSError, ValueError, KeyError):  # the spare has been killed, or has no memory for a fork
            self.close()
            return None
        finally:
            prctl(_SET_SUBREAPER, before.value, 0, 0, 0)


class ForkedProcess:
    """A task that the spare has forked. It is a child of this process, as a spawned one is.

    Args:
        pid: The process id.

    Attributes:
        pid: The process id.
        returncode: The exit code, or minus the number of the signal that ended the process; None while it runs.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Updates and returns `returncode`."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Waits for the end of the process, and returns `returncode`."""
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # other code of this process has taken the status
                self.returncode = -signal.SIGKILL
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _is_possible(environ: Mapping[str, str]) -> bool:
    """Returns whether Python would import the spare's program, and no GPU is visible."""
    finds_program = not (sys.flags.isolated or sys.flags.ignore_environment or sys.flags.no_site)
    hides_gpus = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    sees_gpu = not hides_gpus and any(map(glob.glob, _DEVICES))
    return sys.platform == "linux" and finds_program and os.path.isfile(program.__file__) and not sees_gpu


def _plan(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """Returns the folder that a command searches first for modules, and the modules to import; None if its tasks are spawned."""
    words = list(command[2:] if command[1:2] == ["-u"] else command[1:])
    if not words or not _is_this_python(command[0]):
        return None
    if words[0] == "-m" and len(words) > 1:
        folder, text = os.getcwd(), _text_of_module(words[1])
    elif words[0].endswith(".py"):
        folder, text = os.path.dirname(os.path.realpath(words[0])), _text(pathlib.Path(words[0]))
    else:
        return None
    imported = set(re.findall(r"\w+", " ".join(_IMPORT.findall(text))))
    modules = [module for name, module in _MODULES.items() if name in imported]
    return (folder, modules) if modules and not _READ_AT_IMPORT.search(text) else None


def _is_this_python(word: str) -> bool:
    path = os.path.abspath(shutil.which(word) or "")
    # The links of several virtual environments may lead to one file.
    return os.path.dirname(path) == os.path.dirname(sys.executable) and os.path.samefile(path, sys.executable)


def _text_of_module(name: str) -> str:
    if name == "tfdist.train":  # it imports TensorFlow once the configuration has been checked
        return "import tfdist"
    for folder in (os.getcwd(), *sys.path):
        path = pathlib.Path(folder, *name.split("."))
        if text := _text(path.with_name(f"{path.name}.py")) or _text(path / "__main__.py"):
            return text
    return ""


def _text(path: pathlib.Path) -> str:
    """Returns the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace") if path.stat().st_size < _LONGEST_TEXT else ""
    except (OSError, ValueError):
        return ""
