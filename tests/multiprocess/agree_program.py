"""What two workers must do together though one of them alone has a reason to. Arguments: strategy, folder for the results."""

import gc
import sys
import zlib

import tfdist
from tests.multiprocess import harness

trainer = tfdist.Trainer(sys.argv[1])

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

RANK = trainer.task.index
rng = np.random.default_rng(0)
X, Y = rng.standard_normal((24, 3)).astype(np.float32), rng.standard_normal((24, 1)).astype(np.float32)
RATES = (0.5, 0.05, 0.3)


class Rates(keras.callbacks.Callback):
    """Sets a rate before each step."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = RATES[batch]


def rates_of_the_chief():
    """The weights of a training whose chief alone sets rates."""
    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    callbacks = [Rates()] if trainer.is_chief else []
    trainer.fit(model, X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    return X, Y, RATES, model.get_weights()[0]


def a_model_that_one_worker_has_forgotten():
    """The mean of the statistics that are left, and of how many models each worker then knows them."""
    statistics = trainer.strategy.statistics
    known = len(statistics.variables())
    with trainer.scope():
        models = [keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()]) for _ in range(2)]
    mean = models[1].layers[0].moving_mean

    def assign():
        mean.assign([RANK + 1.0, 10.0 * (RANK + 1)])

    trainer.strategy.run(assign)
    if RANK == 1:
        del models[0]
        gc.collect()
    statistics.desynchronize()
    statistics.synchronize()
    return mean.numpy().tolist(), len(statistics.variables()) - known


def bytes_that_are_sent():
    """The checksums of what each rank receives: in three messages from each to the other, in one, and of no bytes."""
    ranks = trainer.strategy.engine.ranks
    received = []
    for source, target, lengths in ((1, 0, (5, 40_000_001)), (0, None, (40_000_001,)), (1, None, (3,)), (0, 1, ())):
        content = [np.random.default_rng(n).integers(0, 256, n, np.uint8) for n in lengths]
        got = ranks.send(source, content if source == RANK else (), target)
        received.append(
            (None if got is None else zlib.crc32(got), zlib.crc32(np.concatenate([*content, np.zeros(0, np.uint8)])))
        )
    return received


cases = (rates_of_the_chief, a_model_that_one_worker_has_forgotten, bytes_that_are_sent)
harness.store(sys.argv[2], RANK, {case.__name__: case() for case in cases})
