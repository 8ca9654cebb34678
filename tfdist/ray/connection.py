"""The connection of a launcher to a Ray cluster. No TensorFlow here, and no Ray before it is used."""

from __future__ import annotations

import functools
import importlib.util
import numbers
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tfdist.config.constraints import MOST_TASKS
from tfdist.errors import ConfigError, format_value

if TYPE_CHECKING:
    from tfdist.ray.host import RayHost


def ray_host(address: str, resources: Mapping[str, float], wait_seconds: float, warm: bool) -> Callable[..., RayHost]:
    """Connects to a Ray cluster, and returns the class that starts a launcher's tasks there (the argument `host` of `Launcher`).

    Args:
        address: The address of the cluster; `auto` means that of the environment.
        resources: As for `RayHost`, and the other arguments, too. Amounts of 0 are left out.

    Raises:
        ConfigError: Ray is not installed.
        ClusterError: There is no such cluster.
    """
    for name, amount in resources.items():
        if not isinstance(amount, numbers.Real) or not 0 <= amount <= MOST_TASKS:
            raise ConfigError(
                f"{name.lower()}s_per_worker must be 0 to {MOST_TASKS}. Received: {format_value(amount)}."
            )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("A job on a Ray cluster needs Ray, which is not installed: pip install 'tfdist[ray]'.")
    from tfdist.ray import host

    host.connect(address)  # before the launcher handles signals: Ray has a handler of its own
    amounts = {name: amount for name, amount in resources.items() if amount}
    return functools.partial(host.RayHost, resources=amounts, wait_seconds=wait_seconds, warm=warm)
