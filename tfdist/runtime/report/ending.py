"""The end of a task in its record, by which the supervisor decides: its kind, its sentence and its exit code. No TensorFlow here.

A process writes it in its last breath. One that is killed, or fails before it imports this package, writes nothing: then the
supervisor has the exit status.
"""

from __future__ import annotations

import enum
import sys

from tfdist.errors import ConfigError, describe_error, truncate, without_keras
from tfdist.runtime import log
from tfdist.runtime.end import hooks, process_end
from tfdist.runtime.report import progress

# Parts of a message that stand before its cause: TensorFlow's, for an error in a graph.
_DETAILS = ("Detected at node ", "<stack traces unavailable>", "Node: ")
# The end of a debugger, or of `input()`, that a person did not answer. Keras and the configuration put their own text around it.
_NO_ANSWER = ("BdbQuit", "EOFError: EOF when reading a line")


class Kind(enum.StrEnum):
    """The kind of a task's end: each kind is one decision of the supervisor."""

    ERROR = "error"
    CONFIG = "config"  # an invalid command line or configuration
    INPUT = "input"  # a debugger, or `input()`, got no answer, or its user ended the debugger
    LOST = "lost"  # it has lost another task
    REFUSED = "refused"  # its backups cannot be used
    PREEMPTED = "preempted"
    MEMORY = "memory"
    KILLED = "killed"


def listen() -> None:
    """Makes this process write its end to its record. A process that the warm spare has forked calls it again."""
    process_end.note_end = _write
    hooks.at_end(hooks.Stage.REPORT, lambda: _write(process_end.expected_exit_code()))


def _write(exit_code: int) -> None:
    if not exit_code:
        return
    error = getattr(sys, "last_value", None)  # Python sets it, also where another `sys.excepthook` prints the error
    sentence = one_line(error) if error else truncate(log.last_error.rstrip("."))
    progress.write(exit_code=exit_code, kind=_kind(exit_code, error, sentence), error=sentence)


def _kind(exit_code: int, error: BaseException | None, sentence: str) -> Kind:
    if exit_code == process_end.PREEMPTED:
        return Kind.PREEMPTED
    if any(text in sentence for text in _NO_ANSWER):
        return Kind.INPUT
    if exit_code == process_end.FAULTY_CONFIG or isinstance(error, ConfigError):
        return Kind.CONFIG
    # The second one is TensorFlow's.
    if isinstance(error, MemoryError) or type(error).__name__ == "ResourceExhaustedError":
        return Kind.MEMORY
    return Kind.LOST if progress.has_lost() else Kind.ERROR


def one_line(error: BaseException) -> str:
    """Returns the type of an error and the line of its message that names the cause.

    Keras raises another error if a debugger in a layer got no answer; then the line is that of the debugger.
    """
    first: BaseException | None = error
    while first and not any(text in describe_error(first) for text in _NO_ANSWER):
        first = first.__cause__ or first.__context__
    name, colon, message = describe_error(first or error).partition(": ")
    heading, *others = without_keras(message).strip().split("\n")
    if heading.endswith(":") or heading.startswith("Exception encountered when calling "):
        heading = next(filter(_names_cause, others), heading)
    return truncate(f"{name}{colon}{heading}".rstrip(".:;, "))


def _names_cause(line: str) -> bool:
    is_heading = line.endswith(":") or " root error" in line or line.startswith(_DETAILS)
    return bool(line) and not line[0].isspace() and not is_heading
