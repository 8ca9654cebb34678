"""Chooses the transport of gradients between workers: TensorFlow's collectives, or a transport of `transports.py`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from tfdist.collectives import shared_memory_rendezvous, transports
from tfdist.collectives.buffer_transport import BufferTransport
from tfdist.collectives.buffered import BufferedCommunicator
from tfdist.collectives.communicator import Communicator, cross_process_communicator
from tfdist.collectives.hardware import on_gpus
from tfdist.collectives.ranks import Ranks
from tfdist.collectives.transports import Bootstrap
from tfdist.compat import tf_cluster
from tfdist.config.strategy import TENSORFLOW_TRANSPORTS, TRANSPORTS
from tfdist.errors import ClusterError, ConfigError, describe_error
from tfdist.runtime.end import hooks, process_end
from tfdist.runtime.log import logger
from tfdist.strategy import Strategy

_END_SECONDS = 10.0  # limit for closing a transport
_NAMED = "the configuration names it"
_DEVICES = "it moves arrays of CPUs, and the replicas are on GPUs"
_UNTESTED = (
    "the authors of tfdist have tested workers with GPUs on CPUs that stand in for them alone; `python -m tools.gpu_check` in a checkout of "
    "tfdist tests this machine."
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen transport of gradients.

    Attributes:
        name: Its name, as in `strategy.transport`.
        way: Its name with its levels, such as "tcp between 2 hosts, and by shared memory within".
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
    """Returns the transport of gradients, the same on all workers of a strategy, and logs it. A collective.

    Takes the arguments of `connect`, and raises its errors.
    """
    choice = connect(strategy, workers, addresses, rank, wanted, timeout_seconds)
    if rank == 0 and len(workers) > 1:
        logger.info(f"gradients travel by {choice.way}: {choice.reason}.")
        if on_gpus(strategy):
            logger.info(_UNTESTED)
    return choice


def connect(
    strategy: Strategy, workers: Sequence[str], addresses: Sequence[str], rank: int, wanted: str, timeout_seconds: float
) -> Choice:
    """Returns the transport between the workers of a strategy, the same on all of them. A collective.

    `workers` are their names, `addresses` their `host:port`; `wanted` is the configuration's `strategy.transport`.

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
    # The chief's random number keeps the keys of several strategies of a cluster apart, because the store keeps them all.
    bootstrap = Bootstrap(f"tfdist/transport/{numbers[0, 1]}", ranks, addresses, timeout_seconds)
    default = "nccl" if on_gpus(strategy) else "grpc"
    if ranks.size == 1:
        choice = Choice(default, default, "there is one worker", cross_process_communicator(strategy))
    elif wanted == "auto":
        choice = _automatic(strategy, bootstrap, default)
    elif wanted in TENSORFLOW_TRANSPORTS:
        choice = Choice(wanted, wanted, _NAMED, cross_process_communicator(strategy))
    else:
        connected = transports.connect(wanted, bootstrap, _DEVICES if on_gpus(strategy) else "")
        if connected.transport is None:
            reason = connected.reason
            raise ConfigError(f"strategy.transport={wanted} is not possible: {reason}. Use strategy.transport=grpc.")
        communicator = _buffered(strategy, connected.transport, timeout_seconds)
        choice = Choice(wanted, connected.way, _NAMED, communicator)
    if isinstance(choice.communicator, BufferedCommunicator):
        hooks.at_end(hooks.Stage.CONNECTIONS, _end, choice.communicator)
    return choice


def _automatic(strategy: Strategy, bootstrap: Bootstrap, default: str) -> Choice:
    """Chooses by the workers' devices and hosts only: a choice by measured speed could differ after a restart and change the results."""
    tensorflow = cross_process_communicator(strategy)
    unfit = bootstrap.ranks.agree("the replicas are on GPUs" if on_gpus(strategy) else "")
    if unfit:
        return Choice(default, default, unfit, tensorflow)
    hosts = len(set(bootstrap.ranks.gather_texts(shared_memory_rendezvous.host_key())))
    if hosts == 1:
        names = ["shared_memory", "tcp"]
        reason = "all workers share a host"
    else:
        # Not MPI, also under mpirun: it has not been measured between hosts.
        names = ["tcp"]
        reason = f"the workers are on {hosts} hosts"
    for name in names:
        connected = transports.connect(name, bootstrap, "")
        if connected.transport is not None:
            communicator = _buffered(strategy, connected.transport, bootstrap.timeout_seconds)
            return Choice(name, connected.way, reason, communicator)
        reason += f", and {name} is not possible: {connected.reason}"
    return Choice(default, default, reason, tensorflow)


def _buffered(strategy: Strategy, transport: BufferTransport, timeout_seconds: float) -> BufferedCommunicator:
    launcher = tf_cluster.process_launcher(strategy)
    return BufferedCommunicator(
        strategy.local_replicas, strategy.num_replicas_in_sync, launcher, transport, timeout_seconds
    )


def _end(communicator: BufferedCommunicator) -> None:
    """Closes a transport if all workers close theirs; otherwise the transport ends with the process."""
    code = process_end.expected_exit_code()
    ends_alone = code == 0 and process_end.amid_training
    if communicator.calls.ended or ends_alone or code not in (0, process_end.PREEMPTED):
        return
    try:
        communicator.calls(communicator.transport.close, _END_SECONDS)
    except ClusterError:  # another worker does not close: a library might wait for it even while this process exits
        process_end.end(code)
    except Exception as e:  # training is already complete
        logger.warning(f"the transport of gradients could not be closed: {describe_error(e)}")
    communicator.calls.abort("the exchange of gradients has ended.")
