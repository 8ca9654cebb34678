"""The parameter server is stopped while the chief is not in `fit`. Arguments: what the chief then does, a key of `CALLS`."""

import sys

import tfdist
from tests.multiprocess.roles import ask
from tfdist.cluster import reachability
from tfdist.parameter_server import watch

reachability.REPORT_EVERY, watch.LAST_ROUND = 3.0, 114.0

trainer = tfdist.Trainer("parameter_server", start_timeout=120)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

x = np.ones((100, 8), "float32")
with trainer.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
trainer.fit(model, x, x[:, :1], batch_size=10, verbose=0)
weights = model.get_weights()


def leave():
    raise RuntimeError("the script ends")


CALLS = {
    "checkpoint": lambda: tf.train.Checkpoint(model=model).save("checkpoint"),
    "first_fit_call": lambda: trainer.fit(
        model, lambda context: tf.data.Dataset.from_tensors((x, x[:, :1])).repeat(), steps_per_epoch=3
    ),
    "function": lambda: tf.function(lambda: model.layers[0].kernel.value + 1.0)(),
    "read": lambda: model.layers[0].kernel.value.numpy(),
    "assign": lambda: model.set_weights(weights),
    "save": lambda: trainer.save(model, "model.keras"),
    "exit": leave,
}
ask("stop", "ps:0")
print("it happens", flush=True)
CALLS[sys.argv[1]]()
print("it went on", flush=True)
