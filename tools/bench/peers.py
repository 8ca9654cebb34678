"""The same model on the same links under PyTorch's DistributedDataParallel (gloo), in the same processes.

A whole training step of the MLP, 32 examples for each worker, SGD, turn by turn; ratios are of what compresses alike. DDP's
PowerSGD has one bucket, as its hook aborts over gloo with several, and its bf16 hook a wrapper, as CPU builds refuse it by its
name. PyTorch comes with the extra `peers`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from tools.bench import link
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


def missing() -> str:
    """Returns what this benchmark lacks, or nothing."""
    return "" if importlib.util.find_spec("torch") else "PyTorch is not installed (pip install '.[peers]')"


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the samples of a case, in ms."""
    names = names or ["compute", *PAIRS, *(other for other in PAIRS.values() if other.startswith("DDP"))]
    pairs = {name: other for name, other in PAIRS.items() if name in names and other in names}
    return link.measure("peers", case, names, pairs, rounds)
