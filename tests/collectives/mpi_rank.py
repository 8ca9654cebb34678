"""One rank that `mpirun` has started: compares the sums by MPI with NumPy's, and waits for another rank. Loads no TensorFlow."""

import time

from mpi4py import MPI

from tests.collectives.arithmetic import check_all
from tfdist.collectives import mpi

size = MPI.COMM_WORLD.Get_size()
transport = mpi.connect((MPI.COMM_WORLD.Get_rank() + 1) % size, size, range(size))  # in another order than MPI's
check_all(transport)
MPI_RANKS = {rank: (rank - 1) % size for rank in range(size)}  # of the transport's
if transport.rank == 1:
    MPI.COMM_WORLD.recv(source=MPI_RANKS[0])  # or it might be late, and nobody would wait for rank 1
    time.sleep(3)
began, used = time.monotonic(), time.process_time()
if transport.rank == 0:
    MPI.COMM_WORLD.send("waits from now on", dest=MPI_RANKS[1])
check_all(transport)
if transport.rank == 0:
    waited, computed = time.monotonic() - began, time.process_time() - used
    assert computed < waited / 2, (computed, waited)  # it waits without work for the processor
print("done", flush=True)
transport.close()
