"""What compressors cost and save, without a shaped link: `python -m tools.bench.compression`.

Codec: nanoseconds per number on all cores, of one rank's part of an exchange with nobody else: rounding, packing, unpacking,
error feedback; beside it "pass", which reads all numbers and writes as many. Exchange: the sum of all gradients of a model over
a local cluster, a core for each worker, and its ratio to one all-reduce of float32 by TensorFlow in the same round. Medians
(least to most).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.cluster import local_cluster
from tfdist.launcher import Launcher

ROOT = pathlib.Path(__file__).parents[2]


def _resnet50() -> list[tuple[int, ...]]:
    import keras

    return [tuple(variable.shape) for variable in keras.applications.ResNet50(weights=None).trainable_variables]


def _transformer() -> list[tuple[int, ...]]:
    width, inner, words = 256, 1024, 8000
    layer = [(width, width), (width,)] * 4 + [(width,)] * 4 + [(width, inner), (inner,), (inner, width), (width,)]
    return [*layer * 4, (width, words), (words,)]


SHAPES: dict[str, Callable[[], list[tuple[int, ...]]]] = {"resnet50": _resnet50, "transformer": _transformer}


def _make(name: str, **arguments: Any) -> Callable[[], Any]:
    def make() -> Any:
        from tfdist import compression
        from tfdist.config import CompressionConfig

        return compression.create(CompressionConfig(name, **arguments)) or compression.NoCompression()

    return make


COMPRESSORS = {
    "none": _make("none"),
    "bf16": _make("bf16"),
    "fp16": _make("fp16"),
    "int8": _make("int8"),
    "int8-sum": _make("int8", transport="sum"),
    "powersgd": _make("powersgd", start_powerSGD_iter=0),
    "topk": _make("topk"),
    "topk-exact": _make("topk", selection="exact"),
}


def exchanger(group: Any, layout: Any) -> Callable[[Any], Any]:
    """Returns a function of a step's number that exchanges gradients and keeps the state, for this process's ranks."""
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")  # a function for each compressor is no retracing
    shapes = layout.shapes
    values = [tf.random.normal(shape) for shape in shapes]
    states = [
        [tuple(tf.Variable(s.initial(s.shape, number)) for s in slots) for number, slots in enumerate(layout.slots)]
        for _ in group.ranks
    ]

    @tf.function(autograph=False)
    def exchange(step: tf.Tensor) -> list[tf.Tensor]:
        members = group.members(step)
        held = [[tuple(v.read_value() for v in slots) for slots in mine] for mine in states]
        results = group.run([layout.exchange(values, s, m) for s, m in zip(held, members, strict=True)])
        for result, mine in zip(results, states, strict=True):
            for slots, news in zip(mine, result.states, strict=True):
                for variable, new in zip(slots, news, strict=True):
                    variable.assign(new)
        return results[0].totals

    return exchange


def main() -> int:
    """Runs the measurements and prints the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", default="2,4", help="how many workers to exchange between; empty means codec alone"
    )
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--compressors", default=",".join(COMPRESSORS))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    names = args.compressors.split(",")
    for model in args.models.split(","):
        print(codec(model, names, args.rounds), flush=True)
    for workers in map(int, filter(None, args.workers.split(","))):
        for model, found in exchanges(workers, args.models, args.compressors, args.rounds).items():
            print(f"{model}, {workers} workers:")
            for name, seconds in found.items():
                ratios = [mine / plain for mine, plain in zip(seconds, found["none"], strict=True)]
                print(
                    f"  {name:12s} {_spread([s * 1000 for s in seconds], '.1f')} ms   {_spread(ratios, '.2f')} x none"
                )
    return 0


def codec(model: str, names: Sequence[str], rounds: int) -> str:
    """Returns the table of codecs, for gradients of a model's shapes."""
    import tensorflow as tf

    from tfdist.compression.base import Layout
    from tfdist.compression.comm import Counter

    shapes = SHAPES[model]()
    numbers = sum(math.prod(shape) for shape in shapes)
    values = [tf.random.normal(shape) for shape in shapes]
    runs = {"pass": tf.function(lambda _: [value + 1 for value in values], autograph=False)}
    runs |= {
        name: exchanger(Counter(2), Layout(COMPRESSORS[name](), [("", shape) for shape in shapes])) for name in names
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(rounds + 1):
        for name, run in runs.items():  # in turn, so that what disturbs disturbs all
            began = time.perf_counter()
            run(tf.constant(step, tf.int64))
            seconds[name].append((time.perf_counter() - began) / numbers * 1e9)
    lines = [f"  {name:12s} {_spread(found[1:], '.2f')}" for name, found in seconds.items()]  # the first one compiles
    return "\n".join([f"{model}, codec, ns per number:", *lines])


def exchanges(workers: int, models: str, names: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns seconds by model and compressor, as the chief has measured them."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", "tools.bench.compression_program", folder, models, names, str(rounds)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
        environ.pop("TF_CONFIG", None)
        if code := Launcher(program, local_cluster(workers), pathlib.Path(folder, "logs"), environ).run():
            sys.exit(code)
        return json.loads(pathlib.Path(folder, "results.json").read_text())


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    sys.exit(main())
