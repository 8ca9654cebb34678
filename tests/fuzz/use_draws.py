"""Draws the steps that seeds from 90000 on train with: they use their gradients before they apply them, or move weights by hand.

A layout map and `sync_every`, with which a tape returns each replica's own gradient, are not drawn.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tests.fuzz import cases, later_draws
from tests.fuzz.cases import Case

_CHANCE = 0.85
_STEEP = ("mae", "huber")  # their gradients are sums of signs, which may cancel


def draw_use(case: Case) -> Case:
    """Returns a case whose step uses its gradients, from random numbers of its own."""
    rng = random.Random(f"{case.seed}, use")
    use, scales_loss = rng.choice(cases.USES), rng.random() < 0.3
    # A noise alone is compared; eight replicas take minutes to trace; the gradient of a vector is one of Keras' own step alone.
    if rng.random() > _CHANCE or case.noise or case.replicas == 8 or case.reduction in ("none", None):
        return case
    options = dict(case.options)
    if not scales_loss:
        options.pop("loss_scale_factor", None)
    is_scaled = scales_loss and (case.scales or bool(options.get("loss_scale_factor")))
    changed: dict[str, Any] = {"use": use, "options": options, "jit": False}
    changed |= {"step": "scaled" if is_scaled else "own", "scales": case.scales and is_scaled}
    if use == "sign":  # rounding would change the sign of a gradient that is 0
        changed |= {"compression": None, "dtype": "float64"}
        changed["model"] = "dense" if case.model == "norm" else case.model
        if case.loss in (*_STEEP, later_draws.FLAT):
            changed["loss"] = "mse"
    return cases.without_refused(dataclasses.replace(case, **changed))
