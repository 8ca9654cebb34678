"""The part of `--help` that lists the configuration's fields: value and text of each. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from tfdist.config.train import TrainConfig

_WIDTH = 100


def fields(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields path and value of every field."""
    for name, value, _ in _documented(config, path):
        yield name, value


def text(config: TrainConfig, of: str) -> str:
    """Returns every field of the configuration with its value and what it is.

    Args:
        config: The configuration.
        of: Where the values come from.
    """
    rows = [f"Fields of the configuration, with the values of {of}:"]
    for path, value, about in _documented(config, "config"):
        rows.append(f"  --{path}={value}")
        rows += textwrap.wrap(about, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(rows)


def _documented(config: Any, path: str) -> Iterator[tuple[str, Any, str]]:
    kinds = (*getattr(config, "documented_by", ()), type(config))
    about = {name: text for kind in kinds for name, text in _attributes(kind).items()}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _documented(value, f"{path}.{field.name}")
        else:
            yield f"{path}.{field.name}", value, about.get(field.name, "")


def _attributes(kind: type) -> dict[str, str]:
    """Returns what the "Attributes:" of a class's docstring say of each."""
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if begun := re.match(r" {4}(\w+): (.*)", line):
            name = begun[1]
            found[name] = begun[2]
        elif line.startswith(" " * 8) and name:
            found[name] += f" {line.strip()}"
        elif line.strip():
            break
    return found
