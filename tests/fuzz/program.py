"""Trains the cases of some seeds under the Trainer, and compares each with the arithmetic.

python -m tests.fuzz.program 123 124 125      # or 100-129
python -m tests.fuzz.program --arm=workers --minutes=20 20000     # seeds from 20000 on, until the time is over

It prints a line of JSON for each seed: `seed`, `seconds`, the `case`, and its `differences`, of which there should be none; in the
end, how many seeds ran. Arms are `replicas` (of this process), `workers` (two) and `servers` (a worker and a parameter server).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.fuzz import arithmetic, arms, batch_metrics, calls, cases, chance, models
from tests.fuzz.cases import Case
from tests.fuzz.losses import Centre, loss_of
from tests.fuzz.reads import Reads
from tests.helpers.options import set_options
from tfdist import compression
from tfdist.strategies import single_process

_REPLICAS = 8
_ENDLESS = 1e9
_MANY = 100_000
# How far weights may be off, as a part of how far training has moved them; and logs, as a part of themselves.
_TOLERANCES = {"float64": (1e-9, 2e-6), "float32": (1e-3, 1e-4), "fp16": (5e-3, 5e-3), "bf16": (2e-2, 1e-2)}
_TOLERANCES |= {"int8": (5e-2, 2e-2), "topk": (1e-3, 1e-4), "powersgd": (1e-3, 1e-4)}


def compile_model(case: Case, model: keras.Model, losses: Any) -> None:
    several = case.model in cases.SEVERAL
    mae = [] if several or case.loss in ("sparse", "ignored") else ["mae"]
    weighted = [keras.metrics.MeanAbsoluteError(name="weighted")] if mae else []
    with_weights = [name for name in case.batch_metrics if name in cases.WEIGHTED_METRICS]
    metrics = mae + batch_metrics.make([name for name in case.batch_metrics if name not in with_weights])
    weighted += batch_metrics.make(with_weights)
    optimizer = getattr(keras.optimizers, case.optimizer)(**case.options)
    if case.scales:  # by a power of two, which rounds nothing
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
    model.compile(
        optimizer,
        losses,
        loss_weights=arithmetic.LOSS_WEIGHTS if several else None,
        metrics=({"b": metrics} if several and metrics else metrics) or None,
        weighted_metrics=weighted or None,
        steps_per_execution=case.steps_per_execution,
        jit_compile=case.jit,
        run_eagerly=case.eager,
    )


def batched(case: Case, data: tuple[Any, ...], size: int) -> tuple[Any, dict[str, Any]]:
    """Returns what `fit` is given: x, and the other arguments."""
    if case.own:
        mine = case.own_rows(len(data[0]))[pipeline_of(case)]
        data = tf.nest.map_structure(lambda array: array[mine], data)
    if case.own == "own_rows":
        return tfdist.data.own_rows(*data), {"batch_size": size}
    if case.data != "arrays":
        dataset = tf.data.Dataset.from_tensor_slices(data).batch(size)
        if case.own:
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
            dataset = dataset.with_options(options)
        return dataset, {}
    x, y, weights = (*data, None)[:3]
    return x, {"y": y, "sample_weight": weights, "batch_size": size}


def pipeline_of(case: Case) -> int:
    """Returns which pipeline's rows this task has."""
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"] if case.pipelines > 1 else 0


def dataset_function(case: Case, data: tuple[Any, ...]) -> Any:
    """Returns a function that makes a pipeline's dataset, with batches of the sizes that the case says."""

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        assert context.num_input_pipelines == case.pipelines
        found = None
        for rows in case.pipeline_batches(context.input_pipeline_id):
            part = tf.nest.map_structure(lambda array, rows=rows: array[rows], data)
            batch = tf.data.Dataset.from_tensor_slices(part).batch(len(rows))
            found = batch if found is None else found.concatenate(batch)
        return found

    return make


def set_precision(dtype: str) -> None:
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


def compressor(case: Case) -> Any:
    whole = {"topk": compression.TopK(compress_ratio=1.0), "powersgd": None}
    if case.compression == "powersgd":  # of full rank
        return compression.PowerSGD(7 if case.ids else 32, min_compression_rate=0.1)
    return whole.get(case.compression or "", case.compression)


def trainer_for(case: Case, arm: str, made: dict[Any, Any]) -> tfdist.Trainer:
    """Returns a Trainer for a case; `made` keeps what is made once."""
    if arm == "servers":
        if arm not in made:
            made[arm] = tfdist.Trainer("parameter_server")  # in which all but the chief stay
        return made[arm]
    key = arm if arm == "workers" else case.replicas
    if key not in made:
        name, devices = "multi_worker_mirrored", {}
        if arm == "replicas":
            # The collectives of a strategy must not meet those of one with other replicas.
            single_process.MirroredStrategy._collective_key_base = 100_000 * case.replicas
            name = "one_device" if case.replicas == 1 else "mirrored"
            if case.replicas > 1:
                devices = {"devices": ",".join(f"CPU:{n}" for n in range(case.replicas))}
        made[key] = tfdist.create_strategy(name, **devices)
    set_options(made[key], shard_optimizer=case.shards)
    return tfdist.Trainer(made[key], compression=compressor(case))


def fit_data(case: Case, data: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
    return (dataset_function(case, data), {}) if case.pieces else batched(case, data, case.batch)


class Trained(NamedTuple):
    """What is compared."""

    before: list[np.ndarray]
    after: list[np.ndarray]
    history: dict[str, list[float]]
    state: tuple[Any, float]  # a loss's centre, and its calls
    reads: Reads


def trained(case: Case, trainer: tfdist.Trainer) -> Trained:
    """Trains a case under a Trainer."""
    with trainer.scope():
        model = models.build(case)
        several = case.model in cases.SEVERAL
        losses = {name: loss_of(case, name) for name in "ab"} if several else loss_of(case)
        compile_model(case, model, losses)
    before = model.get_weights()
    every_step = case.steps_per_execution == 1 and not isinstance(
        trainer.strategy, tf.distribute.ParameterServerStrategy
    )
    reads = Reads(case.reads == "halves", every_step)
    callbacks = [reads] if case.reads else []
    history = calls.train(case, trainer, model, callbacks) if case.loop else fit(case, trainer, model, callbacks)
    loss = losses["a"] if several else losses
    state = (loss.centre.numpy(), float(loss.calls.numpy())) if isinstance(loss, Centre) else (0.0, 0.0)
    return Trained(before, model.get_weights(), history, state, reads)


def fit(case: Case, trainer: tfdist.Trainer, model: keras.Model, callbacks: list[Any]) -> dict[str, list[float]]:
    """Trains a model by one `fit`; returns its history."""
    x, given = fit_data(case, models.make_data(case, case.rows, 0, case.weights is not None))
    if case.validation:
        rows, size = case.validation
        validation = models.make_data(case, rows, 1, case.weights is not None)
        if case.own == "own_rows":
            given |= {"validation_data": batched(case, validation, size)[0], "validation_batch_size": size}
        elif case.data != "arrays":
            given["validation_data"] = batched(case, validation, size)[0]
        else:
            given |= {"validation_data": validation, "validation_batch_size": size}
    given |= {"class_weight": case.class_weight, "epochs": case.epochs, "shuffle": False, "verbose": 0}
    return trainer.fit(model, x, **given, callbacks=callbacks).history


def weight_differences(
    case: Case, model: keras.Model, before: list[np.ndarray], after: list[np.ndarray], right: list[np.ndarray]
) -> list[str]:
    """Returns which weights are not the right ones, a sentence for each."""
    exact = _TOLERANCES[case.dtype][0]
    allowed = exact if case.dtype == "float64" else _TOLERANCES[case.compression or case.dtype][0]
    if case.optimizer == "Nadam":  # float32 has no 0.96, which Keras takes with and without rounding
        allowed = max(allowed, 1e-6)
    found = []
    for variable, start, mine, theirs in zip(model.weights, before, after, right, strict=True):
        moved = np.abs(theirs - start).max()
        if np.isnan(theirs).all() and np.isnan(mine).all():  # both have diverged
            continue
        off = np.abs(mine - theirs).max()
        if np.issubdtype(theirs.dtype, np.integer):
            limit = 0.0
        else:
            of_inputs = "keeps/" in variable.path and not case.hidden
            limit = (exact if of_inputs else allowed) * moved + (1e-12 if case.dtype == "float64" else 2e-6)
        if not off <= limit:
            found.append(f"{variable.path} is off by {off:.3g}, having moved by {moved:.3g}")
    return found


def read_differences(case: Case, model: keras.Model, before: list[np.ndarray], reads: Reads, right: Any) -> list[str]:
    """Returns what a callback has not read as it is, a sentence for each."""
    found = []
    for epoch, (mine, theirs) in enumerate(zip(reads.epochs, right, strict=True)):
        if (mine.rate, mine.updates) != (theirs.rate, theirs.updates):
            found.append(f"epoch {epoch} reads {mine.rate, mine.updates}, and should {theirs.rate, theirs.updates}")
        wrong = weight_differences(case, model, before, mine.weights, theirs.weights)
        found += [f"as epoch {epoch} reads it, {each}" for each in wrong]
    every = case.options.get("gradient_accumulation_steps") or 1
    count = sum(len(steps) for steps, _ in case.passes())
    if reads.steps and reads.steps != (steps := [n // every for n in range(1, count + 1)]):
        found.append(f"updates read after each step are {reads.steps}, and should be {steps}")
    return found


def differences(case: Case, trainer: tfdist.Trainer, compares: bool) -> list[str]:
    """Trains a case; returns what is not as the arithmetic has it, a sentence for each, if this task `compares`."""
    if case.noise:
        found = chance.draws(case, trainer, fit_data)
        return chance.differences(case, found) if compares else []
    before, after, history, kept, reads = trained(case, trainer)
    if not compares:
        return []
    set_precision("float64")
    on_chief = isinstance(trainer.strategy, tf.distribute.ParameterServerStrategy)
    with tf.device("/job:chief/replica:0/task:0/device:CPU:0" if on_chief else None):
        model = models.build(case)
        model.set_weights(before)
        expected, state, right = arithmetic.train(case, model)
    for_logs = _TOLERANCES[case.dtype if case.dtype == "float64" else case.compression or case.dtype][1]
    found = weight_differences(case, model, before, after, model.get_weights())
    if case.reads:
        found += read_differences(case, model, before, reads, right)
    if not np.allclose(kept[0], state.centre, rtol=for_logs, atol=1e-7) or kept[1] != state.calls:
        found.append(f"the loss's centre and calls are {kept}, and should be {state}")
    exact = case.reduction not in (
        "none",
        None,
    )  # Keras' average of vectors' logs is no mean over examples; `two` is twice the loss
    skipped = set() if exact else {"loss", "a_loss", "b_loss", "two"}
    names = {name for name in {*expected, *history} if name.removeprefix("val_") not in skipped}
    for name in sorted(names):
        mine, right = history.get(name), expected.get(name)
        if mine is None or right is None or not np.allclose(mine, right, for_logs, 1e-7, equal_nan=True):
            found.append(f"{name} is {mine}, and should be {right}")
    return found


def run(case: Case, seed: int, arm: str, made: dict[Any, Any], compares: bool) -> dict[str, Any]:
    """Returns the result of a case; `error` is what it raised."""
    began, error = time.monotonic(), ""
    try:
        set_precision(case.dtype)
        found = differences(case, trainer_for(case, arm, made), compares)
    except Exception as e:  # of which each is a find
        error = str(e) or type(e).__name__
        lines = traceback.format_exc().splitlines()
        places = [line.strip() for line in lines if "/tfdist/" in line or "tests/fuzz" in line]
        found = [f"{type(e).__name__}: {error[-600:]}", *places[-3:]]
    seconds = round(time.monotonic() - began, 1)
    return {"seed": seed, "arm": arm, "seconds": seconds, "case": str(case), "differences": found, "error": error}


def run_task(arm: str, seeds: list[int]) -> None:
    """Runs seeds as one task of a cluster. The two workers take turns in comparing."""
    made: dict[Any, Any] = {}
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    for number, seed in enumerate(seeds):
        compares = arm == "servers" or number % 2 == rank
        result = run(arms.draw(seed, arm), seed, arm, made, compares)
        ends = arm == "workers" and bool(result["error"])  # as the other worker may wait for this one
        if compares or ends:
            with open(os.environ["FUZZ_RESULTS"], "a") as file:
                file.write(json.dumps({**result, "ends": ends}) + "\n")
        if ends:
            os._exit(1)
        keras.backend.clear_session()


def run_replicas(seeds: Iterator[int], minutes: float) -> Iterator[dict[str, Any]]:
    """Runs seeds in this process, until the time is over."""
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * _REPLICAS)
    made: dict[Any, Any] = {}
    end = time.monotonic() + 60 * minutes
    for seed in seeds:
        result = run(arms.draw(seed, "replicas"), seed, "replicas", made, True)
        yield result
        if (left := end - time.monotonic()) < 0:
            return
        if "Collective ops is aborted" in result["error"]:  # as are all of this process from now on
            words = [f"--minutes={left / 60}", f"{seed + 1}-"] if minutes < _ENDLESS else [str(each) for each in seeds]
            if words:
                os.execv(sys.executable, [sys.executable, "-m", "tests.fuzz.program", *words])
        keras.backend.clear_session()


def main(arguments: list[str]) -> None:
    """Runs the seeds that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=arms.ARMS, default="replicas")
    parser.add_argument("--minutes", type=float, default=_ENDLESS)
    parser.add_argument("seeds", nargs="*", default=["20000-"])
    given = parser.parse_args(arguments)
    bounded = given.minutes < _ENDLESS
    ranges = [each.partition("-") for each in given.seeds]
    seeds = [
        seed
        for first, dash, last in ranges
        for seed in range(int(first), int(last) + 1 if last else int(first) + (_MANY if bounded else 1))
    ]
    if "TF_CONFIG" in os.environ:
        return run_task(given.arm, seeds)
    if given.arm == "replicas":
        results = run_replicas(iter(seeds), given.minutes)
    else:
        results = arms.run(given.arm, seeds, given.minutes)
    ran = differing = 0
    for result in results:
        print(json.dumps(result), flush=True)
        ran, differing = ran + 1, differing + bool(result["differences"])
    print(f"{ran} seeds ran, {differing} with differences", flush=True)
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
