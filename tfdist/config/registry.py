"""Names to objects: a short name from a table or of a plug-in, or the user's own `package.module:attribute`. No TensorFlow here.

An object is imported when it is asked for, so that a table may name what imports TensorFlow.
"""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from collections.abc import Mapping
from typing import Any

from tfdist.config import plugins
from tfdist.config.plugins import Plugin
from tfdist.errors import ConfigError, did_you_mean

TASKS: Mapping[str, str] = {
    "digits": "tfdist.tasks.digits:Digits",
    "synthetic": "tfdist.tasks.synthetic:Synthetic",
}


def resolve(what: str, name: str, table: Mapping[str, str]) -> Any:
    """Returns the object that `name` stands for.

    Args:
        what: What is looked up, for messages, such as `"task"`.
        name: A key of `table`, a plug-in's name, or `package.module:attribute`.
        table: Short name to `package.module:attribute`.

    Raises:
        ConfigError: The name is unknown, its module or attribute does not exist, or the module raises.
    """
    target = table.get(name, name)
    installed = plugins.find(what, table) if ":" not in target else {}
    if name in installed:
        return load(what, name, installed[name])
    if not _is_target(target):
        known = sorted([*table, *installed])
        raise ConfigError(
            f"Unknown {what} {name!r}{did_you_mean(name, known)} "
            f"Expected one of {', '.join(known)}, or your own as 'package.module:Name'."
        )
    return _import(f"{what} {name!r}", target, "Is its folder the current one, or on PYTHONPATH?")


def load(what: str, name: str, plugin: Plugin) -> Any:
    """Returns a plug-in's object, imported.

    Args:
        what: What it is, for messages, such as `"task"`.
        name: Its name.
        plugin: The entry point.

    Raises:
        ConfigError: Several distributions have the name, or what it names cannot be imported.
    """
    if len(plugin.distributions) > 1:
        raise ConfigError(
            f"{what} {name!r} is an entry point of several distributions: {', '.join(plugin.distributions)}. "
            "Uninstall all but one."
        )
    named = f"{what} {name!r} of distribution {plugin.distributions[0]}"
    if not _is_target(plugin.target):
        raise ConfigError(f"The entry point of {named} must be 'package.module:Name'. Received: {plugin.target!r}.")
    return _import(named, plugin.target, "Install the distribution again, or uninstall it.")


def _is_target(text: str) -> bool:
    module_name, _, attribute = text.partition(":")
    return all(part.isidentifier() for part in (*module_name.split("."), attribute))


def _import(named: str, target: str, advice: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is not None and (module_name + ".").startswith(e.name + "."):
            raise ConfigError(f"The module of {named} cannot be found: {e}. {advice}") from None
        raise _raised(named, e) from e
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # sys.exit(), too: nothing has been trained
        raise _raised(named, e) from e
    if not hasattr(module, attribute):
        raise ConfigError(
            f"Module {module_name!r} has no {attribute!r}{did_you_mean(attribute, vars(module))} ({named})"
        )
    return getattr(module, attribute)


def _raised(named: str, error: BaseException) -> ConfigError:
    *_, place = traceback.extract_tb(error.__traceback__)
    return ConfigError(
        f"The module of {named} cannot be imported: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    )
