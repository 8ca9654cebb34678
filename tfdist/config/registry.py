"""Names to objects: a short name from a table, or the user's own `package.module:attribute`. No TensorFlow here.

An object is imported when it is asked for, so that a table may name what imports TensorFlow.
"""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from collections.abc import Mapping
from typing import Any

from tfdist.errors import ConfigError, did_you_mean

TASKS: Mapping[str, str] = {
    "digits": "tfdist.tasks.digits:Digits",
    "synthetic": "tfdist.tasks.synthetic:Synthetic",
}


def resolve(what: str, name: str, table: Mapping[str, str]) -> Any:
    """Returns the object that `name` stands for.

    Args:
        what: What is looked up, for messages, such as `"task"`.
        name: A key of `table`, or `package.module:attribute`.
        table: Short name to `package.module:attribute`.

    Raises:
        ConfigError: The name is unknown, its module or attribute does not exist, or the module raises.
    """
    target = table.get(name, name)
    module_name, _, attribute = target.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ConfigError(
            f"Unknown {what} {name!r}{did_you_mean(name, table)} "
            f"Expected one of {', '.join(sorted(table))}, or your own as 'package.module:Name'."
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is not None and (module_name + ".").startswith(e.name + "."):
            raise ConfigError(
                f"The module of {what} {name!r} cannot be found: {e}. Is its folder the current one, or on PYTHONPATH?"
            ) from None
        raise _raised(what, name, e) from e
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # sys.exit(), too: nothing has been trained
        raise _raised(what, name, e) from e
    if not hasattr(module, attribute):
        raise ConfigError(
            f"Module {module_name!r} has no {attribute!r}{did_you_mean(attribute, vars(module))} ({what} {name!r})"
        )
    return getattr(module, attribute)


def _raised(what: str, name: str, error: BaseException) -> ConfigError:
    *_, place = traceback.extract_tb(error.__traceback__)
    return ConfigError(
        f"The module of {what} {name!r} cannot be imported: {type(error).__name__}: {error} "
        f"({place.filename}:{place.lineno})"
    )
