"""Constraints of fields: each field of a dataclass states in its default what values it accepts. No TensorFlow here.

`epochs: int = option(1, *at_least(1))` is a field, `precision: str = choice("float32", "mixed_bfloat16")` another.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator
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


def value_faults(group: Any, path: str, skipped: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """Yields the path and the error of each field whose value does not meet its constraint, also in groups of fields.

    `path` is the path of the group, such as `"strategy"`; empty for the outermost. Fields at the paths `skipped` are not checked.
    """
    for field in dataclasses.fields(group):
        where = f"{path}.{field.name}".removeprefix(".")
        value = getattr(group, field.name)
        if where in skipped or (value is None and field.default is None):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from value_faults(value, where, skipped)
        elif "faults" in field.metadata:
            for fault in field.metadata["faults"](where, value):
                yield where, fault


def option_faults(field: dataclasses.Field[Any], value: Any, where: str) -> Iterator[str]:
    """Yields the errors in the type and the value of an option. `where` is the option's name, for messages."""
    kind = option_type(field)
    if kind and type(value) is not kind and not (kind is float and type(value) is int):
        yield f"{where} must be of type {kind.__name__}. Received: {format_value(value)}."
    elif "faults" in field.metadata:
        yield from field.metadata["faults"](where, value)


def option_type(field: dataclasses.Field[Any]) -> type | None:
    """Returns the type of an option if it is bool, int, float or str; else None."""
    return _KINDS.get(getattr(field.type, "__name__", str(field.type)))


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.7g}"
