"""One rank that shares memory with others: `python shared_memory_rank.py FOLDER RANK SIZE SCENARIO OPTIONS`. Loads no TensorFlow.

The store is a folder of files. A rank prints `ready` once it is connected, and how its scenario has ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import resource
import signal
import sys
import threading
import time

import numpy as np

from tests.collectives.arithmetic import METHODS, TYPES, check, check_all, numbers, same
from tests.collectives.folder_store import open_store
from tfdist.collectives import shared_memory
from tfdist.collectives.buffer_transport import NoTransportError

FOLDER, RANK, SIZE = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
OPTIONS = json.loads(sys.argv[5])
SLOT = 4096
STORE = open_store(FOLDER, RANK, SIZE)
put, get = STORE.put, STORE.get


def arithmetic(transport):
    check_all(transport)
    for root in range(SIZE):
        for dtype in TYPES:
            for shape in [(), (0,), (7, 3), (SLOT - 1,), (2 * SLOT + 1,)]:
                values = [numbers([root], shape, dtype, rank) for rank in range(SIZE)]
                same(transport.broadcast(values[RANK].copy(), root), values[root])
    same(transport.broadcast(np.arange(4 * SLOT)[::2] + RANK, 0), np.arange(4 * SLOT)[::2])
    for call, error in [
        (lambda: transport.all_reduce(np.array([{}])), TypeError),
        (lambda: transport.all_gather(np.array([{}])), TypeError),
        (lambda: transport.all_to_all(np.zeros((SIZE + 1, 2))), ValueError),
        (lambda: transport.all_to_all(np.float32(1)[...]), ValueError),
        (lambda: transport.broadcast(np.array([{}]), 0), TypeError),
        (lambda: transport.broadcast(np.zeros(3), SIZE), ValueError),
        (lambda: transport.broadcast(np.zeros(3), -1), ValueError),
    ]:
        try:
            call()
        except error:
            continue
        raise AssertionError("no error")
    check(transport, "sum", (3,), np.float32, [1])  # these errors end nothing


def many(transport):
    draw = np.random.default_rng(OPTIONS["seed"])  # the same on all ranks
    pause = np.random.default_rng([OPTIONS["seed"], RANK])
    for number in range(OPTIONS["calls"]):
        size = int(draw.integers(0, 10)) if draw.random() < 0.7 else int(draw.integers(0, 2 * SLOT))
        check(transport, METHODS[draw.integers(4)], (size,), TYPES[draw.integers(len(TYPES))], [number])
        if pause.random() < 0.05:
            time.sleep(pause.random() / 200)


def endless(transport):
    array = np.zeros(10**6, np.float32)
    while True:
        transport.all_reduce(array)


def forks(transport):
    transport.all_reduce(np.zeros(3))
    if RANK == 1 and os.fork() == 0:
        try:
            transport.all_reduce(np.zeros(3))
        except ConnectionError:
            put("child", str(os.getpid()))
            time.sleep(100)
        os._exit(1)
    if RANK == 1:
        get("child", 60)
    endless(transport)


def stops(transport):
    """Rank 1 stops as Ctrl-Z does it; rank 0 waits, without work for the processor, and its other threads run."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    ticks = []
    threading.Thread(target=lambda: [(time.sleep(0.01), ticks.append(0)) for _ in range(50)]).start()
    before = time.monotonic(), time.process_time()
    check(transport, "sum", (100_000,), np.float32, [1])
    if RANK == 0:
        assert ticks
        assert time.process_time() - before[1] < (time.monotonic() - before[0]) / 2


def closes(transport):
    """Rank 0 waits for rank 1, until another thread closes it."""
    if RANK == 0:
        threading.Timer(0.3, transport.close).start()
        try:
            transport.all_reduce(np.zeros(3))
        finally:
            put("closed", "")
    get("closed", 60)
    transport.all_reduce(np.zeros(3))  # rank 0 had written its numbers
    transport.all_reduce(np.zeros(3))


def differs(transport):
    transport.all_reduce(np.zeros(3 + RANK, np.float32))


def roots_differ(transport):
    transport.broadcast(np.zeros(3, np.float32), RANK)


def ends(transport):
    """The last rank ends first, in order, and has told the others all they need."""
    for _ in range(50):
        transport.all_reduce(np.zeros(5))


def main():
    if "user" in OPTIONS:
        os.setuid(OPTIONS["user"])
    if "largest_file" in OPTIONS:
        resource.setrlimit(resource.RLIMIT_FSIZE, (OPTIONS["largest_file"],) * 2)

    def lookup(key, timeout_seconds):
        text = STORE.read(key, timeout_seconds)
        if OPTIONS.get("unreachable") and key.endswith("address/0"):
            return json.dumps(json.loads(text) | {"folder": "/of-another-host"})
        return text

    store = dataclasses.replace(STORE, read=lookup, seconds=OPTIONS.get("meeting_seconds", 60))
    slot = OPTIONS.get("slot", SLOT)
    try:
        transport = shared_memory.connect(store, OPTIONS.get("timeout_seconds", 0), slot_bytes=slot)
        print("ready", flush=True)
        globals()[sys.argv[4]](transport)
    except (ConnectionError, TimeoutError, RuntimeError) as e:
        print(f"{type(e).__name__}: {e}", flush=True)
        if "transport" in locals() and not isinstance(e, NoTransportError):
            try:
                transport.all_reduce(np.zeros(1))
            except ConnectionError as again:
                print(f"again: {again}", flush=True)
            transport.close()
            transport.close()
    else:
        print("done", flush=True)
        if "close" in OPTIONS:
            transport.close()


main()
