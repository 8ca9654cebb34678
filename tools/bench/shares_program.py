"""Prints the time to a loss of a pair of workers, even and with one of half the speed, with even parts of a batch and by speed.

    tfdist launch --workers=2 -- python -m tools.bench.shares_program

A layer takes a time in proportion to its rows.
"""

from __future__ import annotations

import sys
import time

import tfdist

trainer = tfdist.Trainer("multi_worker_mirrored", batch_shares="by_speed")

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist.replicas.batch_shares import BatchShares  # noqa: E402

BATCH, WARM_UP = 64, 3
SECONDS = 0.001  # of a row
LOSS = 0.05


class Work(keras.layers.Layer):
    """Takes a time in proportion to its rows."""

    seconds = SECONDS

    def call(self, x: tf.Tensor) -> tf.Tensor:
        def wait(value: np.ndarray) -> np.ndarray:
            time.sleep(
                Work.seconds * len(value)
            )  # as an accelerator: two workers of one machine do not slow each other
            return value

        result = tf.numpy_function(wait, [x], x.dtype)
        result.set_shape(x.shape)
        return tf.stop_gradient(result - x) + x


class UntilLoss(keras.callbacks.Callback):
    """Ends a training at a loss, and lists the seconds of its steps, without the first epochs in which shares are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.steps = 0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        self.steps += self.params["steps"]
        if logs and logs["loss"] < LOSS:
            self.model.stop_training = True


def train(slow: float, by_speed: bool, batch: int) -> tuple[float, int]:
    """Returns the seconds to the loss, all steps counted at the speed after the choice of shares, and the number of steps."""
    Work.seconds = SECONDS * (1.0 if trainer.is_chief else slow)
    trainer.strategy.batch_shares = BatchShares(2) if by_speed else None
    keras.utils.set_random_seed(1)
    with trainer.scope():
        layers = [Work(), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        model.compile(keras.optimizers.Adam(0.003), "mse")
    x = np.random.default_rng(0).normal(size=(1536, 16)).astype(np.float32)
    y = np.tanh(x[:, :1] + x[:, 1:2])
    clock = UntilLoss()
    model.fit(x, y, batch_size=batch, epochs=100, verbose=0, callbacks=[clock])
    measured = clock.seconds[WARM_UP:]
    return len(clock.seconds) * sum(measured) / len(measured), clock.steps


def main() -> int:
    rows = {
        "even pair": (1.0, False, BATCH),
        "one of half the speed, even parts": (2.0, False, BATCH),
        "one of half the speed, by speed": (2.0, True, BATCH),
        "one of half the speed, by speed, 3/4 of the batch": (2.0, True, BATCH * 3 // 4),
    }
    even = 0.0
    for name, how in rows.items():
        seconds, steps = train(*how)
        even = even or seconds
        if trainer.is_chief:
            print(
                f"{name}: {seconds:.2f} s to a loss of {LOSS}, {steps} steps, {seconds / even:.2f} of the even pair",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
