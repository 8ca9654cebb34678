"""One rank of any transport of `CANDIDATES`: compares its results with NumPy's, then sums without end. Starts no TensorFlow.

Arguments: a folder for the texts that the ranks exchange, the transport's name, the number of ranks, and the rank where no `mpirun`
gives it. It prints `pid N` once the results are right, and how the sums ended.
"""

import json
import os
import sys

import numpy as np

from tests.collectives.arithmetic import check_all
from tests.collectives.folder_store import open_store
from tfdist.collectives import transports
from tfdist.collectives.ranks import Ranks

folder, name, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
rank = int(sys.argv[4] if len(sys.argv) > 4 else os.environ["OMPI_COMM_WORLD_RANK"])
store = open_store(folder, rank, size)
transports.Bootstrap.store = lambda self: store


class FolderRanks(Ranks):
    """Ranks that gather through the folder."""

    calls = 0

    def gather(self, *numbers):
        self.calls += 1
        store.put(f"gather/{self.calls}/{rank}", json.dumps([float(number) for number in numbers]))
        return np.array([json.loads(store.get(f"gather/{self.calls}/{each}")) for each in range(size)])


ranks = FolderRanks(None, rank, [f"worker:{each}" for each in range(size)])
found = transports.connect(name, transports.Bootstrap("job", ranks, ["127.0.0.1:1"] * size, 0), "")
if not found.transport:
    sys.exit(f"not connected: {found.reason}")
check_all(found.transport)
print(f"pid {os.getpid()}", flush=True)
try:
    while True:
        found.transport.all_reduce(np.ones(10**6))
except (ConnectionError, RuntimeError) as e:
    print(f"lost: {type(e).__name__}: {e}", flush=True)
os._exit(3)
