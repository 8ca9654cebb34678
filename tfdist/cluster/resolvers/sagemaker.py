"""SageMaker: the hosts of a training job. No TensorFlow here."""

from __future__ import annotations

import json

from tfdist.cluster.resolvers.environment import Environment, RankAddresses, select_port
from tfdist.errors import ConfigError, format_value


def resolve(variables: Environment) -> RankAddresses | None:
    """Returns the addresses of the hosts of a SageMaker job, and the rank of this host.

    Raises:
        ConfigError: A variable is missing or invalid.
    """
    text = variables.get("SM_HOSTS")
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise ConfigError(f'SM_HOSTS must be a list such as ["algo-1", "algo-2"]. Received: {format_value(text)}.')
    current = variables.require("SM_CURRENT_HOST")
    if current not in hosts:
        raise ConfigError(
            f"SM_CURRENT_HOST must be one of SM_HOSTS, {', '.join(hosts)}. Received: {format_value(current)}."
        )
    return RankAddresses([f"{host}:{select_port(variables)}" for host in hosts], hosts.index(current))
