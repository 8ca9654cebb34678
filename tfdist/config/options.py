"""`NamedOptions`: a name, and the options of the object with that name. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, ClassVar

from tfdist.config.constraints import is_whole, option_type
from tfdist.errors import ConfigError, did_you_mean, format_value


@dataclasses.dataclass(init=False, repr=False, eq=False)
class NamedOptions:
    """A name and the options of the named object: `Group("sgd", momentum=0.9)`, or `group.momentum = 0.9`.

    Any option may be set; `walk.faults` reports options that the object does not accept. An option that is not set has its default.

    Args:
        name: The name; None means the default.
        **options: The options that are set.
    """

    WHAT: ClassVar[str] = ""  # the kind of the named object, and the group's field
    BUILT_IN: ClassVar[Mapping[str, Any]] = {}
    DOCUMENTED_BY: ClassVar[tuple[type, ...]] = ()  # classes whose docstrings explain the options

    name: str = ""

    def __init__(self, name: str | None = None, **options: Any):
        if name is None:
            name = type(self).name
        vars(self).update(name=name, _options=options)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "name":
            vars(self)[name] = value
        else:
            self._options[name] = value

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
        try:
            fields = self.option_fields()
        except (ConfigError, TypeError):  # the name is wrong; validation reports it
            return dict(self._options)
        floats = {name for name, field in fields.items() if option_type(field) is float}
        return {
            name: float(value) if name in floats and is_whole(value) else value for name, value in self._options.items()
        }

    def all_options(self) -> dict[str, Any]:
        """Returns the value of each option: the one that is set, or the default."""
        fields = self.option_fields().items()
        defaults = {name: field.default for name, field in fields if field.default is not dataclasses.MISSING}
        return defaults | self.options()

    def to_dict(self, complete: bool = False) -> dict[str, Any]:
        """Returns name and options.

        Args:
            complete: Whether to include the options that are not set, with their defaults.
        """
        options = self.all_options() if complete else self._options
        return {"name": self.name, **options}

    def rename(self, name: str) -> None:
        """Sets the name, and removes the options that the new object does not accept."""
        before = type(self)(self.name)
        self.name = name
        try:
            if not self.takes_any:
                for option in before.option_fields().keys() - self.option_fields().keys():
                    self._options.pop(option, None)
        except (ConfigError, TypeError):  # `faults` reports it
            pass

    def unknown_option(self, name: str) -> str:
        """Returns the error for an option that the named object does not accept."""
        fields = self.option_fields()
        others = [built_in for built_in in self.BUILT_IN if name in type(self)(built_in).option_fields()]
        hint = did_you_mean(name, fields)
        if others:
            hint = f", which is an option of {', '.join(others)}."
        takes = "It takes no arguments."
        if fields:
            takes = f"It takes: {', '.join(fields)}."
        return f"{self.WHAT} {self.name!r} takes no {format_value(name)}{hint} {takes}"


def known_fields(group: Any) -> tuple[dict[str, tuple[Any, dataclasses.Field[Any]]], bool]:
    """Returns the type and the field of each field and option of a group, by name, and whether the group accepts any other option."""
    if not dataclasses.is_dataclass(group):
        return {}, False
    hints = typing.get_type_hints(type(group))
    known = {field.name: (hints[field.name], field) for field in dataclasses.fields(group)}
    if not isinstance(group, NamedOptions):
        return known, False
    try:
        options = group.option_fields()
    except (ConfigError, TypeError):  # the name is wrong; validation reports it
        return known, True
    return known | {name: (option_type(field) or field.type, field) for name, field in options.items()}, group.takes_any


def unknown_field(path: str, group: Any, name: str) -> str:
    """Returns the error for a name that a group of fields does not have; `path` is the path of the field, or the flag."""
    if isinstance(group, NamedOptions):
        return f"{path}: {group.unknown_option(name)}"
    known, _ = known_fields(group)
    fields = "It has no fields."
    if known:
        fields = f"Known: {', '.join(known)}."
    return f"{path}: unknown config field {format_value(name)}{did_you_mean(name, known)} {fields}"
