"""The walk over the fields of a configuration, of its groups and of their options. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from tfdist.config.constraints import field_faults, is_of, is_whole
from tfdist.config.options import NamedOptions, fields_and_types, unknown_field
from tfdist.errors import format_value


class Member(NamedTuple):
    """A field, an option that is set, or an attribute that no field has.

    Attributes:
        path: Its path, such as `config.strategy.name`.
        name: Its name.
        value: Its value.
        field: The field; None if there is none of this name.
        kind: The declared type, without None.
        groups: The groups that hold it, the innermost last.
    """

    path: str
    name: str
    value: Any
    field: dataclasses.Field[Any] | None
    kind: Any
    groups: tuple[Any, ...]

    @property
    def is_group(self) -> bool:
        """True for a group of fields."""
        return dataclasses.is_dataclass(self.value) and not isinstance(self.value, type)

    @property
    def is_cycle(self) -> bool:
        """True for a group that holds itself."""
        return any(self.value is group for group in self.groups)


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
    """Yields the members of a configuration, or of a group of fields, and after each group those that it holds.

    Args:
        group: The configuration or the group.
        path: Its path.
        outer: The groups that hold it.
    """
    known, takes_any = fields_and_types(group)
    groups = (*outer, group)
    for name, value in _values(group).items():
        field, declared = known.get(name, (None, Any))
        is_unset = value is None and type(None) in typing.get_args(declared)
        if is_unset or (field is None and takes_any):
            continue
        member = Member(f"{path}.{name}", name, value, field, _class(declared), groups)
        yield member
        if field and member.is_group and not member.is_cycle and is_of(value, member.kind):
            yield from members(value, member.path, groups)


def faults(group: Any, path: str = "config") -> Iterator[Fault]:
    """Yields the errors of each single member of a configuration or group: a config file may assign anything."""
    for member in members(group, path):
        where, value = member.path, member.value
        short = where.removeprefix("config.")
        holder = member.groups[-1]
        if member.field is None and isinstance(holder, NamedOptions):
            yield Fault(short, holder.unknown_option(member.name), True)
        elif member.field is None:
            yield Fault(short, unknown_field(where, holder, member.name), True)
        elif not is_of(value, member.kind):
            kind = getattr(member.kind, "__name__", member.kind)
            yield Fault(short, f"{where} must be {kind}. Received: {format_value(value)}.", True)
        elif member.is_cycle:
            received = f"Received: a {type(value).__name__} that holds this field."
            yield Fault(short, f"{where} must not hold itself. {received}", True)
        elif not member.is_group:
            for text in field_faults(short, value, member.field):
                yield Fault(short, text, False)


def make_floats(config: Any) -> None:
    """Converts whole numbers to floats in fields that are declared as float, also in groups of fields."""
    for member in members(config):
        if member.kind is float and is_whole(member.value):
            setattr(member.groups[-1], member.name, float(member.value))


def _values(group: Any) -> dict[str, Any]:
    """Returns the values of a group's fields, of the options that are set, and of attributes that may be misspelled fields."""
    values = {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    if isinstance(group, NamedOptions):
        return values | group.options()
    # Private attributes, and attributes of the class (a cached property), are no misspelled fields. A class with slots has no `__dict__`.
    others = {
        name: value
        for name, value in getattr(group, "__dict__", {}).items()
        if name not in values and not name.startswith("_") and not hasattr(type(group), name)
    }
    return {**others, **values}


def _class(declared: Any) -> Any:
    """Returns a declared type without None and without the types of a dict's items."""
    if typing.get_origin(declared) is dict:
        return dict
    members = typing.get_args(declared)
    if typing.get_origin(declared) in (typing.Union, types.UnionType) and type(None) in members:
        return next(member for member in members if member is not type(None))
    return declared
