"""The same model on the same links under PyTorch's DistributedDataParallel (gloo).

A whole training step of the MLP, 32 examples for each worker, SGD. Each contender runs alone, in processes of its own that hold
nothing of the others, in turn: a cluster for each contender and round. A sample is the median over the turns of one cluster;
ratios are of what compresses alike, of the same round. DDP's PowerSGD has one bucket, as its hook aborts over gloo with
several, and its bf16 hook a wrapper, as CPU builds refuse it by its name. PyTorch comes with the extra `peers`.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from typing import Any

from tools.bench import frame, link, models
from tools.bench.record import Record

NEEDS_LAB = True
PAIRS = {
    "none": "DDP",
    "bf16": "DDP bf16",
    "fp16": "DDP fp16",
    "powersgd": "DDP powersgd r4",
    "powersgd r1": "DDP powersgd r1",
    "int8": "bf16",
    "topk": "powersgd",
}
CASES = [{"model": "mlp", "workers": workers, "rate": rate or "unlimited"} for workers in (2, 4) for rate in link.RATES]
TURNS = 5  # of one cluster


def missing() -> str:
    """Returns what this benchmark lacks, or nothing."""
    return "" if importlib.util.find_spec("torch") else "PyTorch is not installed (pip install '.[peers]')"


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the samples of a case, in ms."""
    names = names or ["compute", *PAIRS, *(other for other in PAIRS.values() if other.startswith("DDP"))]
    rate = "" if case["rate"] == "unlimited" else case["rate"]
    samples: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found = alone(name, int(case["workers"]), rate)
            samples[name].append(statistics.median(found["seconds"]) * 1000)
            sent[name].append(found["sent"] / 1e6)
    against = {name: other for name, other in PAIRS.items() if name in names and other in names}
    columns = {"sent, MB": {name: statistics.median(counts) for name, counts in sent.items()}}
    return Record("peers", dict(case), "ms", samples, against, columns)


def alone(name: str, workers: int, rate: str) -> dict[str, Any]:
    """Runs a cluster of one contender.

    Args:
        name: As `link_program` knows it, or `DDP` and the name of a hook.
        workers: How many.
        rate: Of each one's link, as for `Lab`; empty without a limit.

    Returns:
        `seconds` of its turns, `sent` bytes of a step, and whether the process has loaded `tensorflow`.
    """
    from tfdist.config import StrategyConfig

    options: dict[str, Any] = {"rounds": TURNS, "steps": link.STEPS[rate], "batch": models.BATCH}
    if name.startswith("DDP"):
        return frame.run("tools.bench.torch_program", options | {"hook": name[4:]}, workers, rate=rate)
    options |= {"model": "mlp", "contenders": [name], "bucket_bytes": StrategyConfig().bucket_bytes}
    found = frame.run("tools.bench.link_program", options, workers, rate=rate)
    return {"seconds": found["seconds"][name], "sent": found["sent"][name], "tensorflow": True}
