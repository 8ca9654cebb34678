"""A training of which the last worker may be slow by 40 ms a step. Arguments: output folder, options as JSON.

Options: `slow`, what sleeps ("callback", which only observes; "agreed callback"; "data"; or nothing); `data`; `model`; `width`;
and options of `compile`.
"""

import json
import os
import sys
import time

import tfdist

out, options = sys.argv[1], json.loads(sys.argv[2])
slow, kind, of_model = (options.pop(name, "") for name in ("slow", "data", "model"))
SECONDS, STEPS, BATCH, SIZE = 0.04, 10, 32, options.pop("width", 16)
task = json.loads(os.environ["TF_CONFIG"])["task"]
has_servers = "ps" in json.loads(os.environ["TF_CONFIG"])["cluster"]
trainer = tfdist.Trainer("parameter_server" if has_servers else "multi_worker_mirrored")

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist.monitoring import TensorBoard  # noqa: E402

IS_SLOW = bool(slow) and task == {"type": "worker", "index": 1}


class Observer(keras.callbacks.Callback):
    only_observes = slow != "agreed callback"

    def on_train_batch_end(self, batch, logs=None):
        if IS_SLOW and slow.endswith("callback"):
            time.sleep(SECONDS)


def late(x, y):
    """A batch that comes late on the slow worker: one after the other, so that prefetching does not help."""

    def wait(value):
        if IS_SLOW and slow == "data":
            time.sleep(SECONDS)
        return value

    later = tf.numpy_function(wait, [x], tf.float32)
    later.set_shape(x.shape)
    return later, y


def dataset(context=None):
    batch = context.get_per_replica_batch_size(BATCH) if context else BATCH
    return (
        tf.data.Dataset.from_tensor_slices((x, y))
        .repeat()
        .batch(batch, drop_remainder=True)
        .map(late if slow == "data" else lambda *both: both)
    )


def own(context):
    """Of which no worker knows the others' sizes."""
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH // 2).map(late)


x, y = np.ones((BATCH * STEPS, SIZE), np.float32), np.zeros((BATCH * STEPS, 1), np.float32)
steps = {"steps_per_epoch": STEPS}
data = {
    "arrays": {"x": x, "y": y, "batch_size": BATCH},
    "dataset": {"x": dataset().take(STEPS)},
    "function": {"x": dataset, **steps},
    "own": {"x": own, **steps},
}[kind]
layers = [keras.layers.BatchNormalization(synchronized=True)] * (of_model == "synchronized")
EPOCHS = 26
callbacks = [TensorBoard(os.path.join(out, "curves"), 10), Observer()]
accumulation = options.pop("gradient_accumulation_steps", None)
with trainer.scope():
    model = keras.Sequential([keras.Input((SIZE,)), *layers, keras.layers.Dense(SIZE), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-5, gradient_accumulation_steps=accumulation), "mse", **options)
if of_model == "step":
    optimizer = model.optimizer

    def train(batch):
        inputs, labels = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs, training=True) - labels) ** 2)
        optimizer.apply(tape.gradient(loss, [v.value for v in model.trainable_variables]), model.trainable_variables)
        return {"loss": loss}

    step = trainer.step(train, uses=[model, optimizer])
    for batch in step.loop(x, y, batch_size=BATCH, epochs=EPOCHS, callbacks=callbacks):
        step(batch)
else:
    trainer.fit(model, **data, epochs=EPOCHS, callbacks=callbacks, verbose=0)
