"""One task of `tools.bench.link` and its kin. Arguments: output folder, options as JSON.

All contenders have their turns in the same processes. With the model `mlp` a contender's step is a whole one, the function that
Keras' `fit` calls; with others it is the sum of gradients of the model's shapes alone. `options`: `transport`, as
`config.strategy`'s, `optimizer` and `splits` may be left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import statistics
import sys
import time

import tfdist

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
trainer = tfdist.Trainer(
    "multi_worker_mirrored", transport=OPTIONS.get("transport", "auto"), shard_optimizer=OPTIONS.get("splits", False)
)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import psutil  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist.collectives.communicator import communicator_for  # noqa: E402
from tfdist.compression.base import NONE  # noqa: E402
from tools.bench import compressors, models, turns  # noqa: E402
from tools.bench.exchange import exchanger, of_tensorflow  # noqa: E402

MODEL, ROUNDS, STEPS, BATCH = (OPTIONS[name] for name in ("model", "rounds", "steps", "batch"))
logging.disable(logging.WARNING)  # a function for each contender is no retracing
strategy, shapes = trainer.strategy, models.SHAPES[MODEL]()
rng = np.random.default_rng(trainer.task.index)
examples = rng.standard_normal((16 * BATCH, models.MLP[0]), np.float32)
labels = rng.integers(0, models.MLP[-1], len(examples), np.int32)


def dataset(_=None):
    return tf.data.Dataset.from_tensor_slices((examples, labels)).batch(BATCH, drop_remainder=True).repeat()


def of_model(library, scope, data, fit):
    """Returns a step of `fit`, once it has made it."""
    with scope:
        model = models.mlp(library, models.WIDTHS[MODEL])
        loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
        kind = library.optimizers.Adam if OPTIONS.get("optimizer") == "adam" else library.optimizers.SGD
        model.compile(kind(0.01), loss)
    fit(model)
    iterator = iter(data)
    return lambda: tf.nest.map_structure(np.asarray, model.train_function(iterator))


def of_compute():
    return of_model(
        keras, contextlib.nullcontext(), dataset(), lambda model: model.fit(dataset(), steps_per_epoch=1, verbose=0)
    )


def of_trainer(compressor, bucket_bytes):
    mine = tfdist.Trainer(strategy, compression=compressor)
    strategy.configure(dataclasses.replace(strategy.config, bucket_bytes=bucket_bytes))
    data = strategy.distribute_datasets_from_function(dataset)
    return of_model(keras, mine.scope(), data, lambda model: mine.fit(model, dataset, steps_per_epoch=1, verbose=0))


def of_tf_keras():
    import tf_keras

    data = strategy.distribute_datasets_from_function(dataset)
    scope = tf.distribute.MultiWorkerMirroredStrategy.scope(strategy)
    return of_model(tf_keras, scope, data, lambda model: model.fit(data, steps_per_epoch=1, verbose=0))


def make(name):
    """Returns a contender's step: `compute`, `tf_keras`, `TensorFlow`, `<compressor>[/<bucket_bytes>]`."""
    if name == "compute":
        return of_compute()
    if name == "tf_keras":
        return of_tf_keras()
    if name == "TensorFlow":
        return of_tensorflow(strategy, shapes)
    compressor, _, size = name.partition("/")
    bucket_bytes = int(size or OPTIONS["bucket_bytes"])
    if MODEL in models.WIDTHS:
        return of_trainer(compressors.make(compressor), bucket_bytes)
    return exchanger(communicator_for(strategy), compressors.make(compressor), shapes, bucket_bytes)


def sent():
    return sum(count.bytes_sent for name, count in psutil.net_io_counters(pernic=True).items() if name != "lo")


def latency():
    """Returns the seconds of the sum of one number."""
    found = []
    for _ in range(21):
        began = time.perf_counter()
        meet()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def planned(name):
    kind = name.partition("/")[0]
    if kind not in compressors.COMPRESSORS:
        return None
    return (compressors.make(kind) or NONE).bytes_per_step(shapes, strategy.num_replicas_in_sync)


# All begin a turn together, and what they have sent in it has arrived before it is counted.
meet = exchanger(communicator_for(strategy), None, [(1,)]) if strategy.num_replicas_in_sync > 1 else lambda: None
contenders = {name: make(name) for name in OPTIONS["contenders"]}
seconds = {name: [] for name in contenders}
counted = dict.fromkeys(contenders, 0)
processor = dict.fromkeys(contenders, 0.0)  # seconds in which this process's threads used a core
for number in range(ROUNDS + 1):
    for name, step in contenders.items():
        meet()
        mine, before, used = [], sent(), time.process_time()
        for _ in range(STEPS):
            began = time.perf_counter()
            step()
            mine.append(time.perf_counter() - began)
        used = time.process_time() - used
        meet()
        if number:  # the first round compiles
            seconds[name].append(statistics.median(mine))
            counted[name] += sent() - before
            processor[name] += used
results = {
    "seconds": seconds,
    "sent": {name: count / ROUNDS / STEPS for name, count in counted.items()},
    "planned": {name: count for name in contenders if (count := planned(name)) is not None},
    "latency": latency(),
    "transport": strategy.transport,
}
own = {"processor": {name: used / ROUNDS / STEPS for name, used in processor.items()}, "peak": turns.peak_bytes()}
(FOLDER / f"results-{trainer.task.index}.json").write_text(json.dumps(own))
if trainer.is_chief:
    (FOLDER / "results.json").write_text(json.dumps(results))
time.sleep(2)  # until the others have what this task has sent them
if strategy.transport == "mpi":
    sys.exit(0)  # mpirun fails where a rank ends without MPI's end, which belongs to a process's exit
os._exit(0)
