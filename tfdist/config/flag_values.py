"""The parser of field values that flags pass as texts. No TensorFlow here."""

from __future__ import annotations

import ast
import contextlib
import enum
import types
import typing
from typing import Any

from absl import flags

_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false"}


def is_settable(kind: Any) -> bool:
    """Returns whether `parse` supports a type; `object` stands for any Python literal."""
    if _is_union(kind):
        return all(map(is_settable, _members(kind)))
    kind = typing.get_origin(kind) or kind
    return kind is object or (isinstance(kind, type) and issubclass(kind, (bool, int, float, str, tuple, enum.Enum)))


def parse(kind: Any, text: str) -> Any:
    """Converts a text to a value of a type.

    Args:
        kind: The type, for which `is_settable` is true.
        text: The text. `None` stands for None if the type allows it; a tuple's items are separated by commas; an enumeration's value is its name.

    Raises:
        ValueError: The text is not of the type; the message names the expected type.
    """
    if _is_union(kind):
        return _parse_union(kind, text)
    if (typing.get_origin(kind) or kind) is tuple:
        item_type = next(iter(typing.get_args(kind)), object)
        return tuple(parse(item_type, part.strip()) for part in text.strip("()").split(",") if part.strip())
    if kind is object:
        try:
            return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false") else text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
    if issubclass(kind, enum.Enum):
        if text not in kind.__members__:
            raise ValueError(f"one of {', '.join(kind.__members__)}")
        return kind[text]
    try:
        return flags.BooleanParser().parse(text) if kind is bool else kind(text)
    except ValueError:
        raise ValueError(_EXPECTED.get(kind, f"a {kind.__name__}")) from None


def _parse_union(kind: Any, text: str) -> Any:
    """Returns the value of the first type of a union that accepts the text."""
    if text.lower() == "none" and type(None) in typing.get_args(kind):
        return None
    *kinds, last = _members(kind)
    for each in kinds:
        with contextlib.suppress(ValueError):
            return parse(each, text)
    return parse(last, text)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _members(kind: Any) -> list[Any]:
    return [member for member in typing.get_args(kind) if member is not type(None)]
