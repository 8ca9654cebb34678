"""Step time and bytes of each compressor, on links of several rates.

Model `mlp`: a whole training step, 32 examples for each worker (or `batch`), SGD; `compute` is the same step without any other worker. Model
`resnet50`: the sum of gradients of its shapes alone. Floor: what an exchange needs at least by the alpha-beta model, with the
goodput that TCP reached on the same link before, for the bytes that a compressor plans to send; with a step's computation
beside it, where there is one, it cannot take less than the larger of the two. Bytes sent are the interface's, with headers and
acknowledgements: at 100 Mbit/s those of each packet of 1500 bytes, 6 % and more; on faster links the system cuts packets later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.bench import models
from tools.bench.frame import run as run_cluster
from tools.bench.record import Record, against

NEEDS_LAB = True
COMPRESSED = ("bf16", "fp16", "int8", "int8 sum", "powersgd", "topk")
RATES = ("", "10gbit", "1gbit", "100mbit")
STEPS = {"": 5, "10gbit": 5, "1gbit": 3, "100mbit": 1}  # of a round
CASES = [
    {"model": model, "workers": workers, "rate": rate or "unlimited"}
    for model in ("mlp", "resnet50")
    for workers in (2, 4)
    for rate in RATES
]
# So many examples that computation takes about as long as the exchange: how much of both goes on at the same time?
CASES.append({"model": "mlp", "workers": 2, "rate": "1gbit", "batch": 256})
UNBUCKETED = "none/0"


def contenders(case: dict[str, Any]) -> list[str]:
    """Returns the names of all."""
    if "batch" in case:
        return ["compute", "tf_keras", UNBUCKETED, "none"]
    own = ["compute", "tf_keras"] if case["model"] == "mlp" else ["TensorFlow"]
    return [*own, UNBUCKETED, "none", *COMPRESSED]


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the samples of a case, in ms, of all contenders or some."""
    names = names or contenders(case)
    return measure("link", case, names, against("none", names), rounds)


def measure(bench: str, case: dict[str, Any], names: Sequence[str], against: dict[str, str], rounds: int) -> Record:
    """Returns the samples of some contenders, in ms.

    Args:
        bench: Whose record it is.
        case: With `model`, `workers` and `rate`.
        names: The contenders' names, as `link_program` knows them.
        against: As a `Record`'s.
        rounds: How many.
    """
    from tfdist.config import StrategyConfig

    rate = "" if case["rate"] == "unlimited" else case["rate"]
    options = {
        "model": case["model"],
        "contenders": list(names),
        "rounds": rounds,
        "steps": STEPS[rate],
        "bucket_bytes": StrategyConfig().bucket_bytes,
        "batch": case.get("batch", models.BATCH),
    }
    found = run_cluster("tools.bench.link_program", options, int(case["workers"]), rate=rate)
    size, latency = int(case["workers"]), found["latency"]
    columns = {
        "sent, MB": {name: count / 1e6 for name, count in found["sent"].items()},
        "planned, MB": {name: count / 1e6 for name, count in found["planned"].items()},
    }
    note = f"The sum of one number takes {latency * 1000:.1f} ms"
    if rate and found["bytes_per_second"]:
        speed = found["bytes_per_second"]
        columns["floor, ms"] = {
            name: floor(count, size, latency, speed) * 1000 for name, count in found["planned"].items() if count
        }
        note += f"; TCP reaches {speed * 8 / 1e6:.0f} Mbit/s"
    facts = {"latency": latency, "bytes_per_second": found["bytes_per_second"]}
    samples = {name: [each * 1000 for each in mine] for name, mine in found["seconds"].items()}
    return Record(bench, dict(case), "ms", samples, against, columns, facts, note + ".")


def floor(sent: float, size: int, latency: float, speed: float) -> float:
    """Returns the seconds that an exchange takes at least: 2 (N - 1) messages' latency, and the bytes that a rank sends.

    Args:
        sent: Bytes.
        size: The number of ranks, N.
        latency: Seconds of a sum of one number, which is 2 (N - 1) messages.
        speed: Bytes a second.
    """
    return (latency if size > 1 else 0.0) + sent / speed
