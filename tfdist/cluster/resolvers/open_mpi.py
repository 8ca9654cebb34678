"""Open MPI: the ranks that mpirun starts. No TensorFlow here."""

from __future__ import annotations

import socket

from tfdist.cluster.resolvers import rendezvous
from tfdist.cluster.resolvers.environment import Environment, RankAddresses, select_port
from tfdist.errors import ConfigError


def resolve(variables: Environment) -> RankAddresses | None:
    """Returns the addresses of the ranks that `mpirun` has started, and this process's rank.

    `mpirun` does not publish the hosts that it uses: ranks on several hosts exchange their addresses through a shared folder.

    Raises:
        ClusterError: Some ranks do not write their address in time.
        ConfigError: A variable is missing or invalid, or there are several hosts and no `TFDIST_RENDEZVOUS`.
    """
    rank = variables.require_index("OMPI_COMM_WORLD_RANK")
    size = variables.size("OMPI_COMM_WORLD_SIZE")
    local_rank = variables.require_index("OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = variables.require_index("OMPI_COMM_WORLD_LOCAL_SIZE")
    if size < 1:
        raise ConfigError(f"OMPI_COMM_WORLD_SIZE must be the number of tasks, 1 or more. Received: {size}.")
    if rank >= size:
        raise ConfigError(
            f"OMPI_COMM_WORLD_RANK must be 0 to {size - 1}, as OMPI_COMM_WORLD_SIZE is {size}. Received: {rank}."
        )
    if not local_rank < local_size <= size:
        raise ConfigError(
            f"OMPI_COMM_WORLD_LOCAL_SIZE must be more than OMPI_COMM_WORLD_LOCAL_RANK, {local_rank}, and at most OMPI_COMM_WORLD_SIZE, {size}. "
            f"Received: {local_size}."
        )
    job = variables.require("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    port = select_port(variables, job)
    if local_size == size:
        return RankAddresses([f"127.0.0.1:{port + number}" for number in range(size)], rank)
    # mpirun does not pass the other ranks' hosts to a rank.
    folder = variables.get("TFDIST_RENDEZVOUS")
    if not folder:
        raise ConfigError(
            "TFDIST_RENDEZVOUS must name a folder that all hosts share, because mpirun does not publish the ranks' hosts."
        )
    # A job id may be reused; this random key is unique.
    start = variables.get("OMPI_MCA_orte_precondition_transports") or job
    address = f"{variables.get('TFDIST_HOST') or socket.gethostname()}:{port + local_rank}"
    return RankAddresses(rendezvous.exchange(folder, start, rank, size, address, variables.timeout), rank)
