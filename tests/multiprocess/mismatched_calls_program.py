"""Two workers do what does not go together. Arguments: strategy, folder for the results, the case."""

import sys

import tfdist
from tests.multiprocess import harness
from tfdist.training import hangs

hangs.timing = hangs.Timing(look_every=0.1, report_every=0.5, warn_after=1.0)  # a sixtieth of the real ones
trainer = tfdist.Trainer(sys.argv[1], **harness.transport())

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

RANK, OUT = trainer.task.index, sys.argv[2]
x, y = np.zeros((64, 8), np.float32), np.zeros((64, 1), np.float32)
n = 64 if RANK else 40
with trainer.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=4 if sys.argv[3] == "executions" else 1)


class Evaluates(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.evaluate(x, y, verbose=0)


def of_unknown_length(drop_remainder=False):
    numbered = tf.data.Dataset.from_tensor_slices((x, y)).enumerate()
    first = numbered.filter(lambda number, _: number < n)
    return first.map(lambda _, row: row).batch(8, drop_remainder)


def build(units):
    with trainer.scope():
        keras.Sequential([keras.Input((8,)), keras.layers.Dense(units)])


def in_own_steps():
    """Worker 0 evaluates, in TensorFlow's collectives, while worker 1 sums gradients by the transport."""

    def train(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(batch[0], training=True) - batch[1]))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss}

    step = trainer.step(train, uses=[model, model.optimizer])
    for number, batch in enumerate(step.loop(tf.data.Dataset.from_tensor_slices((x, y)).batch(8))):
        if number == 3 and not RANK:
            model.evaluate(x, y, verbose=0)
        step(batch)


CASES = {
    "model": lambda: build(4 + RANK),
    "fit": lambda: trainer.fit(model, of_unknown_length(), epochs=2, verbose=0),
    "full_batches": lambda: trainer.fit(model, of_unknown_length(drop_remainder=True), epochs=2, verbose=0),
    "executions": lambda: trainer.fit(model, of_unknown_length(), epochs=2, verbose=0),
    "validation": lambda: trainer.fit(model, x, y, validation_data=of_unknown_length(), verbose=0),
    "evaluate": lambda: trainer.evaluate(model, of_unknown_length(), verbose=0),
    "predict": lambda: trainer.predict(model, of_unknown_length().map(lambda a, b: a), verbose=0),
    "callback": lambda: trainer.fit(model, x, y, verbose=0, callbacks=[] if RANK else [Evaluates()]),
    "own_steps": in_own_steps,
    "save": lambda: trainer.save(model, f"{OUT}/m.keras") if RANK else trainer.evaluate(model, x, y, verbose=0),
}
# Steps of one's own are explained by the watch alone.
ERRORS = (tfdist.ClusterError, tf.errors.OpError) if sys.argv[3] == "own_steps" else tfdist.ClusterError
try:
    CASES[sys.argv[3]]()
    said = ""
except ERRORS as e:
    said = str(e)
harness.store(OUT, RANK, {"said": said})
