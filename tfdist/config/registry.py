"""The lookup of objects by name: a built-in name, a plug-in's name, or the user's own `package.module:attribute`. No TensorFlow here.

An object is imported on first use, so that a table may name objects whose modules import TensorFlow. Plug-ins are
entry points of installed distributions:

    tfdist.tasks          NAME = "package.module:Class", a subclass of `tfdist.Task`
    tfdist.compressors    NAME = "package.module:Class", a subclass of `tfdist.compression.Compressor`
    tfdist.resolvers      "NAME.VARIABLE" = "package.module:function", a resolver, and the variable that signals its cluster

Only metadata is read, and only for a name that is not built in. A plug-in's code is imported when its name is used, or its
resolver's variable is set. Plug-ins cannot replace a built-in name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import traceback
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple

from tfdist.errors import ConfigError, describe_error, did_you_mean, format_value
from tfdist.runtime.log import logger

TASKS: Mapping[str, str] = {
    "digits": "tfdist.tasks.digits:Digits",
    "ratings": "tfdist.tasks.ratings:Ratings",
    "synthetic": "tfdist.tasks.synthetic:Synthetic",
}
# The kind of object, with its name in messages, to the group of its entry points.
PLUGIN_GROUPS = {"task": "tfdist.tasks", "compression": "tfdist.compressors", "cluster source": "tfdist.resolvers"}


def resolve(what: str, name: str, table: Mapping[str, str]) -> Any:
    """Returns the object that `name` stands for.

    Args:
        what: The kind of object, for messages, such as `"task"`.
        name: A key of `table`, a plug-in's name, or `package.module:attribute`.
        table: Short name to `package.module:attribute`.

    Raises:
        ConfigError: The name is unknown, its module or attribute does not exist, or the module raises.
    """
    target = table.get(name, name)
    installed: dict[str, Plugin] = {}
    if ":" not in target:
        installed = find_plugins(what, table)
    if name in installed:
        return load(what, name, installed[name])
    if not _is_path(target):
        known = sorted([*table, *installed])
        raise ConfigError(
            f"Unknown {what} {name!r}{did_you_mean(name, known)} "
            f"Expected one of {', '.join(known)}, or your own as 'package.module:Name'."
        )
    return _import(f"{what} {name!r}", target, "Is its folder the current one, or on PYTHONPATH?")


def load(what: str, name: str, plugin: Plugin) -> Any:
    """Imports and returns a plug-in's object. `what` is the kind of object, for messages, such as `"task"`.

    Raises:
        ConfigError: Several distributions define the name, or the plug-in's module cannot be imported.
    """
    if len(plugin.distributions) > 1:
        raise ConfigError(
            f"{what} {name!r} is an entry point of several distributions: {', '.join(plugin.distributions)}. "
            "Uninstall all but one."
        )
    named = f"{what} {name!r} of distribution {plugin.distributions[0]}"
    if not _is_path(plugin.target):
        raise ConfigError(f"The entry point of {named} must be 'package.module:Name'. Received: {plugin.target!r}.")
    return _import(named, plugin.target, "Install the distribution again, or uninstall it.")


def check_findable(what: str, name: str) -> None:
    """Checks the form of `package.module:attribute`, and that the package exists, without importing it. `what` is as for `load`.

    Raises:
        ConfigError: The name has another form, or the package cannot be found.
    """
    if not _is_path(name):
        raise ConfigError(f"{what} must be your own as 'package.module:Name'. Received: {format_value(name)}.")
    package = name.partition(":")[0].partition(".")[0]
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a module without a specification, such as __main__
        return
    if spec is None:
        raise ConfigError(
            f"The module of {what} {name!r} cannot be found: No module named {package!r}. Is its folder the current one, or on PYTHONPATH?"
        )


def find_plugins(what: str, built_in: Collection[str]) -> dict[str, Plugin]:
    """Returns the plug-ins of a group by name, sorted, without importing them.

    Args:
        what: A key of `PLUGIN_GROUPS`; other kinds have no plug-ins.
        built_in: Built-in names; plug-ins with these names are skipped.
    """
    plugins: dict[str, Plugin] = {}
    if what not in PLUGIN_GROUPS:
        return plugins
    for entry in _entry_points(PLUGIN_GROUPS[what]):
        name = entry.name
        variable = ""
        if what == "cluster source":
            name, _, variable = name.partition(".")
        distribution = "an unknown distribution"
        if entry.dist:
            distribution = f"{entry.dist.name} {entry.dist.version}"
        plugin = Plugin(entry.value, (distribution,), variable)
        other = plugins.get(name, plugin)
        if (other.target, other.variable) != (plugin.target, plugin.variable):
            plugin = other._replace(distributions=(*other.distributions, distribution))
        if name not in built_in:
            plugins[name] = plugin
    return dict(sorted(plugins.items()))


class Plugin(NamedTuple):
    """A plug-in: an entry point of an installed distribution.

    Attributes:
        target: The entry point's object, as `package.module:attribute`.
        distributions: Name and version of the distribution that has the entry point; several if they define the name differently.
        variable: For a resolver: the variable that signals its cluster; empty means that the resolver only runs if it is named.
    """

    target: str
    distributions: tuple[str, ...]
    variable: str = ""


def _entry_points(group: str) -> Iterable[EntryPoint]:
    try:
        return importlib.metadata.entry_points(group=group)
    except Exception:  # Python reads no entry points if one file is damaged, even one of another group
        entry_points: list[EntryPoint] = []
        for distribution in importlib.metadata.distributions():
            try:
                entry_points += distribution.entry_points.select(group=group)
            except Exception as e:
                _warn_once(f"{distribution.name} {distribution.version}", describe_error(e))
        return entry_points


@functools.cache
def _warn_once(distribution: str, reason: str) -> None:
    logger.warning(f"the entry points of distribution {distribution} cannot be read: {reason}. Install it again.")


def _is_path(text: str) -> bool:
    module_name, _, attribute = text.partition(":")
    return all(part.isidentifier() for part in (*module_name.split("."), attribute))


def _import(named: str, target: str, advice: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is not None and (module_name + ".").startswith(e.name + "."):
            raise ConfigError(f"The module of {named} cannot be found: {e}. {advice}") from None
        raise _import_error(named, e) from e
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # sys.exit(), too: it must not look like a finished training
        raise _import_error(named, e) from e
    if not hasattr(module, attribute):
        raise ConfigError(
            f"Module {module_name!r} has no {attribute!r}{did_you_mean(attribute, vars(module))} ({named})"
        )
    return getattr(module, attribute)


def _import_error(named: str, error: BaseException) -> ConfigError:
    *_, frame = traceback.extract_tb(error.__traceback__)
    return ConfigError(
        f"The module of {named} cannot be imported: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
    )
