"""The stacks of this process's threads: on request by a signal or a file, and the line of the user's program that runs. No TensorFlow here.

A signal's C handler writes the stacks to a file, also while the main thread waits in a C++ collective, where Python's own handlers
do not run. `tfdist stacks` finds the file and sends the signal; a task on another host finds a request in the folder.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pathlib
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import types
from collections.abc import Iterator, Sequence

import psutil

from tfdist.runtime.files import open_own

FOLDER = "TFDIST_LOGS"  # the environment variable with the folder of the tasks' logs
SUFFIX = ".stacks"
REQUEST = "stacks.request"  # the file by which `tfdist stacks` asks tasks of other hosts; its content changes with each request
SIGNAL = signal.SIGUSR2
HEADING = "tfdist: the stacks of "  # the start of the line above stacks in a log

_PACKAGE = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}{os.sep}"
_LIBRARY = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")
_GENERATED = "__autograph_generated_file"
_EVALUATION = (("trainer.py", "evaluate"), ("trainer.py", "predict"), ("loop.py", "evaluate"), ("loop.py", "predict"))
_SAVING = tuple(
    f"{_PACKAGE}{path}" for path in (f"backup{os.sep}", f"training{os.sep}saving", f"strategies{os.sep}saving")
)
_BUILDING = f"{_PACKAGE}step{os.sep}model_building"
_TRACING = f"{os.sep}tensorflow{os.sep}python{os.sep}framework{os.sep}func_graph.py"
_SAVING_LIBRARIES = (f"{os.sep}keras{os.sep}src{os.sep}saving{os.sep}", "checkpoint_management", "saved_model")

default_folder = ""  # the folder without that variable: of `tfdist train`, which knows its work directory
_file = -1  # the descriptor of this process's file; it stays open
_name = ""
_answered = ""  # the last request that this process has answered


def folder() -> str | None:
    """Returns the folder of the tasks' logs, or None if there is none."""
    return os.environ.get(FOLDER) or default_folder or None


def listen(task: str) -> None:
    """Makes this process write its stacks to `<task>.stacks` in the log folder when it gets SIGUSR2; does nothing without a folder.

    A program's own handler of the signal stays; the process then only answers requests by a file. Returns without an effect if the file
    cannot be written, or if a running process of the same task has it.

    Args:
        task: The task's name in files, as `worker-1`.
    """
    global _file, _name
    _name = task.replace("-", ":", 1)
    if not (place := folder()) or _file >= 0:
        return
    path = pathlib.Path(place, f"{task}{SUFFIX}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, ValueError):
            if (known := Header.read(path)) and known.is_running() and known.pid != os.getpid():
                return
        descriptor = open_own(path, os.O_RDWR | os.O_TRUNC | os.O_APPEND)
        own = signal.getsignal(SIGNAL) != signal.SIG_DFL
        fields = {"task": _name, "pid": os.getpid(), "host": socket.gethostname(), "signal": not own}
        header = {**fields, "started": psutil.Process().create_time()}
        os.write(descriptor, f"{json.dumps(header)}\n".encode())
        _file = descriptor
        if not own:
            faulthandler.register(SIGNAL, file=_file, all_threads=True)


def answer_request() -> None:
    """Writes the stacks to this process's file if `tfdist stacks` asks for them by a file; call it each second."""
    global _answered
    if _file < 0 or not (place := folder()):
        return
    with contextlib.suppress(OSError):
        request = pathlib.Path(place, REQUEST).read_text(encoding="utf-8")
        if request != _answered:
            _answered = request
            faulthandler.dump_traceback(file=_file, all_threads=True)


def dump(reason: str) -> None:
    """Writes the stacks of all threads to standard error, which is the task's log, in one piece.

    Args:
        reason: Why, for the heading.
    """
    with contextlib.suppress(OSError, ValueError, RuntimeError), tempfile.TemporaryFile() as file:
        file.write(f"{HEADING}{_name or 'this process'}: {reason}\n".encode())
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        content = file.read()
        (sys.stderr or sys.__stdout__).flush()  # type: ignore[union-attr]
        os.write(2, content)


class Header:
    """The first line of a file of stacks: the process that writes to it.

    Attributes:
        task: The task's name, as `worker:1`.
        pid: The process.
        host: The name of its host.
        signal: Whether it answers the signal.
        started: The start time of the process, in seconds since the epoch.
    """

    def __init__(self, task: str, pid: int, host: str, signal: bool, started: float):
        self.task, self.pid, self.host, self.signal, self.started = (
            str(task),
            int(pid),
            str(host),
            bool(signal),
            started,
        )

    @classmethod
    def read(cls, path: pathlib.Path) -> Header | None:
        """Returns the header of a file, or None if it has none. Raises OSError if the file cannot be read."""
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            line = file.readline(4096)
        try:
            fields = json.loads(line)
            return cls(**fields)
        except (ValueError, TypeError):
            return None

    @property
    def is_here(self) -> bool:
        """Returns whether the process runs, or ran, on this host."""
        return self.host == socket.gethostname()

    def is_running(self) -> bool:
        """Returns whether the process runs on this host; another process may have its number by now."""
        with contextlib.suppress(psutil.Error):
            return self.is_here and abs(psutil.Process(self.pid).create_time() - self.started) < 2
        return False

    def is_stopped(self) -> bool:
        """Returns whether the process is stopped, as by SIGSTOP."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False

    def ask(self) -> bool:
        """Sends the signal; returns whether it was sent. A process that does not catch it would end, and gets none."""
        if not (self.signal and self.is_running() and _catches(self.pid)):
            return False
        with contextlib.suppress(OSError):
            os.kill(self.pid, SIGNAL)
            return True
        return False


def _catches(pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
            mask = next(line for line in lines if line.startswith("SigCgt:")).split()[1]
        return bool(int(mask, 16) >> (SIGNAL - 1) & 1)
    return False


def place() -> str:
    """Returns the line where the user's program is, as `script.py:42 in load_batch`; empty without a line of the user's.

    Prefers a thread in the user's code to one that waits in tfdist: the main thread, then one that a library has called (a
    data function), then another one whose innermost frame is the user's.
    """
    main = threading.main_thread().ident
    frames = {ident: [*_walk(frame)] for ident, frame in sys._current_frames().items()}
    stack = frames.pop(main, []) if main is not None else []
    frames.pop(threading.get_ident(), None)
    if is_in_user_code(stack):
        return _describe(stack)
    return data_place(list(frames.values())) or _describe(stack)


def data_place(stacks: Sequence[Sequence[types.FrameType]] | None = None) -> str:
    """Returns the line of the user's code that a thread other than the main one runs, such as a data function; or an empty text."""
    if stacks is None:
        skipped = (threading.main_thread().ident, threading.get_ident())
        stacks = [[*_walk(frame)] for ident, frame in sys._current_frames().items() if ident not in skipped]
    called = [stack for stack in stacks if is_in_user_code(stack) and any(map(_is_installed, _outside_user(stack)))]
    own = [stack for stack in stacks if stack and _is_user(stack[0])]
    return _describe((called or own or [[]])[0])


def main_stack() -> list[types.FrameType]:
    """Returns the frames of the main thread, from the innermost out."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [*_walk(frame)] if frame else []


def activity() -> str:
    """Returns what the main thread does outside of steps: `"building"`, `"saving"`, `"evaluating"`, or `"user"` for anything else."""
    stack = main_stack()
    names = [frame.f_code.co_filename for frame in stack]
    if any(name.startswith(_SAVING) or any(part in name for part in _SAVING_LIBRARIES) for name in names):
        return "saving"
    if any(name.startswith(_BUILDING) or name.endswith(_TRACING) for name in names):
        return "building"
    for frame in stack:
        name = frame.f_code.co_filename
        if (os.path.basename(name), frame.f_code.co_name) in _EVALUATION and not _is_user(frame):
            return "evaluating"
    return "user"


def is_in_user_code(stack: Sequence[types.FrameType]) -> bool:
    """Returns whether a stack, innermost first, is in user code: no frame of tfdist lies further in."""
    for frame in stack:
        if _is_user(frame):
            return True
        if frame.f_code.co_filename.startswith(_PACKAGE):
            return False
    return False


def _outside_user(stack: Sequence[types.FrameType]) -> Sequence[types.FrameType]:
    first = next((number for number, frame in enumerate(stack) if _is_user(frame)), len(stack))
    return stack[first + 1 :]


def _walk(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_installed(frame: types.FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_PACKAGE) or any(part in name for part in _INSTALLED)


def _is_user(frame: types.FrameType) -> bool:
    name = frame.f_code.co_filename
    if name.startswith("<"):  # <frozen runpy>, or `python -c`
        return frame.f_globals.get("__name__") == "__main__" and not name.startswith("<frozen")
    return not (_is_installed(frame) or name.startswith(_LIBRARY) or _GENERATED in name)


def _describe(stack: Sequence[types.FrameType]) -> str:
    frame = next(filter(_is_user, stack), None)
    if frame is None:
        return ""
    name = frame.f_code.co_filename
    with contextlib.suppress(OSError, ValueError):
        relative = os.path.relpath(name)
        name = name if relative.startswith("..") or name.startswith("<") else relative
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
