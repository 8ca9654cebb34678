"""By what gradients travel between workers: what was asked for, or what is faster; the same on all of them."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import mpi
from tfdist.collectives.buffered import BufferedCommunicator
from tfdist.collectives.buffers import BufferTransport
from tfdist.collectives.communicator import Communicator
from tfdist.collectives.cross_process import CrossProcessCommunicator
from tfdist.collectives.ranks import Ranks
from tfdist.collectives.requests import AllReduce
from tfdist.config.strategy import TRANSPORTS
from tfdist.errors import ClusterError, ConfigError, told, truncate
from tfdist.runtime import exit_status
from tfdist.runtime.log import logger

GRPC: Mapping[str, str] = types.MappingProxyType({"name": "grpc", "reason": "nothing else can be used here"})
_MEASURED, _REPEATS = 1_000_000, 7  # numbers of float32 that are summed, and how often
_END_SECONDS = 10.0  # for which the end of a transport is waited for
_DEVICES = "it moves arrays of one CPU, and each worker must have one replica, on its CPU: use nccl or grpc"
_REFUSED = (
    "MPI has connected other processes than the workers: start just the workers, all by one mpirun or srun --mpi=pmix"
)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A transport that TensorFlow does not have.

    Attributes:
        why_not: Of the number of workers, to why this process cannot use it, or an empty text. It is one of `reasons`.
        connect: Of this worker's number and that of all, to the transport, or None where they do not meet. A collective.
        reasons: All that may be said, so that a number tells the others which it is.
        refused: What is said where they do not meet.
    """

    why_not: Callable[[int], str]
    connect: Callable[[int, int], BufferTransport | None]
    reasons: tuple[str, ...]
    refused: str


CANDIDATES: Mapping[str, Candidate] = {"mpi": Candidate(mpi.why_not, mpi.connect, mpi.REASONS, _REFUSED)}


def choose(
    strategy: Any, workers: Sequence[str], rank: int, wanted: str, timeout_seconds: float
) -> tuple[Mapping[str, str], Communicator]:
    """Returns how gradients travel, `name` and `reason`, and the communicator. A collective.

    Args:
        strategy: Of the workers of a cluster.
        workers: Their names.
        rank: This one's number.
        wanted: `strategy.transport`.
        timeout_seconds: How long an exchange may take; 0 means for ever.

    Raises:
        ConfigError: What is wanted cannot be used, by any of the workers, or they want different ones. It is raised on all.
    """
    ranks = Ranks(strategy, rank, len(workers))
    tensorflow = CrossProcessCommunicator(strategy)
    if ranks.size == 1:
        return GRPC, tensorflow
    wishes = ranks.gather(TRANSPORTS.index(wanted))[:, 0].astype(int)
    if len(set(wishes)) > 1:
        said = ", ".join(sorted({TRANSPORTS[wish] for wish in wishes}))
        raise ConfigError(f"strategy.transport must be the same for all workers. Received: {said}.")
    if wanted in ("grpc", "nccl"):
        return {"name": wanted, "reason": "strategy.transport"}, tensorflow
    devices = strategy.extended.worker_devices
    unfit = _DEVICES if len(devices) > 1 or "GPU" in devices[0] else ""
    if wanted == "auto" and ranks.any(bool(unfit)):
        return {"name": "nccl" if "GPU" in devices[0] else "grpc", "reason": "TensorFlow's choice"}, tensorflow
    found: dict[str, BufferedCommunicator] = {}
    for name in [wanted] if wanted != "auto" else CANDIDATES:
        reason = _why_not(ranks, CANDIDATES[name], unfit, workers)
        transport = None if reason else CANDIDATES[name].connect(ranks.rank, ranks.size)
        if not reason and ranks.any(transport is None):
            reason = f"{CANDIDATES[name].refused}."
        if transport and not reason:
            found[name] = BufferedCommunicator(strategy, transport, timeout_seconds)
            atexit.register(_end, found[name])
        elif wanted != "auto":
            raise ConfigError(f"strategy.transport={name} is not possible: {reason}")
    if wanted != "auto":
        return {"name": wanted, "reason": "strategy.transport"}, found[wanted]
    return _fastest(ranks, {"grpc": tensorflow, **found}) if found else (GRPC, tensorflow)


def _why_not(ranks: Ranks, candidate: Candidate, unfit: str, workers: Sequence[str]) -> str:
    """Returns why some workers cannot use a transport, and which. A collective."""
    texts = ("", _DEVICES, *candidate.reasons)
    codes = ranks.gather(texts.index(unfit or candidate.why_not(ranks.size)))[:, 0].astype(int)
    if not codes.any():
        return ""
    first = next(code for code in codes if code)
    who = [worker for worker, code in zip(workers, codes, strict=True) if code == first]
    return f"{texts[first]} ({truncate(', '.join(who))})."


def _fastest(ranks: Ranks, candidates: Mapping[str, Communicator]) -> tuple[Mapping[str, str], Communicator]:
    """Returns what sums gradients in the least time, as the chief has measured it. A collective."""
    mine = [_milliseconds(communicator) for communicator in candidates.values()]
    times = dict(zip(candidates, ranks.gather(*mine)[0], strict=True))
    best = min(times, key=lambda name: times[name])
    rest = ", ".join(f"{ms:.1f} ms by {name}" for name, ms in times.items() if name != best)
    reason = f"{4 * _MEASURED // 10**6} MB summed in {times[best]:.1f} ms, {rest}"
    if ranks.is_chief:
        logger.info(f"gradients travel by {best}: {reason}.")
    for name, communicator in candidates.items():
        if name != best and isinstance(communicator, BufferedCommunicator):
            _end(communicator)
    return {"name": best, "reason": reason}, candidates[best]


def _sum(numbers: tf.Tensor) -> Generator[Any, Any, tf.Tensor]:
    (total,) = yield AllReduce([numbers])
    return total


def _milliseconds(communicator: Communicator) -> float:
    @functools.partial(tf.function, autograph=False)
    def total(numbers: tf.Tensor) -> tf.Tensor:
        (result,) = communicator.run([_sum(numbers)])
        return result

    numbers = tf.zeros([_MEASURED])
    total(numbers)
    found = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        total(numbers).numpy()  # which waits for it
        found.append(1000 * (time.perf_counter() - began))
    return statistics.median(found)


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
