"""The parser of field values that flags pass as texts. No TensorFlow here."""

from __future__ import annotations

import ast
import enum
import types
import typing
from typing import Any

from absl import flags

_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false"}


def is_settable(kind: Any) -> bool:
    """Returns whether `parse` supports a type; `object` stands for any Python literal."""
    return all(
        each is object or (isinstance(each, type) and issubclass(each, (bool, int, float, str, tuple, enum.Enum)))
        for each in (typing.get_origin(member) or member for member in _members(kind))
    )


def parse(kind: Any, text: str) -> Any:
    """Converts a text to a value of a type.

    Args:
        kind: The type, for which `is_settable` is true.
        text: The text. `None` stands for None if the type allows it; a tuple's items are separated by commas; an enumeration's value is its name.

    Raises:
        ValueError: The text is not of the type; the message names the expected type.
    """
    if text.lower() == "none" and type(None) in typing.get_args(kind):
        return None
    *others, kind = _members(kind)
    for other in others:
        try:
            return parse(other, text)
        except ValueError:  # the next type of the union may suit; the error names the last one
            pass
    if (typing.get_origin(kind) or kind) is tuple:
        item_type = next(iter(typing.get_args(kind)), object)
        return tuple(parse(item_type, part.strip()) for part in text.strip("()").split(",") if part.strip())
    if kind is object:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
    if issubclass(kind, enum.Enum):
        if text not in kind.__members__:
            raise ValueError(f"one of {', '.join(kind.__members__)}")
        return kind[text]
    try:
        if kind is bool:
            return flags.BooleanParser().parse(text)
        return kind(text)
    except ValueError:
        raise ValueError(_EXPECTED.get(kind, f"a {kind.__name__}")) from None


def _members(kind: Any) -> list[Any]:
    """Returns the types of a union, without None; other types are a union of one."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return [kind]
    return [member for member in typing.get_args(kind) if member is not type(None)]
