"""The part of `--help` that explains the fields of the configuration. No TensorFlow here."""

from __future__ import annotations

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


def fields_help(config: TrainConfig, source: str) -> str:
    """Returns the part of `--help` that lists every field of the configuration, with its value and its description.

    `source` names the source of the values, such as a preset, for the heading.
    """
    rows = [
        f"Fields of the configuration, with the values of {source} (--noconfig.FIELD is short for --config.FIELD=false):"
    ]
    for path, value, about in documented_fields(config, "config"):
        rows.append(f"  --{path}={value}")
        rows += textwrap.wrap(about, _HELP_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(rows)


def documented_fields(config: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    """Yields the path, value and description of every field."""
    descriptions = attribute_texts(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from documented_fields(value, f"{path}.{field.name}")
        else:
            yield f"{path}.{field.name}", value, descriptions.get(field.name, "")
    if isinstance(config, NamedOptions):
        yield from ((f"{path}.{name}", value, text) for name, value, text in _documented_options(config))


def _documented_options(group: NamedOptions) -> Iterator[tuple[str, Any, str]]:
    """Yields the name, value and description of every option of a group, those of the current `group.name` first.

    If only some names accept an option (`momentum` of `sgd`), or if their defaults differ, its description lists these names.
    """
    descriptions = {
        option: text for cls in (*group.DOCUMENTED_BY, type(group)) for option, text in attribute_texts(cls).items()
    }
    defaults_of: dict[str, dict[str, Any]] = {}  # option -> {name that accepts it: its default}
    names = dict.fromkeys([group.name, *group.BUILT_IN])
    for name in names:
        try:
            fields = type(group)(name).option_fields()
        except (ConfigError, TypeError):  # the configured name may be misspelled
            continue
        for option, field in fields.items():
            if field.default is not dataclasses.MISSING:
                defaults_of.setdefault(option, {})[name] = field.default
    for option, defaults in defaults_of.items():
        value = getattr(group, option, next(iter(defaults.values())))
        names_by_default: dict[str, list[str]] = {}
        for name, default in defaults.items():
            names_by_default.setdefault(str(default), []).append(name)
        text = descriptions.get(option, "")
        if len(names_by_default) > 1:
            accepted_by = [f"{', '.join(accepting)}: {default}" for default, accepting in names_by_default.items()]
            text += f" For {'; '.join(accepted_by)}."
        elif len(defaults) < len(names):
            text += f" For {', '.join(defaults)}."
        yield option, value, text.strip()


def attribute_texts(cls: type) -> dict[str, str]:
    """Returns the description of each attribute in the section "Attributes:" of a class's docstring."""
    _, _, section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    descriptions: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        entry = re.match(r" {4}(\w+): (.*)", line)
        if entry:
            name = entry[1]
            descriptions[name] = entry[2]
        elif line.startswith(" " * 8) and name:
            descriptions[name] += f" {line.strip()}"
        elif line.strip():
            break
    return descriptions
