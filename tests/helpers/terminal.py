"""A command in a pseudo-terminal, and what its screen shows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence

_CODE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b.|[\r\n]|[^\x1b\r\n]")


class Screen:
    """What a terminal without reflow shows: knows the codes by which lines are redrawn, and no others.

    Attributes:
        lines: All lines, those that have scrolled out included.
        cursor_is_shown: Whether the cursor is shown.
    """

    def __init__(self, width: int):
        self.width = width
        self.lines = [""]
        self.cursor_is_shown = True
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for code in _CODE.finditer(text):
            self._take(code)

    def _take(self, code: re.Match[str]) -> None:
        if code[2] == "A":
            self._row -= int(code[1] or 1)
            assert self._row >= 0, "the cursor leaves the screen"
        elif code[2] == "K":
            assert code[1] == "2", code[0]
            self.lines[self._row] = ""
        elif code[2] in ("h", "l"):
            assert code[1] == "?25", code[0]
            self.cursor_is_shown = code[2] == "h"
        elif code[0] == "\r":
            self._column = 0
        elif code[0] == "\n":
            self._next_line()
        elif code[2] is None:
            assert code[0][0] != "\x1b", code[0]
            if self._column == self.width:
                self._next_line()
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + code[0] + line[self._column + 1 :]
            self._column += 1
        else:
            assert code[2] == "m", code[0]

    def _next_line(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self.lines):
            self.lines.append("")


class Terminal:
    """Runs a command in a pseudo-terminal.

    Attributes:
        screen: What it shows.
        output: All that has been written to it.
    """

    def __init__(self, command: Sequence[str], folder: pathlib.Path, environ: Mapping[str, str], width: int = 100):
        self.screen, self.output = Screen(width), ""
        # Programs would take these for the terminal's size; GNU readline sets them in a process that has no terminal.
        outer = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.pid, self._file = pty.fork()
        if not self.pid:
            try:
                os.chdir(folder)
                os.execvpe(command[0], list(command), {**outer, "TERM": "xterm", **environ})
            finally:
                os._exit(127)
        self.resize(width)
        self._partial = b""

    def resize(self, width: int) -> None:
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
        self.screen.width = width

    def type(self, text: str) -> None:
        """Types what a user would; ^C as soon as all output was read: the kernel drops what was not, and a frame with it."""
        while select.select([self._file], [], [], 0)[0] and self._read():
            pass
        os.write(self._file, text.encode())

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.lines)

    def until(self, condition: Callable[[], object], seconds: float = 120) -> None:
        """Follows the output until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and self._read(), f"what was waited for did not happen:\n{self.text()}"

    def wait(self, seconds: float = 120) -> int:
        """Follows the output to its end, and returns the exit code."""
        deadline = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < deadline, f"the command does not end:\n{self.text()}"
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return code

    def close(self) -> None:
        if self.pid:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._file)

    def _read(self) -> bool:
        if not select.select([self._file], [], [], 0.1)[0]:
            return True
        try:
            chunk = os.read(self._file, 65536)
        except OSError:  # nobody has it open any more
            return False
        # A code or a character may be cut in two.
        *whole, self._partial = re.split(rb"(?<=[\nmhlAK])|(?=\x1b)", self._partial + chunk)
        if self._partial[:1] not in (b"\x1b", b"") and self._partial[-1] < 128:
            whole, self._partial = [*whole, self._partial], b""
        text = b"".join(whole).decode()
        self.output += text
        self.screen.feed(text)
        return bool(chunk)
