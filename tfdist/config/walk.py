"""The walk over the fields of a configuration, of its groups and of their options. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from tfdist.config.constraints import field_faults, is_whole, type_fault
from tfdist.config.options import NamedOptions, known_fields, unknown_field


class Member(NamedTuple):
    """A field, an option that is set, or an attribute that is neither.

    Attributes:
        path: Its path, such as `config.strategy.name`.
        name: Its name.
        value: Its value.
        kind: The declared type, without None.
        field: The field; None if there is none of this name.
        holders: The groups around it, the innermost last.
    """

    path: str
    name: str
    value: Any
    kind: Any
    field: dataclasses.Field[Any] | None
    holders: tuple[Any, ...]


class Fault(NamedTuple):
    """An error in one field.

    Attributes:
        path: The field's path, such as `strategy.name`.
        text: The sentence.
        is_type: Whether the field does not exist, or its value is not of the declared type.
    """

    path: str
    text: str
    is_type: bool


def members(group: Any, path: str = "config", outer: tuple[Any, ...] = ()) -> Iterator[Member]:
    """Yields the members of a configuration or a group of fields, each group before its own members.

    Args:
        group: The configuration or the group.
        path: Its path.
        outer: The groups around it.
    """
    known, takes_any = known_fields(group)
    holders = (*outer, group)
    for name, value in _values(group).items():
        declared, field = known.get(name, (Any, None))
        is_unset = value is None and type(None) in typing.get_args(declared)
        if is_unset or (field is None and takes_any):
            continue
        member = Member(f"{path}.{name}", name, value, _class(declared), field, holders)
        yield member
        if field and _is_group(value) and not type_fault("", value, member.kind) and not _is_among(value, holders):
            yield from members(value, member.path, holders)


def faults(group: Any, path: str = "config") -> Iterator[Fault]:
    """Yields the errors of each single member: a config file may assign anything."""
    for where, name, value, kind, field, holders in members(group, path):
        text = type_fault(where, value, kind)
        if field is None and isinstance(holders[-1], NamedOptions):
            text = holders[-1].unknown_option(name)
        elif field is None:
            text = unknown_field(where, holders[-1], name)
        elif _is_among(value, holders):
            text = f"{where} must not hold itself. Received: a {type(value).__name__} that holds this field."
        elif not text and not _is_group(value):
            path = where.removeprefix("config.")
            yield from (Fault(path, each, False) for each in field_faults(path, value, field))
        if text:
            yield Fault(where.removeprefix("config."), text, True)


def make_floats(config: Any) -> None:
    """Converts whole numbers to floats in fields that are declared as float, also in groups of fields."""
    for member in members(config):
        if member.kind is float and is_whole(member.value):
            setattr(member.holders[-1], member.name, float(member.value))


def _is_group(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_among(value: Any, groups: tuple[Any, ...]) -> bool:
    return any(value is group for group in groups)


def _values(group: Any) -> dict[str, Any]:
    """Returns the values of a group's fields, of the options that are set, and of attributes that may be misspelled fields."""
    values = {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    if isinstance(group, NamedOptions):
        return values | group.options()
    # Private attributes, and attributes of the class (a cached property), are no misspelled fields. A class with slots has no `__dict__`.
    others = [
        name for name in getattr(group, "__dict__", ()) if not name.startswith("_") and not hasattr(type(group), name)
    ]
    return {name: getattr(group, name) for name in others if name not in values} | values


def _class(declared: Any) -> Any:
    """Returns a declared type without None and without the types of a dict's items."""
    if typing.get_origin(declared) is dict:
        return dict
    kinds = typing.get_args(declared)
    if typing.get_origin(declared) in (typing.Union, types.UnionType) and type(None) in kinds:
        return next(kind for kind in kinds if kind is not type(None))
    return declared
