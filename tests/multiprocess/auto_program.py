"""Lets the Trainer choose by what gradients travel, and trains. Arguments: strategy, output folder, the situation."""

import os
import sys

from tests.multiprocess import harness
from tfdist.collectives import shared_memory_rendezvous, tcp_door
from tfdist.collectives.buffer_transport import NoTransportError

out, situation = sys.argv[2:]


def no_memory(size):
    raise NoTransportError(f"no memory of {size} bytes")


def no_ports(address, hello, token, seconds):
    raise TimeoutError("timed out")


if situation in ("apart", "no ports"):  # each worker on a host of its own, for all that tfdist knows
    shared_memory_rendezvous.host_key = lambda: str(os.getpid())
if situation == "no ports":
    tcp_door.call = no_ports
if situation == "no memory":
    shared_memory_rendezvous.reserve = no_memory

import tfdist  # noqa: E402 (what is above must be there when the Trainer chooses)

trainer = tfdist.Trainer(sys.argv[1])

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

keras.utils.set_random_seed(1)
with trainer.scope():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(2, kernel_initializer="ones"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
rows = np.random.default_rng(0).standard_normal((48, 4)).astype(np.float32)
trainer.fit(model, rows, rows.sum(1), batch_size=12, epochs=2, shuffle=False, verbose=0)
chosen = {name: getattr(trainer.strategy, name, "") for name in ("transport", "transport_reason")}
harness.store(out, trainer.task.index if trainer.task else 0, {**chosen, "weights": model.get_weights()})
