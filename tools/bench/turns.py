"""What the programs of `tools.bench.peers` have in common, without any library that is measured.

A program times its steps in turns. All workers begin a turn together, and the first turn, in which a library compiles, does not
count.
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil

from tools.bench import models

_LIBRARIES = ("tensorflow", "keras", "tf_keras", "torch", "jax", "tfdist")


def cluster() -> tuple[Sequence[str], int]:
    """Returns the workers' addresses and this worker's index, as TF_CONFIG says."""
    told = json.loads(os.environ["TF_CONFIG"])
    return told["cluster"]["worker"], told["task"]["index"]


def examples(rank: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the examples and labels of a worker, 16 batches.

    Args:
        rank: The worker's index.
        batch: Examples of a batch.
    """
    rng = np.random.default_rng(rank)
    data = rng.standard_normal((16 * batch, models.MLP[0]), np.float32)
    return data, rng.integers(0, models.MLP[-1], len(data), np.int32)


def in_laboratory() -> bool:
    """Whether this process has a host of `tools.netlab` for itself."""
    return "eth0" in psutil.net_if_addrs() and psutil.net_if_addrs()["eth0"][0].address.startswith("10.77.0.")


def sent() -> int:
    """Returns the bytes that this host has sent to others."""
    return sum(each.bytes_sent for name, each in psutil.net_io_counters(pernic=True).items() if name != "lo")


def measure(step: Callable[[], Any], meet: Callable[[], Any], rounds: int, steps: int) -> dict[str, Any]:
    """Returns what a contender's steps take.

    Args:
        step: Trains on a batch, and returns when it is done.
        meet: Returns when all workers have called it.
        rounds: Turns that count.
        steps: Steps of a turn.

    Returns:
        `seconds`, the median step of each turn; `sent`, bytes of a step; `processor`, seconds of a step in which this process's
        threads used a core, user and system; `peak`, bytes; `libraries`, those that this process has loaded.
    """
    seconds, counted, processor = [], 0, 0.0
    for number in range(rounds + 1):
        meet()
        mine, before, used = [], sent(), time.process_time()
        for _ in range(steps):
            began = time.perf_counter()
            step()
            mine.append(time.perf_counter() - began)
        used = time.process_time() - used
        meet()
        if number:
            seconds.append(statistics.median(mine))
            counted += sent() - before
            processor += used
    loaded = [name for name in _LIBRARIES if name in sys.modules]
    count = rounds * steps
    return {
        "seconds": seconds,
        "sent": counted / count,
        "processor": processor / count,
        "peak": peak_bytes(),
        "libraries": loaded,
    }


def peak_bytes() -> int:
    """Returns the largest resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(folder: pathlib.Path, rank: int, results: dict[str, Any]) -> None:
    """Writes a worker's results, and those of worker 0 as the whole's, too."""
    (folder / f"results-{rank}.json").write_text(json.dumps(results))
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
