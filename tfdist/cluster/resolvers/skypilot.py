"""SkyPilot: the nodes of a task. No TensorFlow here."""

from __future__ import annotations

from tfdist.cluster.resolvers.environment import Environment, RankAddresses, select_port


def resolve(variables: Environment) -> RankAddresses:
    """Returns the addresses of the nodes of a SkyPilot task, each of which runs its command once, and the rank of this node.

    Raises:
        ConfigError: A variable is missing or invalid.
    """
    nodes = variables.get("SKYPILOT_NODE_IPS").split()
    rank = variables.require_index("SKYPILOT_NODE_RANK")
    return RankAddresses([f"{node}:{select_port(variables)}" for node in nodes], rank)
