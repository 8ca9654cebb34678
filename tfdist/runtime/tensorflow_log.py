"""TensorFlow's C++ log: its level, and a filter for lines that do not report an error. Only the standard library here.

TensorFlow logs a dozen lines before it reads `TF_CPP_MIN_LOG_LEVEL`, about GPUs that are absent and instructions of the processor.
The filter is a separate process that runs this file, so that the last lines of a process that TensorFlow aborts are not lost.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
ERRORS_ONLY = "2"
_LAST_LINES_SECONDS = 2.0  # limit of the wait for the filter's end: processes started meanwhile may keep its pipe open
_SOURCES = (b".cc", b".cpp", b".cu", b".h", b".inc")
# In errors and warnings that healthy machines log, too: a library is missing or registered twice.
_HARMLESS = (
    b"cuInit",
    b"Unable to register cu",
    b"computation placer already registered",
    b"Cannot dlopen some GPU libraries",
    b"Could not find TensorRT",
    b"Local rendezvous is aborting with status: OUT_OF_RANGE",
    b"exceeds 10% of free system memory",
)
_NOTICES = (
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    b"rebuild TensorFlow with the appropriate compiler flags.",
    b"ERROR:tensorflow:Worker /job:worker/replica:",  # a lost worker, before the task reports the loss itself
)
# Lines that may follow: of the task that has sent an error, and of tasks, one per line.
_FURTHER = (
    b"Additional GRPC error information from remote target ",
    b":UNKNOWN:Error received from peer ",
    b"/job:",
)
# TensorFlow's words for a lost task.
_LOST = (b"UNAVAILABLE", b"ABORTED", b"CANCELLED", b"DEADLINE_EXCEEDED")

_is_set_here = False


def set_level() -> None:
    """Makes TensorFlow log only errors, in this process and its children, unless the user has set the level.

    TensorFlow reads the level when it is imported.
    """
    global _is_set_here
    if LEVEL not in os.environ:
        os.environ[LEVEL] = ERRORS_ONLY
        _is_set_here = True


def is_tensorflow_log(line: bytes, after_log: bool = False) -> bool:
    """Returns whether a line certainly belongs to TensorFlow's C++ log and does not report an error. All other lines are shown.

    Args:
        line: The line, without terminal control sequences.
        after_log: Whether the previous line was such a line.
    """
    level, text = _parse(line)
    if level:
        return level == b"I" or (level != b"F" and any(part in text for part in _HARMLESS))
    return any(part in line for part in _NOTICES) or (after_log and line.startswith(_FURTHER))


def _parse(line: bytes) -> tuple[bytes, bytes]:
    """Returns the level and the text of a line of the C++ log; an empty level for other lines.

    The line has absl's form, `W0000 00:00:1795536441.651659    1998 port.cc:153] text`, or TensorFlow's, `2026-01-31 12:00:00.123456: W
    tensorflow/core/x.cc:210] text`. absl's lines from Python code have the first form, with a .py file's name.
    """
    head, _, text = line.partition(b"]")
    words = head.split()
    if len(words) != 4 or not words[3].rpartition(b":")[0].endswith(_SOURCES):
        return b"", b""
    level = words[2] if words[1].endswith(b":") else words[0][:1]
    return (level, text.strip()) if level in (b"I", b"W", b"E", b"F") else (b"", b"")


def reports_lost_task(line: bytes) -> bool:
    """Returns whether a line of TensorFlow's C++ log reports that another task cannot be reached, or that its collectives are aborted."""
    level, text = _parse(line)
    return bool(level) and any(word in text for word in _LOST)


@contextlib.contextmanager
def filtered() -> Iterator[None]:
    """Hides TensorFlow's log lines on stderr, except errors, while the block imports TensorFlow.

    Does nothing if the user has set the level, TensorFlow is already loaded, or the process has no stderr.
    """
    if not _is_set_here or "tensorflow" in sys.modules or sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    try:
        stderr = os.dup(2)
        # In a separate session, so that Ctrl-C does not end it: it ends when this process closes the pipe.
        reader = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=stderr, start_new_session=True
        )
    except OSError:  # stderr is closed, or no process can be started: then the lines are shown
        yield
        return
    assert reader.stdin is not None  # noqa: S101 (for the type checker: it is a pipe)
    os.dup2(reader.stdin.fileno(), 2)
    reader.stdin.close()
    try:
        yield
        tensorflow = sys.modules.get("tensorflow")
        if tensorflow:
            tensorflow.config.list_physical_devices()  # the first call logs which drivers are absent
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        try:
            reader.wait(_LAST_LINES_SECONDS)
        except subprocess.TimeoutExpired:  # its last lines follow later
            pass


def _main() -> None:
    after_log = False
    for line in sys.stdin.buffer:
        after_log = is_tensorflow_log(line.rstrip(b"\n"), after_log)
        if not after_log:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    _main()
