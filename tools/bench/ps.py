"""Steps per second of the Trainer's `fit` under parameter servers, against a hand-written loop and tf_keras' `fit`.

The loop is that of TensorFlow's tutorial: `ClusterCoordinator.schedule` for each step, then `join`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.bench.frame import run as run_cluster
from tools.bench.record import Record, against

STEPS = 100  # of each contender in a round
CASES = [{"model": model, "workers": workers, "ps": 1} for model in ("digits", "mlp") for workers in (1, 2, 4)]


def run(case: dict[str, Any], rounds: int, names: Sequence[str] = ()) -> Record:
    """Returns the samples of a case, in steps per second."""
    options = {**case, "rounds": rounds, "steps": STEPS, "contenders": list(names)}
    found = run_cluster("tools.bench.ps_program", options, case["workers"], case["ps"])
    samples = found["steps_per_second"]
    return Record("ps", case, "steps/s", samples, against("loop", samples))
