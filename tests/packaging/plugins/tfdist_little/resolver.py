"""The hosts that LITTLE_HOSTS names."""

from tfdist.cluster.resolvers.environment import Environment, RankAddresses


def resolve(variables: Environment) -> RankAddresses:
    """Returns the addresses of the ranks, and this process's rank."""
    return RankAddresses(variables.get("LITTLE_HOSTS").split(","), variables.require_index("LITTLE_RANK"))
