"""The part of `--help` that explains the fields of the configuration. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.config.options import NamedOptions
from tfdist.config.train import TrainConfig
from tfdist.errors import ConfigError, unknown_name_message

_HELP_WIDTH = 100
_TEXT_WIDTH = 70  # of a description on a line of its flag
# Fields that `--help` shows without their groups.
_COMMON = (
    *("task", "strategy.name", "strategy.devices", "cluster.workers", "cluster.ps", "global_batch_size", "epochs"),
    *("optimizer.name", "learning_rate", "compression.name", "precision", "seed", "callbacks", "backup.save_freq"),
    "max_restarts",
)


def screen(flags: Mapping[str, str], config: TrainConfig, source: str) -> str:
    """Returns `--help`: one line for each flag, for each common field, and for each group of fields.

    Args:
        flags: The descriptions of the flags.
        config: The configuration.
        source: The source of its values, such as a preset; empty for the defaults.
    """
    fields = {path: (value, text) for path, value, text in documented_fields(config, "config")}
    common = [f"config.{name}" for name in _COMMON]
    texts = attribute_texts(TrainConfig)
    groups = [(f"--help={name}", texts[name]) for name in _groups(config)]
    rows = [
        *((f"--{name}", text) for name, text in flags.items()),
        *((f"--{path}={fields[path][0]}", fields[path][1]) for path in common),
        *groups,
        ("--helpfull", "All flags and fields, with their complete descriptions."),
    ]
    return "\n".join(f"  {flag:<46} {textwrap.shorten(text, _TEXT_WIDTH, placeholder='...')}" for flag, text in rows)


def fields_help(config: TrainConfig, source: str, group: str = "") -> str:
    """Returns the value and the complete description of every field of the configuration, or of a group of fields.

    Args:
        config: The configuration.
        source: The source of its values, such as a preset, for the heading; empty for the defaults.
        group: The name of the group; empty means the whole configuration.

    Raises:
        ConfigError: There is no such group.
    """
    shown, path = config, "config"
    if group:
        if group not in _groups(config):
            raise ConfigError(unknown_name_message("group of fields", group, _groups(config)))
        shown, path = getattr(config, group), f"config.{group}"
    rows = [
        f"Fields of the configuration, with the values of {source or 'TrainConfig'} (--noconfig.FIELD is short for --config.FIELD=false):"
    ]
    for name, value, about in documented_fields(shown, path):
        rows.append(f"  --{name}={value}")
        rows += textwrap.wrap(about, _HELP_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(rows)


def _groups(config: TrainConfig) -> list[str]:
    """Returns the names of the groups of fields."""
    return [field.name for field in dataclasses.fields(config) if dataclasses.is_dataclass(getattr(config, field.name))]


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
