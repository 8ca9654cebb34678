"""The errors that tfdist raises, and the wording of their messages. No TensorFlow here.

Every message names the argument, the value received, the value expected and the remedy.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_MOST = 200  # characters of a value in a message
shown_paths: dict[str, str] = {}  # what messages show for a local folder that stands for a URL
# Keras makes an error of a layer's `call` again, of the same type, with other text around its message.
_KERAS_FRAMES = (
    re.compile(r"Exception encountered when calling .*?\x1b\[1m(.*)\x1b\[0m\n\nArguments received by ", re.DOTALL),
    re.compile(r"Could not automatically infer the output shape .*? Error encountered:\n\n(.*)", re.DOTALL),
)
_LONG_WORD = re.compile(rf"\S{{{_MOST + 50},}}")  # longer than a truncated value with the text around it


class ConfigError(ValueError):
    """The configuration is invalid; the error contains every problem, not only the first.

    Args:
        faults: One sentence per problem; at least one.

    Attributes:
        faults: The sentences, as a tuple; each is one printable line.

    Examples:
        >>> import tfdist
        >>> tfdist.create_strategy("mirrord")
        Traceback (most recent call last):
        tfdist.errors.ConfigError: unknown strategy 'mirrord'; did you mean 'mirrored'? Known: ...
    """

    def __init__(self, faults: str | Iterable[str]):
        if isinstance(faults, str):
            own = without_keras(faults)
            faults = [faults] if own == faults else own.split("\n")
        sentences = list(faults) or ["internal error: a ConfigError was raised without a message."]
        self.faults: tuple[str, ...] = tuple(map(printable, sentences))
        super().__init__("\n".join(self.faults))


class _OneLineError(RuntimeError):
    def __init__(self, message: object = ""):
        super().__init__(printable(without_keras(str(message))))


class ClusterError(_OneLineError):
    """The running cluster is not as configured: a task is missing, lost or different.

    Examples:
        >>> import tfdist
        >>> tfdist.ClusterError("worker:1 at host1:2222 has ended")
        ClusterError('worker:1 at host1:2222 has ended')
    """


class BackupError(_OneLineError):
    """A backup could not be written, or no existing backup can be read.

    Examples:
        >>> import tfdist
        >>> tfdist.BackupError("the backup is damaged")
        BackupError('the backup is damaged')
    """


class DataError(_OneLineError):
    """Training data cannot be read, or differ between the workers; the message names the worker, the file and the position.

    Args:
        message: The message.
        is_agreed: Whether all workers have raised this error at the same step.

    Examples:
        >>> import tfdist
        >>> tfdist.DataError("The data of worker:1 cannot be read: item 7 of Images: OSError: no such file")
        DataError('The data of worker:1 cannot be read: item 7 of Images: OSError: no such file')
    """

    def __init__(self, message: object = "", is_agreed: bool = False):
        super().__init__(message)
        self.is_agreed = is_agreed


def without_keras(text: str) -> str:
    """Returns the message of an error around which Keras has put the call of a layer; another text as it is."""
    for frame in _KERAS_FRAMES:
        match = frame.match(text)
        text = match[1] if match else text
    return text


def printable(text: str) -> str:
    """Returns a text as one line that is safe in a terminal: control characters are escaped, and long words truncated to 200 characters.

    A message may show foreign text: another program's greeting, a path, a variable.
    """
    for folder, url in shown_paths.items():
        text = text.replace(folder, url)
    line = "".join(map(_printable_character, text))
    return _LONG_WORD.sub(lambda word: word[0][: _MOST - 3] + "...", line)


def _printable_character(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def printable_lines(text: object) -> str:
    """Applies `printable` to each line of a text."""
    return "\n".join(map(printable, str(text).split("\n")))


def encodable(text: str) -> str:
    """Returns a text with escapes for the characters that standard output cannot encode."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # standard output may be closed
    return text.encode(encoding, "backslashreplace").decode(encoding)


def describe_error(error: BaseException) -> str:
    """Returns the type and the message of an error."""
    name = type(error).__name__
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception:  # the user's own __str__
        return name
    return f"{name}: {text}" if text else name


def format_value(value: Any) -> str:
    """Returns the value's repr, truncated to the length of a sentence."""
    try:
        return truncate(repr(value))
    except Exception:  # the user's own __repr__, or an int with too many digits
        return f"a value of type {type(value).__name__}"


def truncate(text: str) -> str:
    """Applies `printable` to a text, and truncates it to the length of a sentence."""
    line = printable(text)
    if len(line) <= _MOST:
        return line
    return line[: _MOST - 3] + "..."


def list_first(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Returns the first texts of a list, and the number of further texts: `"a, b and 3 more"`."""
    joined = separator.join(texts[:most])
    if len(texts) > most:
        joined += f" and {len(texts) - most} more"
    return joined


def difference_message(name: str, values: Mapping[str, str]) -> str:
    """Returns the message about a value that must be the same on all tasks; `values` are those of some tasks, by the task's name."""
    received = [f"{value or 'nothing'} on {task}" for task, value in values.items()]
    return f"{name} must be the same on all tasks. Received: {list_first(received, 8)}."


def unknown_name_message(what: str, received: str, known: Iterable[str]) -> str:
    """Returns the message for a name that is not in a list of known names."""
    known = sorted(known)
    return f"unknown {what} {format_value(received)}{did_you_mean(received, known)} Known: {', '.join(known)}."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the known word nearest to `word`, or a full stop."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    if not near:
        return "."
    return f"; did you mean {near[0]!r}?"


@contextlib.contextmanager
def collect_errors(faults: list[str]) -> Iterator[None]:
    """Appends the messages of a `ConfigError` that is raised within the context to `faults`, so that later checks still run."""
    try:
        yield
    except ConfigError as e:
        faults += e.faults


def stop_iteration_error(where: str, error: StopIteration) -> RuntimeError:
    """Returns the error to raise instead of StopIteration, which Keras' loops would interpret as the end of the data.

    Args:
        where: The function that raised StopIteration.
        error: The StopIteration. The message contains its line, because Keras drops the causes of errors.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return RuntimeError(
        f"{where} raised StopIteration ({os.path.basename(frame.filename)}:{frame.lineno}), which would end the epoch as if the data had ended. Does it call next() without a "
        "default? To end the training, set model.stop_training = True."
    )
