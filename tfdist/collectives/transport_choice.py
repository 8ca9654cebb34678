"""Chooses the transport of gradients between workers: TensorFlow's collectives, or a transport of `transports.py`."""

from __future__ import annotations

import atexit
import dataclasses
import random
from collections.abc import Sequence

from tfdist.collectives import mpi, shared_memory_rendezvous, transports
from tfdist.collectives.buffer_transport import BufferTransport
from tfdist.collectives.buffered import BufferedCommunicator
from tfdist.collectives.communicator import Communicator, cross_process_communicator
from tfdist.collectives.ranks import Ranks
from tfdist.collectives.transports import Bootstrap
from tfdist.compat import tf_cluster
from tfdist.config.strategy import TENSORFLOW_TRANSPORTS, TRANSPORTS
from tfdist.errors import ClusterError, ConfigError, describe_error
from tfdist.runtime import process_end
from tfdist.runtime.log import logger
from tfdist.strategy import Strategy

_END_SECONDS = 10.0  # limit for closing a transport
_NAMED = "the configuration names it"
_DEVICES = "it moves arrays of CPUs, and the replicas are on GPUs"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen transport of gradients.

    Attributes:
        name: Its name, as in `strategy.transport`.
        way: Its name with its levels, such as "gloo between 2 hosts, and by shared memory within".
        reason: Why it was chosen.
        communicator: The communicator that uses it.
    """

    name: str
    way: str
    reason: str
    communicator: Communicator


def choose(
    strategy: Strategy, workers: Sequence[str], addresses: Sequence[str], rank: int, wanted: str, timeout_seconds: float
) -> Choice:
    """Returns the transport of gradients, the same on all workers of a strategy. A collective.

    Args:
        strategy: The strategy, with several processes.
        workers: The names of the workers.
        addresses: `host:port` of each worker.
        rank: This worker's rank.
        wanted: `strategy.transport`.
        timeout_seconds: Limit of one collective; 0 means no limit.

    Raises:
        ConfigError: A worker cannot use the wanted transport, or the workers want different ones. All workers raise it.
    """
    ranks = Ranks(strategy, rank, workers)
    numbers = ranks.gather(TRANSPORTS.index(wanted), random.SystemRandom().randrange(2**31)).astype(int)
    wishes = {TRANSPORTS[wish] for wish in numbers[:, 0]}
    if len(wishes) > 1:
        raise ConfigError(
            f"strategy.transport must be the same for all workers. Received: {', '.join(sorted(wishes))}."
        )
    bootstrap = Bootstrap(f"tfdist/transport/{numbers[0, 1]}", ranks, addresses, timeout_seconds)
    default = "nccl" if "GPU" in strategy.extended.worker_devices[0] else "grpc"
    if ranks.size == 1:
        choice = Choice(default, default, "there is one worker", cross_process_communicator(strategy))
    elif wanted == "auto":
        choice = _automatic(strategy, bootstrap, default)
    elif wanted in TENSORFLOW_TRANSPORTS:
        choice = Choice(wanted, wanted, _NAMED, cross_process_communicator(strategy))
    else:
        connected = transports.connect(wanted, bootstrap, _DEVICES if _unfit_devices(strategy) else "")
        if connected.transport is None:
            reason = connected.reason
            raise ConfigError(f"strategy.transport={wanted} is not possible: {reason}. Use strategy.transport=grpc.")
        communicator = _buffered(strategy, connected.transport, timeout_seconds)
        choice = Choice(wanted, connected.way, _NAMED, communicator)
    if isinstance(choice.communicator, BufferedCommunicator):
        atexit.register(_end, choice.communicator)
    if ranks.is_chief and ranks.size > 1:
        logger.info(f"gradients travel by {choice.way}: {choice.reason}.")
    return choice


def _automatic(strategy: Strategy, bootstrap: Bootstrap, default: str) -> Choice:
    """Chooses by the workers' devices and hosts only: a choice by measured speed could differ after a restart and change the results."""
    tensorflow = cross_process_communicator(strategy)
    if unfit := bootstrap.ranks.agree(_unfit_devices(strategy)):
        return Choice(default, default, unfit, tensorflow)
    hosts = len(set(bootstrap.ranks.gather_texts(shared_memory_rendezvous.host_key())))
    name, where = (
        ("shared_memory", "all workers share a host") if hosts == 1 else ("mpi", f"the workers are on {hosts} hosts")
    )
    connected = transports.connect(name, bootstrap, "")
    if connected.transport is None:
        impossible = (
            f", and {name} is not possible: {connected.reason}"  # without mpirun, the absence of MPI is expected
        )
        return Choice(
            default, default, where + (impossible if hosts == 1 or mpi.is_started_by_mpi() else ""), tensorflow
        )
    communicator = _buffered(strategy, connected.transport, bootstrap.timeout_seconds)
    return Choice(name, connected.way, where + (", and MPI has started them" if name == "mpi" else ""), communicator)


def _buffered(strategy: Strategy, transport: BufferTransport, timeout_seconds: float) -> BufferedCommunicator:
    launcher = tf_cluster.process_launcher(strategy)
    return BufferedCommunicator(
        strategy.local_replicas, strategy.num_replicas_in_sync, launcher, transport, timeout_seconds
    )


def _unfit_devices(strategy: Strategy) -> str:
    return "the replicas are on GPUs" if "GPU" in strategy.extended.worker_devices[0] else ""


def _end(communicator: BufferedCommunicator) -> None:
    """Closes a transport if all workers close theirs; otherwise the transport ends with the process."""
    code = process_end.expected_exit_code()
    alone = code == 0 and process_end.amid_training
    if communicator.calls.ended or alone or code not in (0, process_end.PREEMPTED):
        return
    try:
        communicator.calls(communicator.transport.close, _END_SECONDS)
    except ClusterError:  # another worker does not close: a library might wait for it even while this process exits
        process_end.end(code)
    except Exception as e:  # training is already complete
        logger.warning(f"the transport of gradients could not be closed: {describe_error(e)}")
    communicator.calls.abort("the exchange of gradients has ended.")
