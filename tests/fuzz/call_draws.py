"""What seeds from 20000 on draw beside the rest: calls on batches, generators, overrides, integers, losses that compare examples."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tests.fuzz import cases, later_draws
from tests.fuzz.cases import Case


def draw_calls(case: Case) -> Case:
    """Returns a case with the features of this module, from random numbers of their own."""
    rng = random.Random(f"{case.seed}, calls")
    if case.noise:  # which alone is judged
        return case
    if rng.random() < 0.4 and case.replicas < 8:
        case = _comparing(case, rng)
    if rng.random() < 0.5:
        counters = rng.sample(cases.COUNTERS, rng.randint(1, 2))
        case = dataclasses.replace(case, batch_metrics=(*case.batch_metrics, *counters))
    if rng.random() < 0.5:
        case = dataclasses.replace(case, override=rng.choice(cases.OVERRIDES))
    if case.override.startswith(
        "metrics"
    ):  # without a graph, or in XLA's, their logs are means of the replicas' values
        case = dataclasses.replace(case, **later_draws.alone(case))
    loop = rng.choice(["", *cases.LOOPS])
    if loop and case.replicas < 8:
        case = _in_calls(case, rng, loop)
    return cases.without_refused(case)


def _comparing(case: Case, rng: random.Random) -> Case:
    """A loss that compares the examples of a batch: one number for each example, or for the batch."""
    loss = rng.choice(cases.COMPARING)
    models = [*later_draws.DENSE, *later_draws.OF_WORDS, "outputs"]
    changed: dict[str, Any] = {"model": case.model if case.model in models else rng.choice(models)}
    if loss == cases.PAIRS:
        changed |= {"reduction": "sum_over_batch_size", "weights": None}
    else:
        changed["reduction"] = rng.choice(["sum_over_batch_size", "sum", "mean_with_sample_weight"])
        changed["weights"] = rng.choice([None, "each", "zeros"])
    return dataclasses.replace(
        case, loss=loss, class_weight=None, aggregation="", compression=None, **changed, **later_draws.alone(case)
    )


def _in_calls(case: Case, rng: random.Random, loop: str) -> Case:
    """Calls of `train_on_batch`, or of `fit` on one generator."""
    changed: dict[str, Any] = {"loop": loop, "data": "arrays", "pieces": (), "own": "", "own_first": 0}
    if loop == "on_batch":
        rows = case.validation[0] if case.validation else 0
        return dataclasses.replace(case, reads="", validation=(rows, rows) if rows else None, **changed)
    changed |= {"fit_steps": rng.randint(1, -(-case.rows // case.batch)), "evaluated_steps": rng.randint(0, 2)}
    return dataclasses.replace(case, epochs=rng.randint(2, 4), validation=None, **changed)
