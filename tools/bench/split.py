"""A step with Adam whose slots are split over the workers, beside whole slots and PyTorch's ZeroRedundancyOptimizer.

The MLP of `peers`, 32 examples for each worker; each contender runs alone, as in `peers`. `whole` and `split` are tfdist without and
with `shard_optimizer`; `DDP` is DistributedDataParallel with Adam over gloo, and `ZeRO` the same with ZeroRedundancyOptimizer. Model
`wide` has 51.3 million parameters, whose two slots take 410 MB. `peak, MB` is the largest resident memory of a worker, the mean
over the workers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tools import netlab
from tools.bench import frame, models, peers
from tools.bench.record import Record

CONTENDERS = ("whole", "split", "DDP", "ZeRO")
CASES = [
    *(
        {"model": "mlp", "workers": workers, "rate": rate}
        for workers in (2, 4)
        for rate in (peers.HOST, "unlimited", "1gbit")
    ),
    {"model": "wide", "workers": 2, "rate": peers.HOST},
]
AGAINST = {"split": "whole", "ZeRO": "split", "DDP": "whole"}


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record | None:
    """Returns the samples of a case, in ms; None if it needs a laboratory that cannot run here."""
    rate = case["rate"]
    if rate != peers.HOST and (reason := netlab.missing()):
        print(f"split {case} is left out: {reason}", flush=True)
        return None
    chosen = [name for name in names or CONTENDERS if name in ("whole", "split") or not peers.lacks("DDP", rate)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name in chosen:
            found[name].append(_alone(name, case))
    samples = {name: [statistics.median(each["seconds"]) * 1000 for each in found[name]] for name in chosen}
    columns = {}
    for title, key, scale in (
        ("processor, ms", "processor", 1e3),
        ("peak, MB", "peak", 1e-6),
        ("sent, MB", "sent", 1e-6),
    ):
        if key != "sent" or rate != peers.HOST:
            columns[title] = {name: statistics.median(each[key] for each in found[name]) * scale for name in chosen}
    against = {name: other for name, other in AGAINST.items() if name in chosen and other in chosen}
    return Record("split", dict(case), "ms", samples, against, columns)


def _alone(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Runs a cluster of one contender; returns what `peers.alone` does, and `peak`, in bytes."""
    rate = case["rate"]
    options = {"rounds": peers.TURNS, "steps": peers.STEPS[rate], "batch": models.BATCH, "optimizer": "adam"}
    where: dict[str, Any] = {"rate": {peers.HOST: None, "unlimited": ""}.get(rate, rate), "pinned": True}
    options |= {"model": case["model"], "hook": "", "splits": name in ("split", "ZeRO")}
    if name in ("DDP", "ZeRO"):
        found = frame.run("tools.bench.torch_program", options, case["workers"], **where)
        whole = {key: found[key] for key in ("seconds", "sent")}
        used = [task["processor"] for task in found["tasks"]]
    else:
        options |= {"contenders": ["none"], "bucket_bytes": peers.bucket_bytes()}
        found = frame.run("tools.bench.link_program", options, case["workers"], **where)
        whole = {key: found[key]["none"] for key in ("seconds", "sent")}
        used = [task["processor"]["none"] for task in found["tasks"]]
    peak = statistics.fmean(task["peak"] for task in found["tasks"])
    return whole | {"processor": statistics.fmean(used), "peak": peak}
