"""`NamedOptions`: a name, and the options of the object with that name. No TensorFlow here."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from tfdist.errors import ConfigError, did_you_mean, format_value

_KINDS = {kind.__name__: kind for kind in (bool, int, float, str)}


def option(default: Any, expected: str = "", holds: Callable[[Any], bool] = lambda value: True) -> Any:
    """Returns a field of a dataclass whose type and value are checked when a compressor is created.

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
    return dataclasses.field(default=default, metadata={"expected": expected, "holds": holds})


def option_faults(field: dataclasses.Field[Any], value: Any, where: str) -> Iterator[str]:
    """Yields the errors in the value of an option.

    Args:
        field: The field of the dataclass.
        value: The value.
        where: The option's name, for messages.
    """
    kind = option_type(field)
    if kind and type(value) is not kind and not (kind is float and type(value) is int):
        yield f"{where} must be of type {kind.__name__}. Received: {format_value(value)}."
    elif field.metadata.get("expected") and not field.metadata["holds"](value):
        yield f"{where} must be {field.metadata['expected']}. Received: {format_value(value)}."


def option_type(field: dataclasses.Field[Any]) -> type | None:
    """Returns the type of an option if it is bool, int, float or str; else None."""
    return _KINDS.get(getattr(field.type, "__name__", str(field.type)))


@dataclasses.dataclass(init=False, repr=False, eq=False)
class NamedOptions:
    """A name and the options of the named object: `Group("sgd", momentum=0.9)`, or `group.momentum = 0.9`.

    Any option may be set; `faults` reports options that the object does not accept. An option that is not set has its default.

    Args:
        name: The name; None means the default.
        **options: The options that are set.
    """

    WHAT: ClassVar[str] = ""  # the kind of the named object, and the group's field
    BUILT_IN: ClassVar[Mapping[str, Any]] = {}
    DOCUMENTED_BY: ClassVar[tuple[type, ...]] = ()  # classes whose docstrings explain the options

    name: str = ""

    def __init__(self, name: str | None = None, **options: Any):
        vars(self).update(name=type(self).name if name is None else name, _options=options)

    def __setattr__(self, name: str, value: Any) -> None:
        (vars(self) if name == "name" else self._options)[name] = value

    def __getattr__(self, name: str) -> Any:  # called for all names except `name` and methods
        if name.startswith("_"):  # `copy` looks such names up before the object has attributes
            raise AttributeError(name)
        if name in self._options:
            return self._options[name]
        try:
            fields = self.option_fields()
        except ConfigError as e:
            raise AttributeError(str(e)) from None
        if name not in fields or fields[name].default is dataclasses.MISSING:
            raise AttributeError(self.unknown_option(name))
        return fields[name].default

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._options.items())
        return f"{type(self).__name__}({self.name!r}{options})"

    @property
    def takes_any(self) -> bool:
        """True if only the named object itself knows all of its options."""
        return False

    def option_fields(self) -> Mapping[str, dataclasses.Field[Any]]:
        """Returns the options that the named object accepts, by name.

        Raises:
            ConfigError: No object has this name.
        """
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Returns the options that are set. Whole numbers become floats if the option is declared as float."""
        fields: Mapping[str, dataclasses.Field[Any]] = {}
        with contextlib.suppress(ConfigError):  # `faults` reports it
            fields = self.option_fields()
        return {
            name: float(value)
            if name in fields
            and option_type(fields[name]) is float
            and type(value) is int
            and abs(value) <= sys.float_info.max
            else value
            for name, value in self._options.items()
        }

    def all_options(self) -> dict[str, Any]:
        """Returns the value of each option: the one that is set, or the default."""
        fields = self.option_fields()
        return {
            name: field.default for name, field in fields.items() if field.default is not dataclasses.MISSING
        } | self.options()

    def to_dict(self, complete: bool = False) -> dict[str, Any]:
        """Returns name and options.

        Args:
            complete: Whether to include the options that are not set, with their defaults.
        """
        return {"name": self.name, **(self.all_options() if complete else self._options)}

    def rename(self, name: str) -> None:
        """Sets the name, and removes the options that the new object does not accept."""
        before = type(self)(self.name)
        self.name = name
        with contextlib.suppress(ConfigError, TypeError):  # `faults` reports it
            rejected = () if self.takes_any else before.option_fields().keys() - self.option_fields().keys()
            for option in rejected:
                self._options.pop(option, None)

    def unknown_option(self, name: str) -> str:
        """Returns the error for an option that the named object does not accept."""
        fields = self.option_fields()
        others = [built_in for built_in in self.BUILT_IN if name in type(self)(built_in).option_fields()]
        hint = f", which is an option of {', '.join(others)}." if others else did_you_mean(name, fields)
        takes = f"It takes: {', '.join(fields)}." if fields else "It takes no arguments."
        return f"{self.WHAT} {self.name!r} takes no {format_value(name)}{hint} {takes}"

    def option_faults(self) -> Iterator[str]:
        """Yields the errors of each single option.

        Raises:
            ConfigError: No object has this name.
        """
        fields = self.option_fields()
        for name, value in self.options().items():
            if name in fields:
                yield from option_faults(fields[name], value, f"{self.WHAT}.{name}")
            elif not self.takes_any:
                yield self.unknown_option(name)


def field_types(group: Any) -> tuple[dict[str, Any], bool]:
    """Returns the type of each field and option of a group, and whether it accepts any other option."""
    if not dataclasses.is_dataclass(group):
        return {}, False
    hints = typing.get_type_hints(type(group))
    types = {field.name: hints[field.name] for field in dataclasses.fields(group)}
    if not isinstance(group, NamedOptions):
        return types, False
    try:
        options = group.option_fields()
    except (ConfigError, TypeError):  # the name is wrong; validation reports it
        return types, True
    return types | {name: option_type(field) or field.type for name, field in options.items()}, group.takes_any


def unknown_field(path: str, group: Any, name: str) -> str:
    """Returns the error for a name that a group of fields does not have.

    Args:
        path: The path of the field, or the flag.
        group: The group.
        name: The name.
    """
    if isinstance(group, NamedOptions):
        return f"{path}: {group.unknown_option(name)}"
    known, _ = field_types(group)
    fields = f"Known: {', '.join(known)}." if known else "It has no fields."
    return f"{path}: unknown config field {format_value(name)}{did_you_mean(name, known)} {fields}"
