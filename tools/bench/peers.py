"""The same model under tfdist, PyTorch's DistributedDataParallel (DDP), JAX and tf_keras.

A whole training step of the MLP, 32 examples for each worker, SGD. Each contender runs alone, in processes of its own that hold
nothing of the others, in turn: a cluster for each contender and round. A sample is the median over the turns of one cluster;
ratios are of what compresses alike, of the same round. `processor`: milliseconds in which a process used a core in a step, user
and system, the mean over the workers; what the kernel does for the network outside of the processes is not in it. Each worker has
its own cores where there are enough. Rate `host`: all workers on one host, without a laboratory; else each has a host of its own,
and sends by its link.

`bf16 by grpc` is tfdist with the compressor bf16 and the transport grpc; without `by` the transport is `auto`: shared memory on
one host, TCP in the laboratory.
DDP is over gloo; its PowerSGD has one bucket, as its hook aborts over gloo with several, and its bf16 hook a wrapper, as CPU builds
refuse it by its name. JAX is `shard_map` in a `jit` with donated weights, over gloo, and float32 alone: XLA turns numbers of 16
bits into float32 before it sends them. tf_keras is the step of its `fit` under TensorFlow's own MultiWorkerMirroredStrategy.
PyTorch and JAX come with the extra `peers`.
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from tools import netlab
from tools.bench import frame, link, models
from tools.bench.record import Record

HOST = "host"
DDP = {
    "none": "DDP",
    "bf16": "DDP bf16",
    "fp16": "DDP fp16",
    "powersgd": "DDP powersgd r4",
    "powersgd r1": "DDP powersgd r1",
}
OTHERS = [*DDP.values(), "JAX", "tf_keras"]
PAIRS = {**DDP, "int8": "bf16", "topk": "powersgd", "JAX": "DDP", "tf_keras": "DDP"}
PAIRS |= {f"{name} by {transport}": DDP[name] for transport in ("grpc", "tcp", "shared_memory", "mpi") for name in DDP}
CASES = [
    {"model": "mlp", "workers": workers, "rate": rate}
    for workers in (2, 4)
    for rate in (HOST, *(rate or "unlimited" for rate in link.RATES))
]
TURNS = 5  # of one cluster
STEPS = {**{rate or "unlimited": steps for rate, steps in link.STEPS.items()}, HOST: 10}  # of a turn
_EXTRA = "(pip install '.[peers]')"


def contenders(rate: str) -> list[str]:
    """Returns the names of all at a rate."""
    if rate == HOST:
        transports = ("", " by grpc", " by tcp", " by mpi")
        own = [name + transport for name in ("none", "bf16") for transport in transports]
        return ["compute", *own, "DDP", "DDP bf16", "JAX", "tf_keras"]
    return ["compute", *DDP, "int8", "topk", *(f"{name} by grpc" for name in DDP), *OTHERS]


def lacks(name: str, rate: str) -> str:
    """Returns why a contender cannot run here, or an empty text."""
    transport = name.partition(" by ")[2]
    if transport in ("shared_memory", "mpi") and rate != HOST:
        return f"{transport} is measured on one host only (rate={HOST})"
    if name.startswith("DDP") and not _has("torch"):
        return f"PyTorch is not installed {_EXTRA}"
    if name == "JAX" and not _has("jax"):
        return f"JAX is not installed {_EXTRA}"
    if name == "tf_keras" and not _has("tf_keras"):
        return "tf_keras is not installed (pip install '.[dev]')"
    if transport == "mpi" and not (_has("mpi4py") and shutil.which("mpirun")):
        return "mpi4py or Open MPI is not installed (pip install '.[mpi]', make system-deps)"
    return ""


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record | None:
    """Returns the samples of a case, in ms; None if it has no contender that can run here."""
    workers, rate = int(case["workers"]), case["rate"]
    if rate != HOST and (reason := netlab.missing()):
        print(f"peers {case} is left out: {reason}", flush=True)
        return None
    chosen = []
    for name in names or contenders(rate):
        if reason := lacks(name, rate):
            print(f"{name} is left out: {reason}", flush=True)
        else:
            chosen.append(name)
    if not chosen:
        return None
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    failures = {}
    for number in range(rounds):
        for name in [name for name in chosen if name not in failures]:
            try:
                found[name].append(alone(name, workers, rate))
            except frame.TaskFailed as e:  # the others go on, for hours
                print(f"peers {case}: {name}: {e}", file=sys.stderr, flush=True)
                failures[name] = f"{name} failed in round {number + 1} and is left out."
    chosen = [name for name in chosen if name not in failures]
    if not chosen:
        raise frame.TaskFailed(" ".join(failures.values()))

    def median(name: str, of: str) -> float:
        return statistics.median(each[of] for each in found[name])

    samples = {name: [statistics.median(each["seconds"]) * 1000 for each in found[name]] for name in chosen}
    columns = {"processor, ms": {name: median(name, "processor") * 1000 for name in chosen}}
    if rate != HOST:  # there all workers' bytes pass one interface
        columns["sent, MB"] = {name: median(name, "sent") / 1e6 for name in chosen}
    against = {name: other for name, other in PAIRS.items() if name in chosen and other in chosen}
    return Record("peers", dict(case), "ms", samples, against, columns, note=" ".join(failures.values()))


def bucket_bytes() -> int:
    """Returns the default size of a bucket."""
    from tfdist.config import StrategyConfig

    return StrategyConfig().bucket_bytes


def alone(name: str, workers: int, rate: str, turns: int = TURNS, steps: int = 0) -> dict[str, Any]:
    """Runs a cluster of one contender.

    Args:
        name: `<compressor>[ by <transport>]`, `compute`, `tf_keras`, `JAX`, or `DDP` and the name of a hook.
        workers: How many.
        rate: `host`, or that of each one's link, as for `Lab`, or `unlimited`.
        turns: How many count.
        steps: Of a turn; 0 means as many as `STEPS` has.

    Returns:
        `seconds` of its turns; `sent`, bytes of a step; `processor`, seconds of a step, the mean over the workers; `libraries`,
        those that a peer's process has loaded; `transport`, of tfdist's.
    """
    options: dict[str, Any] = {"rounds": turns, "steps": steps or STEPS[rate], "batch": models.BATCH}
    where: dict[str, Any] = {"rate": {HOST: None, "unlimited": ""}.get(rate, rate), "pinned": True}
    kind, _, how = name.partition(" ")
    if program := {"DDP": "torch", "JAX": "jax", "tf_keras": "tf_keras"}.get(kind):
        found = frame.run(f"tools.bench.{program}_program", options | {"hook": how}, workers, **where)
        used = [task["processor"] for task in found["tasks"]]
        return {key: found[key] for key in ("seconds", "sent", "libraries")} | {"processor": statistics.fmean(used)}
    compressor, _, transport = name.partition(" by ")
    options |= {"model": "mlp", "contenders": [compressor], "transport": transport or "auto"}
    options["bucket_bytes"] = bucket_bytes()
    found = frame.run("tools.bench.link_program", options, workers, **where, mpirun=transport == "mpi")
    used = [task["processor"][compressor] for task in found["tasks"]]
    return {
        "seconds": found["seconds"][compressor],
        "sent": found["sent"][compressor],
        "processor": statistics.fmean(used),
        "transport": found["transport"],
    }
