"""Names that installed distributions add to the built-in ones, by entry points. No TensorFlow here.

    tfdist.tasks          NAME = "package.module:Class", a subclass of `tfdist.Task`
    tfdist.compressors    NAME = "package.module:Class", a subclass of `tfdist.compression.Compressor`
    tfdist.resolvers      "NAME.VARIABLE" = "package.module:function", a resolver, and the variable that signals its cluster

Only metadata is read, and only for a name that is not built in. A distribution's code is imported once its name is asked for, or its
resolver's variable is set. A built-in name cannot be replaced.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Collection, Iterable
from importlib.metadata import EntryPoint
from typing import NamedTuple

from tfdist.errors import told
from tfdist.runtime.log import logger

# What a name stands for, as messages call it, to the group of entry points.
GROUPS = {"task": "tfdist.tasks", "compression": "tfdist.compressors", "cluster source": "tfdist.resolvers"}


class Plugin(NamedTuple):
    """An entry point.

    Attributes:
        target: What it names, as `package.module:attribute`.
        distributions: Name and version of the distribution that has it; of several, where they differ in what the name means.
        variable: Of a resolver: the variable that signals its cluster; empty means that it is only asked by its name.
    """

    target: str
    distributions: tuple[str, ...]
    variable: str = ""


def find(what: str, built_in: Collection[str]) -> dict[str, Plugin]:
    """Returns the plug-ins of a group by name, sorted, without importing them.

    Args:
        what: A key of `GROUPS`; there are no plug-ins of anything else.
        built_in: Names that plug-ins cannot have: those that have one are left out.
    """
    found: dict[str, Plugin] = {}
    for entry in _entry_points(GROUPS[what]) if what in GROUPS else ():
        name, _, variable = entry.name.partition(".") if what == "cluster source" else (entry.name, "", "")
        distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
        plugin = Plugin(entry.value, (distribution,), variable)
        other = found.get(name, plugin)
        if (other.target, other.variable) != (plugin.target, plugin.variable):
            plugin = other._replace(distributions=(*other.distributions, distribution))
        if name not in built_in:
            found[name] = plugin
    return dict(sorted(found.items()))


def _entry_points(group: str) -> Iterable[EntryPoint]:
    try:
        return importlib.metadata.entry_points(group=group)
    except Exception:  # at one damaged file, whatever group it is of, Python reads none
        found: list[EntryPoint] = []
        for distribution in importlib.metadata.distributions():
            try:
                found += distribution.entry_points.select(group=group)
            except Exception as e:
                _warn_once(f"{distribution.name} {distribution.version}", told(e))
        return found


@functools.cache
def _warn_once(distribution: str, reason: str) -> None:
    logger.warning(f"the entry points of distribution {distribution} cannot be read: {reason}. Install it again.")
