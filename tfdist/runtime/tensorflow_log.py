"""TensorFlow's C++ log: its level, and a filter for lines that do not report an error. Only the standard library here.

TensorFlow logs a dozen lines before it reads `TF_CPP_MIN_LOG_LEVEL`, about GPUs that are absent and instructions of the processor.
The filter is a separate process that runs this file, so that the last lines of a process that TensorFlow aborts are not lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
ERRORS_ONLY = "2"
_LAST_LINES_SECONDS = 2.0  # limit of the wait for the filter's end: processes started meanwhile may keep its pipe open
# absl's form, `W0000 00:00:1795536441.651659    1998 port.cc:153] text`, and TensorFlow's, `2026-01-31 12:00:00.123456: W
# tensorflow/core/x.cc:210] text`. absl's lines from Python code have the first form, with a .py file's name.
CXX_LINE = re.compile(
    rb"(?:(?P<absl>[IWEF])\d{4} [\d:.]+ +\d+ |\d{4}-\d\d-\d\d [\d:.]+: (?P<tsl>[IWEF]) )"
    rb"(?P<place>[\w./-]+\.(?:cc|cpp|cu|h|inc)):\d+\] ?(?P<text>.*)"
)
# Errors and warnings that healthy machines log, too: a library is missing or registered twice.
_HARMLESS = re.compile(
    rb"cuInit|Unable to register cu\w+ factory|computation placer already registered|Cannot dlopen some GPU libraries"
    rb"|Could not find TensorRT|Local rendezvous is aborting with status: OUT_OF_RANGE|exceeds 10% of free system memory",
    re.IGNORECASE,
)
_NOTICE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    rb"|To enable the following instructions: .*, rebuild TensorFlow with the appropriate compiler flags\.$"
)
# TensorFlow's reports of a lost task: before the task reports the loss itself.
_LOST_CONNECTION = re.compile(rb"\b(UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED)\b")
_LOST_WORKER = re.compile(rb"ERROR:tensorflow:Worker /job:worker/replica:\d+/task:\d+ failed with ")
_REMOTE_TASK = re.compile(rb"Additional GRPC error information from remote target |:UNKNOWN:Error received from peer ")
_LISTED_TASK = re.compile(rb"/job:\w+/replica:\d+/task:\d+$")  # C++ messages list tasks, one per line

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
    match = CXX_LINE.match(line)
    if match:
        level = match["absl"] or match["tsl"]
        return level == b"I" or (level != b"F" and bool(_HARMLESS.search(match["text"])))
    if _NOTICE.match(line) or _LOST_WORKER.match(line):
        return True
    return after_log and bool(_LISTED_TASK.match(line) or _REMOTE_TASK.match(line))


def reports_lost_task(line: bytes) -> bool:
    """Returns whether a line of TensorFlow's C++ log reports that another task cannot be reached, or that its collectives are aborted."""
    match = CXX_LINE.match(line)
    return match is not None and bool(_LOST_CONNECTION.search(match["text"]))


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
