"""What a line of a task is: TensorFlow's C++ log, a warning, or anything else, which is always shown. No TensorFlow here."""

from __future__ import annotations

import linecache
import re

# absl's form, `W0000 00:00:1795536441.651659    1998 port.cc:153] text`, and TensorFlow's, `2026-01-31 12:00:00.123456: W
# tensorflow/core/x.cc:210] text`. absl's lines of Python code look like the former, but for the file's name.
_CXX = re.compile(
    rb"(?:(?P<absl>[IWEF])\d{4} [\d:.]+ +\d+ |\d{4}-\d\d-\d\d [\d:.]+: (?P<tsl>[IWEF]) )"
    rb"(?P<place>[\w./-]+\.(?:cc|cpp|cu|h|inc)):\d+\] ?(?P<text>.*)"
)
# Errors and warnings about what is not there or is done twice, on healthy machines too.
_HARMLESS = re.compile(
    rb"cuInit|Unable to register cu\w+ factory|computation placer already registered|Cannot dlopen some GPU libraries"
    rb"|Could not find TensorRT|Local rendezvous is aborting with status: OUT_OF_RANGE|exceeds 10% of free system memory",
    re.IGNORECASE,
)
_OTHER_CHATTER = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    rb"|To enable the following instructions: .*, rebuild TensorFlow with the appropriate compiler flags\.$"
)
_LISTED_TASK = re.compile(rb"/job:\w+/replica:\d+/task:\d+$")  # C++ messages list tasks, one in each line
_PYTHON_WARNING = re.compile(rb"(?P<file>.+?):(?P<line>\d+): (?:\w+\.)*\w*Warning: ")
_LOGGED_WARNING = re.compile(rb"WARNING:[\w.]+:|W\d{4} [\d:.]+ +\d+ \S+\.py:\d+\] (?P<text>.*)")
# Colours, movements of the cursor, titles, and control characters but for the tabulator.
_ESCAPES = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]|[\x00-\x08\x0a-\x1f\x7f]"
)
# Keras' progress bar, which is a line of its own for each step where there is no terminal.
_BAR = re.compile(rb"\x1b\[1m\s*(\d+)/(\d+|Unknown)\x1b\[0m ")


def to_plain(line: bytes) -> bytes:
    """Returns what a terminal would show of a line in the end, without escape codes: nothing of a bar that goes on."""
    line = next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")
    bar = _BAR.match(line)
    return b"" if bar and bar[1] != bar[2] else _ESCAPES.sub(b"", line)


def is_chatter(line: bytes, after_chatter: bool = False) -> bool:
    """Returns whether a line is surely TensorFlow's C++ log, and tells nothing of a fault.

    Args:
        line: The line, plain.
        after_chatter: Whether the line before it was such a one.
    """
    if found := _CXX.match(line):
        level = found["absl"] or found["tsl"]
        return level == b"I" or (level != b"F" and bool(_HARMLESS.search(found["text"])))
    return bool(_OTHER_CHATTER.match(line) or (after_chatter and _LISTED_TASK.match(line)))


def warning_text(line: bytes) -> bytes | None:
    """Returns what repetitions of a warning have in common, without its time; None if the line is no warning.

    Warnings are Python's, those that `logging` and absl print in their default forms, and those of TensorFlow's C++ log.
    """
    if found := _CXX.match(line):
        if (found["absl"] or found["tsl"]) != b"W":
            return None
        return found["place"] + re.sub(rb"\d+", b"0", found["text"])  # addresses, sizes
    if found := _LOGGED_WARNING.match(line):
        return found["text"] or line
    return line if _PYTHON_WARNING.match(line) else None


def is_source_of(warning: bytes, line: bytes) -> bool:
    """Returns whether a line is the line of code that Python prints below a warning."""
    found = _PYTHON_WARNING.match(warning)
    if not found or not line.startswith(b"  "):
        return False
    code = linecache.getline(found["file"].decode(errors="replace"), int(found["line"])).strip()
    return bool(code) and code.encode() == line.strip()
