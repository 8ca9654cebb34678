"""Step time of the Trainer's `fit` against a hand-written loop and against tf_keras' `fit`.

The loop is that of TensorFlow's tutorials: `strategy.run` in a `tf.function` for each step, or one for several steps. Each task
has a core of its own where there are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.bench.frame import run as run_cluster
from tools.bench.record import Record, against

STEPS = 64  # of each contender in a round, a multiple of steps_per_execution
CASES = [
    {"model": model, "workers": 2, "steps_per_execution": execution}
    for model in ("mlp", "digits")
    for execution in (1, 16)
]


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the samples of a case, in ms."""
    options = {**case, "rounds": rounds, "steps": STEPS, "contenders": list(names)}
    found = run_cluster("tools.bench.step_program", options, case["workers"])
    samples = {name: [each * 1000 for each in mine] for name, mine in found["seconds"].items()}
    return Record("step", case, "ms", samples, against("loop", samples))
