"""What seeds from 10000 on draw beside the rest: assigned weights, metrics of whole batches, workers' own rows, reads in a callback."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tests.fuzz import cases
from tests.fuzz.cases import Case


def draw_state(case: Case) -> Case:
    """Returns a case with the features of this module, from random numbers of their own."""
    rng = random.Random(f"{case.seed}, state")
    assigned = rng.sample(cases.ASSIGNED, rng.randint(1, 4)) if rng.random() < 0.6 else []
    hidden = rng.random() < 0.5
    metrics = rng.sample(cases.BATCH_METRICS, rng.randint(1, 3)) if rng.random() < 0.5 else []
    own = rng.choice(cases.OWN) if rng.random() < 0.5 else ""
    first = rng.choice([case.rows // 2, 1, rng.randint(1, case.rows - 1)])
    reads = rng.choice(cases.READS) if rng.random() < 0.5 else ""
    if case.noise:  # which alone is judged
        return case
    if case.replicas == 8:  # which take minutes to trace
        assigned, metrics = [], []
    if case.pieces:
        own = ""
    if cases.SCALED in assigned:
        hidden = True
    if case.model == "masked_tokens":  # Keras cannot weight a number by a mask of tokens
        metrics = [name for name in metrics if name not in cases.METRIC_FUNCTIONS]
    if case.model in cases.SEVERAL:
        metrics = [name for name in metrics if name not in cases.WEIGHTED_METRICS]
    changed: dict[str, Any] = {"assigned": tuple(assigned), "hidden": hidden, "batch_metrics": tuple(metrics)}
    changed |= {"own": own, "own_first": first if own else 0, "reads": reads}
    if own:
        changed["data"] = "dataset" if own == "off" else "arrays"
        if case.validation:
            changed["validation"] = (max(2, case.validation[0]), case.validation[1])
    return cases.without_refused(dataclasses.replace(case, **changed))


def on_servers(case: Case) -> dict[str, Any]:
    """Returns the changes for a parameter server's worker, on which metrics are sums."""
    return {
        "batch_metrics": tuple(name for name in case.batch_metrics if name in (*cases.ADDING_METRICS, *cases.COUNTERS))
    }
