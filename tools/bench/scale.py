"""How step time and bytes grow with the number of workers, each with the same work.

Step of the MLP at 1 Gbit/s, 32 examples for each worker. All workers share this machine's cores, so `compute`, the same step
without any other worker, grows, too. Model: the larger of computation and exchange, the latter by the alpha-beta model. For
numbers of workers that no machine here has, the model's figures alone are given, with the computation of one worker.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tools.bench import compressors, link, models
from tools.bench.record import Record

NEEDS_LAB = True
NAMES = ("none", "bf16", "int8", "powersgd")
CASES = [{"model": "mlp", "workers": workers, "rate": "1gbit"} for workers in (1, 2, 4, 8)]
CASES += [{"model": "mlp", "workers": workers, "rate": "1gbit", "by": "extrapolation"} for workers in (64, 512, 4096)]
DEPENDENT = {"powersgd": 2}  # sums that wait for each other, if not 1
# Of the extrapolation: seconds, seconds for a message, bytes a second.
COMPUTE, MESSAGE, SPEED = 0.06, 0.001, 0.95e9 / 8


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the samples of a case, in ms; of an extrapolation one figure each."""
    chosen = [name for name in names or NAMES if name != "compute"]
    size = case["workers"]
    if "by" in case:
        samples = {name: [modelled(name, size, COMPUTE, MESSAGE, SPEED) * 1000] for name in chosen}
        note = (
            f"Not measured: computed with {COMPUTE * 1000:.0f} ms of computation, {MESSAGE * 1000:.0f} ms for each of "
            f"2 (N - 1) messages of a sum, {SPEED * 8 / 1e6:.0f} Mbit/s"
        )
        return Record("scale", dict(case), "ms", samples, note=note + ".")
    found = link.measure("scale", case, ["compute", *chosen], {}, rounds)
    latency, speed = found.facts["latency"], found.facts["bytes_per_second"] or SPEED
    compute, message = statistics.median(found.samples["compute"]) / 1000, latency / max(1, 2 * (size - 1))
    found.columns.pop("floor, ms", None)
    found.columns["model, ms"] = {name: modelled(name, size, compute, message, speed) * 1000 for name in chosen}
    return found


def modelled(name: str, size: int, compute: float, message: float, speed: float) -> float:
    """Returns the seconds of a step by the model.

    Args:
        name: The compressor's.
        size: The number of workers.
        compute: Seconds of computation.
        message: Seconds for a message.
        speed: Bytes a second.
    """
    from tfdist.compression.base import NONE

    sent = (compressors.make(name) or NONE).bytes_per_step(models.mlp_shapes(), size)
    return max(compute, DEPENDENT.get(name, 1) * 2 * (size - 1) * message + sent / speed)
