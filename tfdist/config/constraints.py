"""Constraints of fields: each field of a dataclass states in its default what values it accepts. No TensorFlow here.

`epochs: int = option(1, *at_least(1))` is a field, `precision: str = choice("float32", "mixed_bfloat16")` another.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.errors import collect_errors, format_value, unknown_name_message

MOST_STEPS = 2**31 - 1  # Keras counts steps in 32 bits
MOST_SECONDS = 10**9  # 31 years; the operating system's timers accept little more
MOST_TASKS = 10_000  # more are a mistake

Constraint = tuple[str, Callable[[Any], bool]]  # the requirement, for messages, and the function that checks it
_KINDS = {kind.__name__: kind for kind in (bool, int, float, str)}


def option(default: Any, expected: str = "", holds: Callable[[Any], bool] = lambda value: True) -> Any:
    """Returns a field of a dataclass whose type and value are checked when a configuration is checked or a compressor is created.

    Args:
        default: The default.
        expected: The requirement, for messages: `"more than 0"`.
        holds: Returns whether a value of the field's type meets the requirement.

    Examples:
        >>> import dataclasses
        >>> from tfdist.compression import BF16, option
        >>> @dataclasses.dataclass(frozen=True)
        ... class Scaled(BF16):
        ...     scale: float = option(1.0, "more than 0", lambda value: value > 0)
        >>> Scaled(scale=2.0).scale
        2.0
    """

    def faults(where: str, value: Any) -> Iterator[str]:
        if expected and not holds(value):
            yield f"{where} must be {expected}. Received: {format_value(value)}."

    return checked(default, faults)


def choice(default: str, *names: str) -> Any:
    """Returns a field whose value is one of the names."""

    def faults(where: str, value: str) -> Iterator[str]:
        if value not in names:
            yield unknown_name_message(where, value, names)

    return checked(default, faults)


def checked(default: Any, faults: Callable[[str, Any], Iterator[str]]) -> Any:
    """Returns a field whose value is checked by a generator of errors, which gets the field's name, for messages, and the value."""
    return dataclasses.field(default=default, metadata={"faults": faults})


def parsed(default: Any, parse: Callable[[str, Any], Any]) -> Any:
    """Returns a field whose value is checked by a function of the field's name and the value, which raises ConfigError."""

    def faults(where: str, value: Any) -> Iterator[str]:
        found: list[str] = []
        with collect_errors(found):
            parse(where, value)
        yield from found

    return checked(default, faults)


def between(least: float, most: float, off: bool = False) -> Constraint:
    """Returns the constraint to the numbers from `least` to `most`, without NaN; `off` says in messages that `least` turns the option off."""
    lowest = _short(least)
    if off:
        lowest += " (off)"
    return f"{lowest} to {_short(most)}", lambda value: bool(least <= value <= most)


def at_least(least: float) -> Constraint:
    """Returns the constraint to the numbers from `least` that a count of steps can have."""
    return between(least, MOST_STEPS)


def one_of(*names: str) -> Constraint:
    """Returns the constraint to some names."""
    return f"one of: {', '.join(names)}", lambda name: name in names


def matches(expected: str, pattern: str) -> Constraint:
    """Returns the constraint to the texts that match a regular expression."""
    return expected, lambda text: re.fullmatch(pattern, text) is not None


def field_faults(where: str, value: Any, field: dataclasses.Field[Any]) -> Iterator[str]:
    """Yields the errors in a field's value, which is of the field's type. `where` is the field's name, for messages."""
    if "faults" in field.metadata and not (value is None and field.default is None):
        yield from field.metadata["faults"](where, value)


def is_whole(value: Any) -> bool:
    """Returns whether a value is a whole number that a field of floats takes."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def type_fault(where: str, value: Any, kind: Any) -> str:
    """Returns the error of a value that is not of its declared type, or an empty text. Only classes and unions of them are checked."""
    # `Any` is a class since Python 3.11.
    if kind is Any or not isinstance(kind, (type, types.UnionType)) or (kind is float and is_whole(value)):
        return ""
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return ""
    return f"{where} must be {getattr(kind, '__name__', kind)}. Received: {format_value(value)}."


def option_type(field: dataclasses.Field[Any]) -> type | None:
    """Returns the type of an option if it is bool, int, float or str; else None."""
    return _KINDS.get(getattr(field.type, "__name__", str(field.type)))


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.7g}"
