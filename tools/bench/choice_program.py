"""Prints the step time of each fixed compressor and of `auto` on a link of the network lab.

    python -m tools.netlab --hosts=2 --rate=1gbit -- \
        python -m tools.netlab.launch --workers=2 -- python -m tools.bench.choice_program [100mbit]

With a rate as its argument, `auto` trains on until the link drops to that rate, and then until it has chosen again.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time

import tfdist
from tfdist.compression import ErrorFeedback, PowerSGD

trainer = tfdist.Trainer("multi_worker_mirrored", transport="tcp")

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

from tfdist.monitoring import compression_report  # noqa: E402
from tools.netlab.lab import limit  # noqa: E402

WIDTH = 768
STEPS = 30
MEASUREMENT = 50  # steps within which `auto` has chosen
FIXED = {
    "none": None,
    "bf16": "bf16",
    "int8": "int8",
    "powersgd of rank 4": ErrorFeedback(PowerSGD(4)),
    "powersgd of rank 2": ErrorFeedback(PowerSGD(2)),
}


class Clock(keras.callbacks.Callback):
    """Lists the seconds of each step."""

    only_observes = True

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    with trainer.scope():
        hidden = [keras.layers.Dense(WIDTH, "relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.001), "mse")
    return model


def train(model: keras.Model, steps: int) -> float:
    """Trains some steps; returns the median milliseconds of the last `STEPS`."""
    x = np.random.default_rng(0).normal(size=(16 * steps, WIDTH)).astype(np.float32)
    clock = Clock()
    model.fit(x, x[:, :1], batch_size=16, verbose=0, callbacks=[clock])
    return 1000 * statistics.median(clock.seconds[-STEPS:])


def drop(rate: str) -> None:
    """Lowers the rate at which this host sends."""
    (device,) = {name for _, name in socket.if_nameindex()} - {"lo"}
    subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=False)
    subprocess.run(limit(device, rate).split(), check=True)


def fixed() -> dict[str, float]:
    times = {}
    for name, compressor in FIXED.items():
        trainer.compression = compressor
        times[name] = train(build(), 5 + STEPS)
    return times


def show(link: str, times: dict[str, float]) -> None:
    if trainer.is_chief:
        print(link, *(f"{name}: {ms:.1f} ms" for name, ms in times.items()), sep=" | ", flush=True)


def main() -> None:
    """Measures."""
    lower = sys.argv[1] if len(sys.argv) > 1 else ""
    times = fixed()
    trainer.compression = "auto"
    model = build()
    automatic = train(model, MEASUREMENT + STEPS)
    chosen = compression_report.choice(model)["chosen"]
    show("the link as it is", times | {f"auto, which chose {chosen}": automatic})
    if not lower:
        return
    train(model, 220)
    drop(lower)
    train(model, 480)
    chosen = compression_report.choice(model)["chosen"]
    automatic = train(model, MEASUREMENT)
    show(f"dropped to {lower}", fixed() | {f"auto, which chose {chosen}": automatic})


if __name__ == "__main__":
    main()
