"""Checks before a strategy is created: the versions are tested, and TensorFlow has not started yet."""

from __future__ import annotations

import ast
import functools
import os
import pathlib
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator

import keras
import tensorflow as tf

from tfdist.compat import keras_distribution
from tfdist.config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.version import __version__

# Calls into TensorFlow or Keras that do not start it.
_HARMLESS = {"config", "get_logger", "set_random_seed", "set_seed", "experimental"}
_SHOWN_CALLERS = 3
_NESTED_CALLS = 3  # functions of a file that call each other are followed so far
_LIBRARIES = f"{os.sep}site-packages{os.sep}"
# [first, end) of the tested versions, as in pyproject.toml. tools/versions.py runs the tests with the oldest, the newest and the next version.
TESTED_VERSIONS = {"tensorflow": ("2.18", "2.23"), "keras": ("3.13", "3.17")}


@functools.cache
def check_versions() -> None:
    """Warns once if the version of TensorFlow or Keras is untested: tfdist uses private names of both."""
    installed = {"tensorflow": tf.__version__, "keras": keras.__version__}
    untested = [name for name, version in installed.items() if not _is_tested(name, version)]
    if untested:
        ranges = " and ".join(f"{name} >={first},<{end}" for name, (first, end) in TESTED_VERSIONS.items())
        received = " and ".join(f"{name} {installed[name]}" for name in untested)
        warnings.warn(
            f"tfdist {__version__} is tested with {ranges}. Found: {received}; its corrections of Keras may no longer apply.",
            stacklevel=2,
        )


def _is_tested(name: str, version: str) -> bool:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(".")[:2])

    first, end = TESTED_VERSIONS[name]
    return numbers(first) <= numbers(version) < numbers(end)


def check_devices(config: StrategyConfig) -> None:
    """Raises ConfigError for a device that this process does not have: TensorFlow would use the CPU without a warning. Does not start TensorFlow."""
    present = keras_distribution.present_devices()
    for name in config.device_names:
        short = name.upper().rpartition("DEVICE:")[2].lstrip("/")
        if ":" not in short:
            short = f"{short}:0"
        if not name.startswith("/job:") and short not in present:
            raise ConfigError(
                f"strategy.devices names {name}, which is not there. This process has {', '.join(present)}."
            )


def already_started_error(what: str) -> ConfigError:
    """Returns the error for a strategy that is created after TensorFlow has started; `what`, which cannot be created, begins its message."""
    package = str(pathlib.Path(__file__).parents[1])
    stack = [frame for frame in traceback.extract_stack() if not frame.filename.startswith((package, "<"))]
    message = (
        f"{what} after TensorFlow has started. Create the strategy (or the tfdist.Trainer) first, before any tensor, "
        "variable, model or dataset"
    )
    if not stack:
        return ConfigError(f"{message}.")
    call, first = _call_to_move(stack)
    message = f"{call.filename}:{call.lineno}: {message}: move this call up"
    if first:
        line, code = first
        return ConfigError(f"{message}, before line {line}: {code}")
    return ConfigError(
        f"{message}, to right after the imports. No call in this file has started TensorFlow{_called_from(stack)}."
    )


def _call_to_move(
    stack: list[traceback.FrameSummary],
) -> tuple[traceback.FrameSummary, tuple[int, str] | None]:
    """Returns the call that must move, and the line that it must precede, or None if that is unknown.

    If a function of another module creates the strategy, the line of its caller must move.
    """
    for frame in reversed(stack):
        if _LIBRARIES not in frame.filename:
            for first in _lines_that_start_tensorflow(frame):
                return frame, first
    return stack[-1], None


def _called_from(stack: list[traceback.FrameSummary]) -> str:
    """Returns the end of a sentence: the lines in the user's other files that led to the last frame."""
    frames = [frame for frame in stack[-2::-1] if frame.filename != stack[-1].filename]
    callers = [f"{frame.filename}:{frame.lineno}" for frame in frames if _LIBRARIES not in frame.filename]
    if not callers:
        return ""
    return f" (the file is called from {', '.join(callers[:_SHOWN_CALLERS])})"


def _lines_that_start_tensorflow(frame: traceback.FrameSummary) -> Iterator[tuple[int, str]]:
    """Yields the lines that call TensorFlow or Keras above a frame's line in its file."""
    try:
        source = pathlib.Path(frame.filename).read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError):
        return
    lines = source.splitlines()
    # The names by which the file calls TensorFlow and Keras.
    roots = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] in ("tensorflow", "keras", "tf_keras")
    }
    # The bodies of functions and classes run only when they are called: a call of one that starts TensorFlow does so, too.
    statements = list(tree.body)
    definitions = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if node.name == frame.name and node.lineno <= (frame.lineno or 0):
                statements += node.body
            else:
                definitions[node.name] = node
    for _ in range(_NESTED_CALLS):
        roots |= {name for name, node in definitions.items() if _calls([node], roots)}
    statements = [node for node in statements if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for line in sorted(_calls(statements, roots)):
        if line < (frame.lineno or sys.maxsize):
            yield line, lines[line - 1].strip()


def _calls(nodes: Iterable[ast.AST], roots: set[str]) -> list[int]:
    """Returns the lines of calls of `roots` that start TensorFlow."""
    found: list[int] = []
    for node in nodes:
        for call in ast.walk(node):
            if isinstance(call, ast.Call):
                root, *names = re.findall(r"\w+", ast.unparse(call.func)) or [""]
                if root in roots and not _HARMLESS.intersection(names):
                    found.append(call.lineno)
    return found
