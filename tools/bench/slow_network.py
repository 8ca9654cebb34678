"""The time to 97 % of the test digits on slow links, and the bytes that a worker sends until then.

An MLP of 650,000 parameters, global batch 64, SGD (0.02, momentum 0.9), one seed in each round. Accuracy is looked at after every 10 steps,
of `sync_every 50` after every 50, when the workers' weights are equal; the seconds are those of the steps between, without the first one, in
which the step is traced. `sync_every` takes the mean of the weights. PyTorch's
DistributedDataParallel (DDP), over gloo, has processes of its own. The delay is that of a message from one host to another.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tools.bench import frame, peers
from tools.bench.record import Record, against

NEEDS_LAB = True
WIDTHS = (64, 768, 768, 10)
TARGET, MOST_STEPS, EVERY, BATCH = 0.97, 800, 10, 64
LEARNING_RATE, MOMENTUM = 0.02, 0.9
_LINKS = (("10gbit", 0), ("1gbit", 0), ("100mbit", 0), ("1gbit", 20))
CASES = [{"workers": 2, "rate": rate, "delay": delay} for rate, delay in _LINKS]
CASES += [{"workers": 4, "rate": rate, "delay": 0} for rate in ("1gbit", "100mbit")]
SYNCHRONOUS = ("none", "bf16", "int8", "powersgd")
LOCAL = {"sync_every 10": 10, "sync_every 50": 50}
DDP = {"DDP": "", "DDP powersgd r4": "powersgd r4"}
_NAMES = (*SYNCHRONOUS, *LOCAL, *DDP)


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the seconds of each contender until the target, a sample for each seed."""
    chosen = [name for name in names or _NAMES if not peers.lacks(name, case["rate"])]
    where = {"rate": case["rate"], "delay": float(case["delay"]), "pinned": True}
    runs: dict[str, list[dict[str, Any]]] = {}
    groups = [(0, [name for name in chosen if name in SYNCHRONOUS])]
    groups += [(every, [name]) for name, every in LOCAL.items() if name in chosen]
    for every, group in groups:
        if group:
            options = {"sync_every": every, "names": group, "seeds": rounds}
            runs |= frame.run("tools.bench.slow_network_program", options, case["workers"], **where)["runs"]
    for name in [name for name in DDP if name in chosen]:
        options = {"hook": DDP[name], "seeds": rounds}
        runs[name] = frame.run("tools.bench.slow_network_torch", options, case["workers"], **where)["runs"]
    columns = {
        title: {name: statistics.median(each[key] for each in runs[name]) for name in chosen}
        for title, key in (("steps", "steps"), ("sent, MB", "sent"))
    }
    missed = sorted({name for name in chosen for each in runs[name] if not each["reached"]})
    note = f"Not reached within {MOST_STEPS} steps in every run of {', '.join(missed)}." if missed else ""
    samples = {name: [each["seconds"] for each in runs[name]] for name in chosen}
    return Record("slow_network", dict(case), "s", samples, against("none", chosen), columns, note=note)
