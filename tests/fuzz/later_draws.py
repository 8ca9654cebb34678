"""What seeds from 1000 on draw beside the rest: losses that see a whole batch, own masks, rank-3 outputs, dataset functions."""

from __future__ import annotations

import dataclasses
import random

from tests.fuzz.cases import BATCH_LOSSES, DECLARED, MASKING, NOISES, SEQUENCES, SEVERAL, Case

ROUGH = ("hinge",)  # whose gradient jumps where rounding may cross a threshold
# Its gradient of a bias is 0, of which optimizers that divide by what gradients have been magnify the rounding.
FLAT = "neighbours"
DENSE = ("dense", "wide", "added_vector", "added_mean", "added_sum", "regularized", "conv", "norm")
OF_WORDS = ("embedding", "masked_pooling", "masked_lstm")


def draw_later(case: Case) -> Case:
    """Returns a case with features that were added later, from random numbers of their own."""
    rng = random.Random(f"{case.seed}, new")
    kind = rng.choice(["masking", "masking", *["batch"] * 5, "declared", "as it was", "noise"])
    if kind == "noise":
        plain = {"compression": None, "eager": False, "jit": False, "dtype": "float64", "weights": None}
        case = dataclasses.replace(case, noise=rng.choice(NOISES), class_weight=None, validation=None, **plain)
    elif kind == "masking":
        case = _masking(case, rng)
    elif kind != "as it was":
        case = _of_the_batch(case, rng, rng.choice(BATCH_LOSSES) if kind == "batch" else DECLARED)
    if rng.random() < 0.25 and not case.eager:
        pieces = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
        case = dataclasses.replace(case, data="function", pieces=pieces, class_weight=None)
    return case


def alone(case: Case) -> dict[str, bool]:
    """Returns whether XLA compiles, and whether it runs eagerly: several replicas gather nothing then, and say so."""
    return {"jit": case.jit and case.replicas == 1, "eager": case.eager and case.replicas == 1}


def _masking(case: Case, rng: random.Random) -> Case:
    """A loss that sets a mask on its own values."""
    model = "tokens" if case.model in SEVERAL else case.model
    reduction = case.reduction
    if rng.random() < 0.4:
        reduction = rng.choice(["sum", "none", "mean_with_sample_weight", "mean_with_sample_weight"])
        if reduction == "none" and (case.step != "keras" or model.startswith(("regularized", "added"))):
            reduction = "sum"
    weights = case.weights or rng.choice([None, "each"])
    if weights and model in SEQUENCES:
        weights = "tokens"
    elif weights in ("outputs", "column", "tokens"):
        weights = "each"
    changed = {"loss": rng.choice(MASKING), "reduction": reduction, "weights": weights, "class_weight": None}
    return dataclasses.replace(case, model=model, **changed, **alone(case))


def _of_the_batch(case: Case, rng: random.Random, loss: str) -> Case:
    """A loss of one number: of an output of rank 2 or 3, or of one of several outputs."""
    model = case.model
    if case.replicas < 8 and not case.compression:
        model = rng.choice([model, model, "tall", "tall", "outputs", *DENSE, *OF_WORDS])
    if model not in ("tall", "outputs", *DENSE, *OF_WORDS):
        model = "tall"
    if loss == FLAT and case.optimizer != "SGD":
        loss = "dice"
    exact = {"compression": None, "dtype": "float64"} if loss in ROUGH else {}
    return dataclasses.replace(
        case,
        model=model,
        loss=loss,
        reduction="sum_over_batch_size",
        weights=None,
        class_weight=None,
        **alone(case),
        aggregation=rng.choice(["MEAN", "ONLY_FIRST_REPLICA"]) if loss == "centre" else "",
        **exact,
    )
