"""Kubernetes: the pods of an Indexed Job or a StatefulSet. No TensorFlow here."""

from __future__ import annotations

import re

from tfdist.cluster.resolvers.environment import Environment, RankAddresses, select_port
from tfdist.errors import ConfigError, format_value


def resolve(variables: Environment) -> RankAddresses | None:
    """Returns the addresses of the pods of an Indexed Job or a StatefulSet, and this pod's rank.

    The pods' names are NAME-INDEX; a headless service resolves them.

    Raises:
        ConfigError: A variable is missing or invalid.
    """
    size = variables.size("TFDIST_PODS")
    service = variables.require("TFDIST_SERVICE")
    if size == 0:
        raise ConfigError("TFDIST_PODS must be the number of pods, 1 or more. Received: '0'.")
    name, dash, index = variables.require("TFDIST_POD", "HOSTNAME").partition(".")[0].rpartition("-")
    completion = variables.get("JOB_COMPLETION_INDEX")
    if completion:
        if variables.require_index("JOB_COMPLETION_INDEX") >= size:
            raise ConfigError(
                f"JOB_COMPLETION_INDEX must be 0 to {size - 1}, as TFDIST_PODS is {size}. Received: {format_value(completion)}."
            )
        index = completion
    if not dash or not re.fullmatch("[0-9]{1,9}", index) or int(index) >= size:
        raise ConfigError(
            f"HOSTNAME must be NAME-INDEX, as of an Indexed Job's or a StatefulSet's pod, with an index of 0 to {size - 1}. "
            f"Received: {format_value(variables.get('TFDIST_POD', 'HOSTNAME'))}."
        )
    return RankAddresses([f"{name}-{number}.{service}:{select_port(variables)}" for number in range(size)], int(index))
