"""One rank of several hosts, which are pretended: sums within them, then between. Loads no TensorFlow.

Arguments: a folder for what the ranks tell each other, the ranks of each host as JSON, what connects the hosts (`mpi`, `tcp`, or
`memory`, which needs nothing), a scenario, and the rank where no `mpirun` gives it.
"""

import json
import os
import sys

import numpy as np

from tests.collectives.arithmetic import check, check_all, same
from tests.collectives.folder_store import open_store
from tfdist.collectives import mpi, shared_memory, shared_memory_rendezvous, tcp, two_level

FOLDER, HOSTS, ACROSS, SCENARIO, *REST = sys.argv[1:]
HOSTS, SIZE = json.loads(HOSTS), sum(map(len, json.loads(HOSTS)))
RANK = int(REST[0] if REST else os.environ["OMPI_COMM_WORLD_RANK"])
STORE = open_store(FOLDER, RANK, SIZE)
put, get = STORE.put, STORE.get
if SCENARIO == "apart" and RANK == SIZE - 1:
    shared_memory_rendezvous.host_key = lambda: "elsewhere"


def agree(mine):
    put(f"agree/{RANK}", mine)
    return next(filter(None, [get(f"agree/{rank}", 60) for rank in range(SIZE)]), "")


def connect_leaders(leaders):
    if ACROSS == "mpi":
        return mpi.connect(RANK, SIZE, leaders)
    if ACROSS == "tcp":
        return tcp.connect(STORE.part("across"), ["127.0.0.1:1"] * SIZE, leaders)
    if RANK in leaders:
        return shared_memory.connect(STORE.part("across", leaders), slot_bytes=4096)
    return None


def well(transport):
    assert (transport.rank, transport.size) == (RANK, SIZE)
    check_all(transport, HOSTS)
    try:
        transport.all_to_all(np.zeros((SIZE + 1, 2)))
    except ValueError:
        check(transport, "sum", (3,), np.float32, [1], HOSTS)  # this error ends nothing
    else:
        raise AssertionError("no error")
    large = np.arange(3 * 10**6, dtype=np.float32)
    same(transport.all_reduce(large), large * SIZE)
    transport.close()


def endless(transport):
    while True:
        transport.all_reduce(np.zeros(10**6, np.float32))


found, reason = two_level.connect(STORE.part("local"), HOSTS, 0, agree, connect_leaders)
if found is None:
    print(f"flat: {reason}", flush=True)
    sys.exit()
print("ready", flush=True)
try:
    globals()[SCENARIO](found)
except (ConnectionError, RuntimeError) as e:
    print(f"lost: {e}", flush=True)
    put(f"lost/{RANK}", "")
    killed = int(get("killed", 20))
    if killed in [ranks[0] for ranks in HOSTS]:  # all others learn of its end, though none of them ends
        for rank in set(range(SIZE)) - {killed}:
            get(f"lost/{rank}", 20)
    os._exit(0)
print("done", flush=True)
