"""One rank that gloo connects: compares its sums with NumPy's; the other rank may die first. Loads no TensorFlow.

Arguments: a folder for what the ranks tell each other, the rank, the number of ranks, and `well` or `kill`.
"""

import os
import signal
import sys
import time

import numpy as np

from tests.collectives.arithmetic import check_all
from tests.collectives.folder_store import open_store
from tfdist.collectives import gloo

folder, rank, size, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
transport = gloo.connect(open_store(folder, rank, size), ["127.0.0.1:1"] * size, range(size))
check_all(transport)
if how == "kill":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            transport.all_reduce(np.ones(10**6))
    except RuntimeError as e:
        print("lost", e, flush=True)
    os._exit(0)
if rank == 1:
    time.sleep(3)
began, used = time.monotonic(), time.process_time()
check_all(transport)
if rank == 0:
    waited, computed = time.monotonic() - began, time.process_time() - used
    assert computed < waited / 2, (computed, waited)  # it waits without work for the processor
print("done", flush=True)
transport.close()
