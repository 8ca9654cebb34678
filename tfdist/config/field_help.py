"""The part of `--help` that explains the fields of the configuration. No TensorFlow here."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from tfdist.config.options import NamedOptions
from tfdist.config.train import TrainConfig
from tfdist.errors import ConfigError

_HELP_WIDTH = 100


def fields_help(config: TrainConfig, of: str) -> str:
    """Returns the part of `--help` that lists every field of the configuration, with its value and its description.

    Args:
        config: The configuration.
        of: The source of the values, for the heading.
    """
    rows = [
        f"Fields of the configuration, with the values of {of} (--noconfig.FIELD is short for --config.FIELD=false):"
    ]
    for path, value, about in _documented_fields(config, "config"):
        rows.append(f"  --{path}={value}")
        rows += textwrap.wrap(about, _HELP_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(rows)


def list_fields(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields path and value of every field."""
    for name, value, _ in _documented_fields(config, path):
        yield name, value


def _documented_fields(config: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Yields path, value and description of every field."""
    about = attribute_texts(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _documented_fields(value, f"{path}.{field.name}")
        else:
            yield f"{path}.{field.name}", value, about.get(field.name, "")
    if isinstance(config, NamedOptions):
        yield from ((f"{path}.{name}", value, text) for name, value, text in _documented_options(config))


def _documented_options(group: NamedOptions) -> Iterator[tuple[str, Any, str]]:
    """Yields each option with its value and the names that accept it; options of the current name first."""
    about = {name: text for kind in (*group.DOCUMENTED_BY, type(group)) for name, text in attribute_texts(kind).items()}
    takes: dict[str, dict[str, Any]] = {}  # option to the names that take it, and their defaults
    names = dict.fromkeys([group.name, *group.BUILT_IN])
    for name in names:
        with contextlib.suppress(ConfigError, TypeError):  # of a name that is wrong
            for option, field in type(group)(name).option_fields().items():
                if field.default is not dataclasses.MISSING:
                    takes.setdefault(option, {})[name] = field.default
    for option, defaults in takes.items():
        value = getattr(group, option, next(iter(defaults.values())))
        of: dict[str, list[str]] = {}  # default to the names that have it
        for name, default in defaults.items():
            of.setdefault(str(default), []).append(name)
        shown = "; ".join(", ".join(options) + f": {default}" * (len(of) > 1) for default, options in of.items())
        every = len(of) == 1 and len(defaults) == len(names)
        yield option, value, f"{about.get(option, '')} {'' if every else f'Of {shown}.'}".strip()


def attribute_texts(kind: type) -> dict[str, str]:
    """Returns the texts in the section "Attributes:" of a class's docstring, by name."""
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    documentation: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if begun := re.match(r" {4}(\w+): (.*)", line):
            name = begun[1]
            documentation[name] = begun[2]
        elif line.startswith(" " * 8) and name:
            documentation[name] += f" {line.strip()}"
        elif line.strip():
            break
    return documentation
