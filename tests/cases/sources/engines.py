"""The contract of `Engine`, for each implementation: what a loop of its own may expect of one."""

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases.arms import MIRRORED, ONE_DEVICE, SERVERS, WORKERS
from tests.cases.case import case
from tfdist.data.source import Passes

X = np.arange(10, dtype="float32")[:, None] / 10
Y = 1 - X
BATCH, STEPS, RATE = 4, 3, 0.1  # the last batch has two examples


def linear(world):
    with world.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(RATE), "mse")
    engine = world.trainer.strategy.engine
    engine.attach(model)
    engine.attach(model)  # changes nothing
    model.make_train_function()
    model.make_test_function()
    model.make_predict_function()
    return engine, model


def sources(world, engine):
    """Returns each kind of source of the same batches."""
    folder = world.folder / f"arrays-{world.rank}"
    folder.mkdir()
    np.savez(folder / "rows.npz", x=X, y=Y)
    stored = tfdist.data.arrays_from(folder, BATCH, shuffle=False)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)

    def make(context):
        size = context.get_per_replica_batch_size(BATCH)
        rows = tf.data.Dataset.from_tensor_slices((X, Y)).shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.batch(size if world.workers > 1 else BATCH)

    return {
        "dataset": engine.source(dataset, STEPS),
        "function": engine.source_from_function(make),
        "stored": engine.source_from_stored(stored, 0, STEPS),
    }


def evaluate(engine, model, source, function):
    """Returns the loss of all examples that a source has, by the model's function, or one around it."""
    logs, passes = None, Passes(source, None, 1, lambda: None)
    model.reset_metrics()
    with engine.running(model):
        for _, _, remaining_steps in passes.epoch():
            step = engine.run(function, passes.iterator, remaining_steps)
            if step is None:  # the data have ended before the step
                break
            logs = step
        return float(engine.epoch_logs(model, function, logs)["loss"])


@case(ONE_DEVICE, MIRRORED, WORKERS, SERVERS, full=())
def a_loop_of_its_own(world):
    """Evaluates, predicts and trains as `fit` and `predict` do, without them."""
    engine, model = linear(world)
    kept = sources(world, engine)
    found = {name: evaluate(engine, model, source, model.test_function) for name, source in kept.items()}
    found["own function"] = evaluate(engine, model, kept["dataset"], lambda iterator: model.test_function(iterator))
    right = dict.fromkeys(found, np.mean((X - Y) ** 2))
    with engine.running(model):
        dataset = tf.data.Dataset.from_tensor_slices((X,)).batch(BATCH)
        passes = Passes(engine.source(dataset, STEPS), None, 1, lambda: None)
        passes.reset()
        predict = engine.predictor(model, passes, STEPS)
        next(passes.epoch())  # opens the pass
        found["predicted"] = [predict(2), predict(2)]
        found["at the end"] = str(predict(2))
        found["predict_batch"] = engine.predict_batch(model, (X[:3],))
    right |= {"predicted": [X[:8], X[8:]], "at the end": "None", "predict_batch": X[:3]}
    weight, found["losses"], right["losses"] = 1.0, [], []
    for begin in range(0, len(X), BATCH):
        x, y = X[begin : begin + BATCH], Y[begin : begin + BATCH]
        model.reset_metrics()
        with engine.running(model):
            logs = engine.run_batch(model.train_function, (x, y))
            engine.drain(model)
        found["losses"].append(float(logs["loss"]))
        right["losses"].append(np.mean((weight * x - y) ** 2))
        weight -= RATE * np.mean(2 * x * (weight * x - y))
    found["weight"], right["weight"] = model.get_weights()[0], [[weight]]
    return {name: (found[name], right[name]) for name in found}
