"""Bad arguments of Python functions: each is one sentence of an error, before any training. Those of commands: `tests/commands/test_bad_inputs.py`."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdist
from tfdist.layers import Embedding
from tfdist.monitoring import Tracker

IDS = np.array([[1, 2]])
MODEL = ("batch", "model")


class OwnTracker:
    """A tracker that records nothing."""

    def start(self, parameters, run_id):
        """Begins a record."""
        return run_id or "1"

    def log(self, metrics, step):
        """Records an epoch."""

    def finish(self):
        """Ends the record."""


def strategy(**options):
    tfdist.create_strategy("multi_worker_mirrored", cluster=False, **options)


def sync(outer):
    strategy(sync_every=5, outer=outer)


def compressed(*arguments, **options):
    tfdist.compression.create(tfdist.CompressionConfig(*arguments, **options))


def mesh(axes=MODEL, batch="batch"):
    devices = keras.distribution.DeviceMesh((1, 1), axes, ["cpu:0"])
    return keras.distribution.ModelParallel(layout_map=keras.distribution.LayoutMap(devices), batch_dim_name=batch)


def trainer(distribution):
    tfdist.Trainer("multi_worker_mirrored", False, distribution=distribution)


ROWS = {
    "sync_every must be int | str. Received: 2.5": lambda: strategy(sync_every=2.5),
    "sync_every must be a number of updates": lambda: strategy(sync_every=True),
    "strategy.outer must be Outer. Received: {'momentum": lambda: sync({"momentum": 0.9}),
    "strategy.outer must be Outer. Received: <keras": lambda: sync(keras.optimizers.SGD()),
    "outer.learning_rate must be 0 to 10. Received: nan": lambda: sync(tfdist.Outer(float("nan"))),
    "outer.nesterov must be bool": lambda: sync(tfdist.Outer(nesterov="no")),
    "shard_optimizer must be bool. Received: 'no'": lambda: strategy(shard_optimizer="no"),
    "batch_shares must be str. Received: [0.5, 0.5]": lambda: strategy(batch_shares=[0.5, 0.5]),
    "start_timeout must be 0 to 1000000000 seconds. Received: -1": lambda: strategy(start_timeout=-1),
    "grace_seconds must be 0 to 1000000000 seconds. Received: nan": lambda: strategy(grace_seconds=float("nan")),
    "compression.name must be str. Received: 5": lambda: compressed(5),
    "cpus_per_worker must be 0 to 10000. Received: 'x'": lambda: tfdist.ray.run(print, cpus_per_worker="x"),
    "tracker 'math:pi' must be a class with the methods start, log": lambda: Tracker("math:pi"),
    "tracker 'collections:Counter' must be a class": lambda: Tracker("collections:Counter"),
    "unknown tracker None. Known: mlflow": lambda: Tracker(None),
    "parameters must be a mapping": lambda: Tracker(f"{__name__}:OwnTracker", parameters=[1]),
    "GB for 10 rows of 1125899906842624 columns": lambda: Embedding(10, 2**50)(IDS),
    "shards must be at most input_dim, 10. Received: 11": lambda: Embedding(10, 4, shards=11),
    "dtype must be one of real numbers": lambda: Embedding(10, 4, dtype="int32"),
    "must have the shape of the ids, (1, 2)": lambda: Embedding(10, 4, combiner="sum")(IDS, np.ones((1, 1), "float32")),
    "must have one dimension or more": lambda: Embedding(10, 4, combiner="sum")(np.int64(1)),
    "Received: axes ('batch', 'batch'), batch_dim_name 'batch'": lambda: trainer(mesh(axes=("batch", "batch"))),
    "Received: axes ('batch', 'model'), batch_dim_name 'data'": lambda: trainer(mesh(batch="data")),
    "has a LayoutMap, which": lambda: trainer(keras.distribution.LayoutMap(mesh().device_mesh)),
    "has a type, which": lambda: trainer(keras.distribution.ModelParallel),
    "needs the strategy multi_worker_mirrored, by name": lambda: tfdist.Trainer("mirrored", distribution=mesh()),
}


@pytest.mark.parametrize("words", ROWS)
def test_a_bad_argument_is_a_sentence(words):
    with pytest.raises(tfdist.ConfigError) as raised:
        ROWS[words]()
    assert words in str(raised.value)
