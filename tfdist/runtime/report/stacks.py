"""The stacks of this process's threads, on a signal, and the line of the user's program that runs. No TensorFlow here.

A signal's C handler writes the stacks to a file, also while the main thread waits in a C++ collective, where Python's own handlers
do not run. `tfdist stacks` finds the file and sends the signal.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pathlib
import re
import signal
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

import psutil

from tfdist.runtime.end import hooks, process_end
from tfdist.runtime.files import open_own, open_regular, read_file

FOLDER = "TFDIST_LOGS"  # the environment variable with the folder of the tasks' logs
SUFFIX = ".stacks"
SIGNAL = signal.SIGUSR2
_FATAL = "Fatal Python error: "  # faulthandler's line before the stacks of a fatal signal

_LIBRARY = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")
_GENERATED = "autograph_generated_file"
_INTERACTIVE = ("<stdin>", "<string>", "<ipython-input")
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+")
# The calling thread, unless it is the main thread.
_CURRENT = re.compile(r"^Current thread 0x.*\n(?:  .*\n)*(?!\Z)", re.MULTILINE)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
default_folder = ""  # used without that variable; `tfdist train` sets it to its folder of logs
_file = -1  # the descriptor of this process's file; it stays open
_path = pathlib.Path()  # this process's file
_task = ""


def folder() -> str | None:
    """Returns the folder of the tasks' logs, or None if there is none."""
    return os.environ.get(FOLDER) or default_folder or None


def listen(task: str) -> None:
    """Makes this process write its stacks to `<task>.stacks` in the log folder at SIGUSR2 and at a fatal signal; does nothing without a folder.

    Returns without an effect if the program handles the signal itself, if the file cannot be written, or if a running process of the same
    task has it. `task` is the name in files, as `worker-1`.
    """
    global _file, _path, _task
    _task = task
    place = folder()
    if place is None or _file >= 0 or signal.getsignal(SIGNAL) != signal.SIG_DFL:
        return
    path = pathlib.Path(place, f"{task}{SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _belongs_to_another(path):
            return
        descriptor = open_own(path, os.O_RDWR | os.O_TRUNC)
        header = Header(task.replace("-", ":", 1), os.getpid(), socket.gethostname(), psutil.Process().create_time())
        os.write(descriptor, f"{json.dumps(header._asdict())}\n".encode())
        _file = descriptor
        _path = path
        hooks.at_end(hooks.Stage.FILES, remove_file)
        faulthandler.register(SIGNAL, file=_file, all_threads=True)
        if not faulthandler.is_enabled():  # else the user wants them elsewhere
            faulthandler.enable(_file)
    except OSError:  # a task trains without a file of stacks, too
        pass


def _belongs_to_another(path: pathlib.Path) -> bool:
    try:
        with open_regular(path) as file:
            known = Header.read(file)
        return known is not None and known.is_running() and known.pid != os.getpid()
    except (OSError, ValueError):  # there is no file, or its number is no process's
        return False


def remove_file() -> None:
    """Removes this process's file, if there is one, unless this process fails."""
    if _file >= 0 and not process_end.expected_exit_code():
        try:
            _path.unlink()
        except OSError:  # the user has removed it, or the disk is gone
            pass


def dump(reason: str) -> None:
    """Writes the stacks of all threads to the task's log in one piece, below a heading with the reason; without a launcher, to standard error."""
    name = _task.replace("-", ":", 1) or "this process"
    try:
        with tempfile.TemporaryFile() as file:
            file.write(f"tfdist: the stacks of {name}: {reason}\n".encode())
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            content = file.read()
        (sys.stderr or sys.__stdout__).flush()  # type: ignore[union-attr]
        log = os.path.join(os.environ.get(FOLDER, ""), f"{_task}.log")
        # On a Ray node there is no log: the launcher's machine has it.
        os.write(open_own(log, os.O_WRONLY | os.O_APPEND) if os.path.isfile(log) else 2, content)
    except (OSError, ValueError, RuntimeError):  # the caller reports an error that matters more
        pass


def fatal_place(path: pathlib.Path) -> str:
    """Returns the line of the user's program at which a fatal signal has ended a task; empty if it has left no stacks in its file."""
    try:
        _, is_fatal, text = read_file(path).decode(errors="replace").rpartition(_FATAL)
    except OSError:
        return ""
    *others, main = parse(text) or [[]]
    return place(main, others) if is_fatal else ""


class Header(NamedTuple):
    """The first line of a file of stacks: the process that writes to it.

    Attributes:
        task: The task's name, as `worker:1`.
        pid: The process.
        host: The name of its host.
        started: The start time of the process, in seconds since the epoch.
    """

    task: str
    pid: int
    host: str
    started: float

    @classmethod
    def read(cls, file: BinaryIO) -> Header | None:
        """Returns the header of a file, or None if it has none. Raises OSError if the file cannot be read."""
        try:
            fields = json.loads(file.readline(4096))
            return cls(str(fields["task"]), int(fields["pid"]), str(fields["host"]), float(fields["started"]))
        except (ValueError, TypeError, KeyError, OverflowError):
            return None

    def is_running(self) -> bool:
        """Returns whether the process runs on this host; another process may have its number by now."""
        try:
            is_here = self.host == socket.gethostname()
            return is_here and abs(psutil.Process(self.pid).create_time() - self.started) < 2
        except psutil.Error:
            return False

    def is_ours(self, file: BinaryIO) -> bool:
        """Returns whether the process belongs to the user who owns its file: another user could have written the number of any process."""
        try:
            return psutil.Process(self.pid).uids().real == os.fstat(file.fileno()).st_uid
        except (psutil.Error, OSError):
            return False

    def ask(self) -> bool:
        """Sends the signal; returns whether it was sent. A process that does not catch the signal would end, so it gets none."""
        if not _catches(self.pid):
            return False
        try:
            os.kill(self.pid, SIGNAL)
        except OSError:  # it has ended, or belongs to another user
            return False
        return True


def _catches(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
            fields = dict(line.split(":", 1) for line in lines)
    except OSError:  # it has ended, or this system has no /proc
        return False
    return bool(int(fields["SigCgt"], 16) >> (SIGNAL - 1) & 1)


class Frame(NamedTuple):
    """A frame of a stack: its file, line and function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        name = self.file
        try:
            relative = os.path.relpath(name)
        except (OSError, ValueError):  # the current folder has been removed
            relative = name
        if not relative.startswith("..") and not name.startswith("<"):
            name = relative
        return f"{name}:{self.line} in {self.function}"

    @property
    def is_of_package(self) -> bool:
        """Returns whether it is code of tfdist."""
        return self.file.startswith(process_end.PACKAGE)

    @property
    def is_installed(self) -> bool:
        """Returns whether it is code of tfdist or of an installed library."""
        return self.is_of_package or any(part in self.file for part in _INSTALLED)

    @property
    def is_users(self) -> bool:
        """Returns whether it is the user's code: not tfdist, the standard library, or an installed library."""
        if self.file.startswith("<"):
            return self.file.startswith(_INTERACTIVE)
        return not (self.is_installed or self.file.startswith(_LIBRARY) or _GENERATED in self.file)


Stack = Sequence[Frame]  # from the innermost frame out


def place(main: Stack, others: Sequence[Stack]) -> str:
    """Returns the line where the user's program is, as `script.py:42 in load_batch`; empty if no thread is in the user's code.

    Prefers a thread in the user's code to one that waits in tfdist: the main thread, then one that a library has called (a
    data function), then another one whose innermost frame is the user's.
    """
    if is_in_user_code(main):
        return _users_line(main)
    return data_place(others) or _users_line(main)


def data_place(stacks: Sequence[Stack]) -> str:
    """Returns the line of the user's code that a thread other than the main one runs, such as a data function; or an empty text."""
    own = [stack for stack in stacks if stack and stack[0].is_users]
    return called_place(stacks) or _users_line(next(iter(own), []))


def called_place(stacks: Sequence[Stack]) -> str:
    """Returns the line of the user's code that a library has called in one of these threads, as TensorFlow calls a data function; or an empty text."""
    called = [
        stack for stack in stacks if is_in_user_code(stack) and any(frame.is_installed for frame in _around(stack))
    ]
    return _users_line(next(iter(called), []))


def is_in_user_code(stack: Stack) -> bool:
    """Returns whether a stack is in the user's code, without a frame of tfdist further in."""
    return any(frame.is_users for frame in _innermost(stack))


def _innermost(stack: Stack) -> Stack:
    """Returns the innermost frame of the user or of tfdist, alone; empty without one."""
    return [frame for frame in stack if frame.is_users or frame.is_of_package][:1]


def parse(text: str) -> list[Stack]:
    """Returns the stacks of a text that `faulthandler` has written; the main thread's is the last."""
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            stacks.append([])
        elif stacks and (match := _FRAME.match(line)):
            stacks[-1].append(Frame(match[1], int(match[2]), match[3]))
    return list(stacks)


def _around(stack: Stack) -> Stack:
    first = next((number for number, frame in enumerate(stack) if frame.is_users), len(stack))
    return stack[first + 1 :]


def own_stacks() -> tuple[Stack, list[Stack]]:
    """Returns the stack of this process's main thread, and those of the other threads without the calling one."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    current = [stack for stack in parse(_CURRENT.sub("", text)) if stack]
    *others, main = current or [[]]
    return main, others


def _users_line(stack: Stack) -> str:
    return str(next((frame for frame in stack if frame.is_users), ""))
