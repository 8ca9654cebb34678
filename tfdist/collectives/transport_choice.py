"""By what gradients travel between workers: TensorFlow's collectives, or what `strategy.transport` names; the same on all of them."""

from __future__ import annotations

import atexit
import dataclasses
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.collectives import gloo, mpi, shared_memory, shared_memory_rendezvous, transport_speed
from tfdist.collectives.buffer_transport import BufferTransport, NoTransportError
from tfdist.collectives.buffered import BufferedCommunicator
from tfdist.collectives.communicator import Communicator
from tfdist.collectives.cross_process import CrossProcessCommunicator
from tfdist.collectives.ranks import Ranks
from tfdist.compat import tf_cluster
from tfdist.config.strategy import TENSORFLOW_TRANSPORTS, TRANSPORTS
from tfdist.errors import ClusterError, ConfigError, told, truncate
from tfdist.runtime import exit_status
from tfdist.runtime.log import logger

_END_SECONDS = 10.0  # for which the end of a transport is waited for
_MEETING_SECONDS = 60.0  # for which a worker's text is waited for, which it has published before
_NAMED = "the configuration names it"
_DEVICES = "it moves arrays of one CPU, and each worker must have one replica, on its CPU"


@dataclasses.dataclass(frozen=True)
class Meeting:
    """What connects the workers of a new transport.

    Attributes:
        name: Another one for each transport, the same on all workers.
        rank: This worker's number.
        workers: The names of all.
        addresses: `host:port` of each.
        timeout_seconds: How long an exchange may take; 0 means for ever.
    """

    name: str
    rank: int
    workers: Sequence[str]
    addresses: Sequence[str]
    timeout_seconds: float


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A transport that TensorFlow does not have.

    Attributes:
        why_not: Returns why this process cannot use it, or an empty text.
        connect: Returns the transport, or raises `NoTransportError`. A collective.
    """

    why_not: Callable[[Meeting], str]
    connect: Callable[[Meeting], BufferTransport]


def _share_memory(meeting: Meeting) -> BufferTransport:
    size, name = len(meeting.workers), f"{meeting.name}/memory"
    return shared_memory.connect(meeting.rank, size, tf_cluster.publish, _published, name, meeting.timeout_seconds)


def _published(key: str, seconds: float) -> str:
    return tf_cluster.published(key, max(1, int(1000 * seconds)))


CANDIDATES: Mapping[str, Candidate] = {
    "gloo": Candidate(
        lambda meeting: gloo.why_not(meeting.rank, meeting.addresses),
        lambda meeting: gloo.connect(
            meeting.rank, meeting.addresses, tf_cluster.publish, _published, f"{meeting.name}/gloo"
        ),
    ),
    "mpi": Candidate(
        lambda meeting: mpi.why_not(len(meeting.workers)),
        lambda meeting: mpi.connect(meeting.rank, len(meeting.workers)),
    ),
    "shared_memory": Candidate(lambda _: "", _share_memory),
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """By what gradients travel.

    Attributes:
        name: The transport's.
        reason: Why it is this one.
        communicator: What moves them.
    """

    name: str
    reason: str
    communicator: Communicator


def choose(
    strategy: Any, workers: Sequence[str], addresses: Sequence[str], rank: int, wanted: str, timeout_seconds: float
) -> Choice:
    """Returns by what the gradients of a strategy's workers travel, the same for all of them. A collective.

    Args:
        strategy: Of the workers of a cluster.
        workers: Their names.
        addresses: `host:port` of each.
        rank: This one's number.
        wanted: `strategy.transport`.
        timeout_seconds: How long an exchange may take; 0 means for ever.

    Raises:
        ConfigError: What is wanted cannot be used, by any of the workers, or they want different ones. It is raised on all.
    """
    ranks = Ranks(strategy, rank, len(workers))
    numbers = ranks.gather(TRANSPORTS.index(wanted), random.SystemRandom().randrange(2**31)).astype(int)
    wishes = {TRANSPORTS[wish] for wish in numbers[:, 0]}
    if len(wishes) > 1:
        raise ConfigError(
            f"strategy.transport must be the same for all workers. Received: {', '.join(sorted(wishes))}."
        )
    meeting = Meeting(f"tfdist/transport/{numbers[0, 1]}", rank, workers, addresses, timeout_seconds)
    if wanted == "auto":
        found = _automatic(strategy, ranks, meeting)
    elif wanted in TENSORFLOW_TRANSPORTS or ranks.size == 1:
        own = wanted if wanted in TENSORFLOW_TRANSPORTS else _own_transport(strategy)
        found = Choice(own, _NAMED, CrossProcessCommunicator(strategy))
    else:
        communicator, reason = _connect(wanted, strategy, ranks, meeting)
        if communicator is None:
            raise ConfigError(f"strategy.transport={wanted} is not possible: {reason}. Use strategy.transport=grpc.")
        found = Choice(wanted, _NAMED, communicator)
    if isinstance(found.communicator, BufferedCommunicator):
        atexit.register(_end, found.communicator)
    if ranks.is_chief and ranks.size > 1:
        logger.info(f"gradients travel by {found.name}: {found.reason}.")
    return found


def _own_transport(strategy: Any) -> str:
    return "nccl" if "GPU" in strategy.extended.worker_devices[0] else "grpc"


def _automatic(strategy: Any, ranks: Ranks, meeting: Meeting) -> Choice:
    """Chooses by where the workers are, and between what trains the same bits by what is faster.

    More than two workers are not measured: TensorFlow adds them up in another order, so that the weights would depend on what
    else the machine did at the start.
    """
    own, tensorflow = _own_transport(strategy), CrossProcessCommunicator(strategy)
    if ranks.size == 1:
        return Choice(own, "there is one worker", tensorflow)
    if unfit := _first_reason(ranks, meeting, "devices", _unfit_devices(strategy)):
        return Choice(own, unfit, tensorflow)
    hosts = _texts(ranks, meeting, "host", shared_memory_rendezvous.host_key())
    name = "shared_memory" if len(set(hosts)) == 1 else "mpi"
    communicator, reason = _connect(name, strategy, ranks, meeting)
    if communicator is None:
        where = f"the workers are on {len(set(hosts))} hosts" if name == "mpi" else "the workers share a host"
        started = name != "mpi" or mpi.is_started_by_mpi()
        return Choice(own, f"{where}, and {name} is not possible: {reason}" if started else where, tensorflow)
    if ranks.size > 2:
        where = "all workers share a host" if name == "shared_memory" else "MPI has started the workers"
        return Choice(name, where, communicator)
    seconds = {each: transport_speed.measure(one, ranks) for each, one in ((name, communicator), (own, tensorflow))}
    faster, slower = sorted(seconds, key=lambda each: seconds[each])
    reason = f"the sum of 4 MB takes {1000 * seconds[faster]:.1f} ms, by {slower} {1000 * seconds[slower]:.1f} ms"
    if faster == name:
        return Choice(name, reason, communicator)
    communicator.calls(communicator.transport.close, _END_SECONDS)
    return Choice(own, reason, tensorflow)


def _unfit_devices(strategy: Any) -> str:
    devices = strategy.extended.worker_devices
    if "GPU" in devices[0]:
        return "the replicas are on GPUs"
    return "a worker has several replicas" if len(devices) > 1 else ""


def _connect(name: str, strategy: Any, ranks: Ranks, meeting: Meeting) -> tuple[BufferedCommunicator | None, str]:
    """Returns the workers' communicator by a transport, or None and why it is not possible, the same on all. A collective."""
    candidate, transport = CANDIDATES[name], None
    unfit = _DEVICES if _unfit_devices(strategy) else candidate.why_not(meeting)
    reason = _first_reason(ranks, meeting, f"{name}/fit", unfit)
    if not reason:
        try:
            transport, unfit = candidate.connect(meeting), ""
        except NoTransportError as e:
            unfit = str(e)
        reason = _first_reason(ranks, meeting, f"{name}/connected", unfit)
    if reason or transport is None:
        return None, reason
    return BufferedCommunicator(strategy, transport, meeting.timeout_seconds), ""


def _first_reason(ranks: Ranks, meeting: Meeting, what: str, mine: str) -> str:
    """Returns the first worker's text that is not empty, and whose it is unless it is all workers'. A collective."""
    texts = _texts(ranks, meeting, what, mine)
    first = next(filter(None, texts), "")
    who = [worker for worker, text in zip(meeting.workers, texts, strict=True) if text == first]
    return first if len(who) == ranks.size else f"{first} ({truncate(', '.join(who))})"


def _texts(ranks: Ranks, meeting: Meeting, what: str, mine: str) -> list[str]:
    """Returns each worker's text. A collective."""
    key = f"{meeting.name}/{what}"
    tf_cluster.publish(f"{key}/{ranks.rank}", f"{mine} ")
    ranks.barrier()
    milliseconds = int(1000 * _MEETING_SECONDS)
    return [tf_cluster.published(f"{key}/{rank}", milliseconds)[:-1] for rank in range(ranks.size)]


def _end(communicator: BufferedCommunicator) -> None:
    """Ends a transport, unless the others may not do so, too: then this process ends as it is."""
    code = exit_status.expected_exit_code()
    alone = code == 0 and exit_status.amid_training
    if communicator.calls.ended or alone or code not in (0, exit_status.PREEMPTED):
        return
    try:
        communicator.calls(communicator.transport.close, _END_SECONDS)
    except ClusterError:  # another one does not come: a library might wait for it even as the process ends
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    except Exception as e:  # when all is done
        logger.warning(f"the exchange of gradients did not end in order: {told(e)}")
    communicator.calls.abort("the exchange of gradients has ended.")
