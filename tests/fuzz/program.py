"""Trains the cases of some seeds under the Trainer, and compares each with the arithmetic.

python -m tests.fuzz.program 123 124 125      # or 100-129

It prints a line of JSON for each seed: `seed`, `seconds`, the `case`, and its `differences`, of which there should be none.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.fuzz import arithmetic, cases, models
from tests.fuzz.cases import Case
from tfdist import compression
from tfdist.strategies import single_process

_REPLICAS = 8
# How far weights may be off, as a part of how far training has moved them; and logs, as a part of themselves.
_TOLERANCES = {"float64": (1e-9, 2e-6), "float32": (1e-3, 1e-4), "fp16": (5e-3, 1e-3), "bf16": (2e-2, 1e-2)}
_TOLERANCES |= {"int8": (5e-2, 2e-2), "topk": (1e-3, 1e-4), "powersgd": (1e-3, 1e-4)}


class Own(keras.losses.Loss):
    """A loss of the user's own."""

    def call(self, y: Any, out: Any) -> Any:
        return keras.ops.mean(keras.ops.sqrt(1 + (y - out) ** 2), -1)


def loss_of(case: Case, output: str = "") -> Any:
    if case.loss in cases.NUMBERS:
        mean = case.loss == "number"
        return lambda y, out: tf.reduce_mean((y - out) ** 2) if mean else tf.reduce_sum((y - out) ** 2) / 16
    reduction = case.reduction_of(output)
    kinds = {"mse": "MeanSquaredError", "mae": "MeanAbsoluteError", "huber": "Huber"}
    if case.loss in kinds:
        return getattr(keras.losses, kinds[case.loss])(reduction=reduction)
    if case.loss == "own":
        return Own(reduction=reduction)
    kind = {"sparse": "SparseCategorical", "categorical": "Categorical", "binary": "Binary"}[case.loss]
    return getattr(keras.losses, f"{kind}Crossentropy")(from_logits=True, reduction=reduction)


def compile_model(case: Case, model: keras.Model) -> None:
    several = case.model in cases.SEVERAL
    mae = None if several or case.loss == "sparse" else ["mae"]
    model.compile(
        getattr(keras.optimizers, case.optimizer)(**case.options),
        {name: loss_of(case, name) for name in "ab"} if several else loss_of(case),
        loss_weights=arithmetic.LOSS_WEIGHTS if several else None,
        metrics=mae,
        weighted_metrics=mae and [keras.metrics.MeanAbsoluteError(name="weighted")],
        steps_per_execution=case.steps_per_execution,
        jit_compile=case.jit,
        run_eagerly=case.eager,
    )


def batched(case: Case, data: tuple[Any, ...], size: int) -> tuple[Any, dict[str, Any]]:
    """Returns what `fit` is given: x, and the other arguments."""
    if case.data == "dataset":
        return tf.data.Dataset.from_tensor_slices(data).batch(size), {}
    x, y, weights = (*data, None)[:3]
    return x, {"y": y, "sample_weight": weights, "batch_size": size}


def set_precision(dtype: str) -> None:
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


def compressor(case: Case) -> Any:
    whole = {"topk": compression.TopK(compress_ratio=1.0), "powersgd": None}
    if case.compression == "powersgd":  # of full rank
        return compression.PowerSGD(7 if case.ids else 32, min_compression_rate=0.1)
    return whole.get(case.compression or "", case.compression)


def trained(
    case: Case, strategies: dict[int, Any]
) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, list[float]]]:
    """Trains a case under the Trainer; returns the weights before and after, and the History."""
    set_precision(case.dtype)
    if case.replicas not in strategies:
        # The collectives of a strategy must not meet those of one with other replicas.
        single_process.MirroredStrategy._collective_key_base = 100_000 * case.replicas
        devices = {} if case.replicas == 1 else {"devices": ",".join(f"CPU:{n}" for n in range(case.replicas))}
        name = "one_device" if case.replicas == 1 else "mirrored"
        strategies[case.replicas] = tfdist.create_strategy(name, **devices)
    trainer = tfdist.Trainer(strategies[case.replicas], compression=compressor(case))
    with trainer.scope():
        model = models.build(case)
        compile_model(case, model)
    before = model.get_weights()
    x, given = batched(case, models.make_data(case, case.rows, 0, case.weights is not None), case.batch)
    if case.validation:
        rows, size = case.validation
        validation = models.make_data(case, rows, 1, case.weights is not None)
        if case.data == "dataset":
            given["validation_data"] = batched(case, validation, size)[0]
        else:
            given |= {"validation_data": validation, "validation_batch_size": size}
    given |= {"class_weight": case.class_weight, "epochs": case.epochs, "shuffle": False, "verbose": 0}
    history = trainer.fit(model, x, **given).history
    return before, model.get_weights(), history


def differences(case: Case, strategies: dict[int, Any]) -> list[str]:
    """Returns what is not as the arithmetic has it, a sentence for each."""
    before, after, history = trained(case, strategies)
    set_precision("float64")
    model = models.build(case)
    model.set_weights(before)
    expected = arithmetic.train(case, model)
    for_weights, for_logs = _TOLERANCES[case.dtype if case.dtype == "float64" else case.compression or case.dtype]
    if case.optimizer == "Nadam":  # float32 has no 0.96, which Keras takes with and without rounding
        for_weights = max(for_weights, 1e-6)
    found = []
    for variable, start, mine, right in zip(model.weights, before, after, model.get_weights(), strict=True):
        off, moved = np.abs(mine - right).max(), np.abs(right - start).max()
        if not off <= for_weights * moved + (1e-12 if case.dtype == "float64" else 2e-6):
            found.append(f"{variable.path} is off by {off:.3g}, having moved by {moved:.3g}")
    exact = case.reduction not in ("none", None)  # Keras' average of vectors' logs is no mean over examples
    skipped = set() if exact else {"loss", "a_loss", "b_loss"}
    names = {name for name in {*expected, *history} if name.removeprefix("val_") not in skipped}
    for name in sorted(names):
        mine, right = history.get(name), expected.get(name)
        if mine is None or right is None or not np.allclose(mine, right, rtol=for_logs, atol=1e-7):
            found.append(f"{name} is {mine}, and should be {right}")
    return found


def main(arguments: list[str]) -> None:
    """Runs the seeds that the arguments name."""
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * _REPLICAS)
    strategies: dict[int, Any] = {}
    seeds: list[int] = []
    for argument in arguments:
        first, _, last = argument.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    for number, seed in enumerate(seeds, 1):
        began, case, error = time.monotonic(), cases.draw(seed), ""
        try:
            found = differences(case, strategies)
        except Exception as e:  # of which each is a find
            error = str(e)
            lines = traceback.format_exc().splitlines()
            places = [line.strip() for line in lines if "/tfdist/" in line or "tests/fuzz" in line]
            found = [f"{type(e).__name__}: {error[-600:]}", *places[-3:]]
        seconds = round(time.monotonic() - began, 1)
        print(json.dumps({"seed": seed, "seconds": seconds, "case": str(case), "differences": found}), flush=True)
        if "Collective ops is aborted" in error and number < len(seeds):  # as are all of this process from now on
            os.execv(sys.executable, [sys.executable, "-m", "tests.fuzz.program", *map(str, seeds[number:])])
        keras.backend.clear_session()


if __name__ == "__main__":
    main(sys.argv[1:])
