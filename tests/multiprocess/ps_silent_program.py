"""A task of a parameter-server cluster is stopped at step 20. Arguments: the task, and where: `fit`, `function` (`fit`, with
data that workers make), `evaluate` or `predict`.

After a worker, all three go on without it; then it continues, and must come back.
"""

import logging
import sys
import time

import tfdist
from tests.multiprocess.roles import ask
from tfdist.cluster import reachability
from tfdist.parameter_server import watch

# Soon enough for a test; the limit of a start stays what a loaded machine needs.
reachability.REPORT_EVERY, watch.WORKER_TIMEOUT, watch.LAST_ROUND = 3.0, 6.0, 114.0

# A stopped task is reported by its own limit, never as a long step of a worker.
trainer = tfdist.Trainer("parameter_server", start_timeout=120, timeout_seconds=8)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

import tfdist.data  # noqa: E402

TASK, WHERE = sys.argv[1:]
BACK = []


class Log(logging.Handler):
    def emit(self, record):
        BACK.extend([record] if "worker:1 is back" in record.getMessage() else [])


class AtStep(keras.callbacks.Callback):
    steps = trained = 0

    def on_step(self, batch, logs=None):
        self.steps += 1
        time.sleep(0.01)
        if self.steps == 20:
            print("it happens", flush=True)
            ask("stop", TASK)

    def on_train_batch_end(self, batch, logs=None):
        self.trained += 1
        self.on_step(batch)

    on_test_batch_end = on_predict_batch_end = on_step

    def on_epoch_end(self, epoch, logs=None):
        if BACK:
            self.model.stop_training = True


logging.getLogger("tfdist").addHandler(Log())
x = np.random.default_rng(0).normal(size=(600, 8)).astype("float32")
y = x[:, :1] * 2
with trainer.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
at_step = AtStep()
if WHERE == "fit":
    history = trainer.fit(model, x, y, batch_size=10, epochs=2, callbacks=[at_step], verbose=0).history
    assert len(history["loss"]) == 2
if WHERE == "function":

    def make(context):
        return tfdist.data.epochs((x, y), context, 10, seed=1)

    history = trainer.fit(model, make, steps_per_epoch=60, epochs=2, callbacks=[at_step], verbose=0).history
    assert len(history["loss"]) == 2
evaluated, predicting = ([at_step] if where == WHERE else None for where in ("evaluate", "predict"))
loss = trainer.evaluate(model, x, y, batch_size=10, verbose=0, callbacks=evaluated)
predicted = trainer.predict(model, x, batch_size=10, verbose=0, callbacks=predicting)
assert np.isclose(np.mean((predicted - y) ** 2), loss, rtol=1e-4), "each example counts once"
print("without it", flush=True)
ask("continue", TASK)
trainer.fit(model, x, y, batch_size=10, epochs=200, callbacks=[at_step], verbose=0)
assert BACK
assert int(model.optimizer.iterations.numpy()) == at_step.trained, "each step counts once"
loss = trainer.evaluate(model, x, y, batch_size=10, verbose=0)
print("all steps", flush=True)
