"""The communicators of workers with GPUs, on CPUs that stand in for them: each method, and trainings."""

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases.arms import ON_GPUS, TWO_GPUS_EACH
from tests.cases.case import case
from tests.cases.sources.local_steps import EPOCHS, SIZE, Adam, X, Y, diloco, is_near, linear, local
from tests.helpers.options import options_set
from tfdist.collectives.communicator import Communicator, CrossProcessCommunicator, communicator_for
from tfdist.collectives.requests import AllGather, AllReduce, AllToAll, Cond
from tfdist.compat import tf_cluster
from tfdist.compression import PowerSGD

STEP = tf.constant(5, tf.int64)


def values(rank, shape):
    """Returns what a rank sends."""
    return np.random.default_rng(rank).normal(size=shape).astype("float32")


def on_graph(function):
    """Calls a function in a graph, as a step does; returns its numbers."""
    return numbers(tf.function(function, autograph=False)())


def numbers(found):
    return tf.nest.map_structure(lambda value: value.numpy(), found)


def unequal(rank):
    """Returns rows and their numbers, more on later ranks."""
    return values(rank, (rank + 1, 3)), np.arange(rank + 1) * 2


@case(ON_GPUS, TWO_GPUS_EACH)
def every_method(world):
    group = communicator_for(world.trainer.strategy)
    every, own, workers = range(group.size), group.ranks, world.workers
    small = np.array([values(rank, (7, 3)) for rank in every])
    wide = np.array([values(rank, (group.size, 5)) for rank in every])
    parts = np.array([values(rank, (workers * 4,)) for rank in every])
    sent = np.array([values(worker, (workers, 4)) for worker in range(workers)])
    rows = [unequal(rank) for rank in every]
    pairs = [[tf.constant(small[rank]), tf.constant(wide[rank])] for rank in own]
    firsts = [pair[0] for pair in pairs]

    def requested(make):
        def exchange(rank):
            return (yield make(rank))

        return lambda: group.run([exchange(rank) for rank in own])

    def nested(rank):
        def branch(factor):
            return (yield AllReduce([tf.constant(factor * small[rank])]))

        return Cond(tf.constant(True), lambda: branch(1.0), lambda: branch(2.0))

    number = tf.Variable(0.0)

    def chosen():
        number.assign(0.0)
        group.cond(number < 1, lambda: number.assign(2.0), lambda: number.assign(3.0))
        return number.read_value()

    def slices():
        found = group.gather_rows([tf.IndexedSlices(*map(tf.constant, rows[rank]), [20, 3]) for rank in own], STEP)
        return [(each.values, each.indices) for each in found]

    def for_each(value):
        return [value] * len(own)

    sums = [small.sum(0), wide.sum(0)]
    all_rows = tuple(np.concatenate(each) for each in zip(*rows, strict=True))
    found = {
        "all_reduce": (lambda: group.all_reduce(pairs), for_each(sums)),
        "all_reduce: largest": (lambda: group.all_reduce(pairs, True), for_each([small.max(0), wide.max(0)])),
        "run: AllReduce": (requested(lambda rank: AllReduce(pairs[own.index(rank)])), for_each(sums)),
        "run: AllGather": (requested(lambda rank: AllGather(tf.constant(small[rank]))), for_each(small)),
        "run: AllToAll": (requested(lambda rank: AllToAll(tf.constant(wide[rank]))), [wide[:, rank] for rank in own]),
        "run: Cond": (requested(nested), for_each(sums[:1])),
        "cond": (chosen, 2.0),
        "contexts": (lambda: [tf.constant(each.rank) for each in group.contexts(STEP)], own),
        "gather": (lambda: group.gather(firsts, STEP), for_each(np.concatenate(small))),
        "gather_rows": (slices, for_each(all_rows)),
        "add": (lambda: group.add(firsts, STEP), for_each(small.sum(0))),
        "exchange": (lambda: group.exchange(tf.constant(sent[world.rank]), STEP), sent[:, world.rank]),
        "reduce_scatter": (
            lambda: group.reduce_scatter([tf.constant(parts[rank]) for rank in own]),
            parts.sum(0).reshape(workers, 4)[world.rank],
        ),
        "gather_parts": (lambda: group.gather_parts(tf.constant(sent[world.rank, 0])), np.concatenate(sent[:, 0])),
        "processes": (lambda: tf.constant(group.processes), workers),
    }
    assert {name.partition(":")[0] for name in found} == {name for name in dir(Communicator) if name[0] != "_"}
    in_graph = {name: (on_graph(function), right) for name, (function, right) in found.items()}
    eager = {f"{name}, eager": (numbers(function()), right) for name, (function, right) in found.items()}
    return in_graph | eager


@case(ON_GPUS)
def local_steps(world):
    with local(world, 5):
        model = linear(world, keras.optimizers.Adam)
        model.fit(X, Y, batch_size=SIZE, epochs=EPOCHS, shuffle=False, verbose=0)
    anchors = diloco([Adam() for _ in range(world.workers)], (5, 10, 12), 1.0, 0.0)
    return {"weights": (is_near(model.get_weights(), anchors[-1]), True)}


IDS = np.random.default_rng(3).integers(0, 12, (29, 4)).astype("int32")
TARGETS = np.random.default_rng(4).normal(size=(29, 40)).astype("float32")
TRAININGS = {
    **{name: {"compression": name} for name in ("none", "bf16", "fp16", "int8", "topk")},
    "powersgd": {"compression": PowerSGD()},
    "eager": {"eager": True},
    "eager int8": {"compression": "int8", "eager": True},
    "split optimizer": {"shard_optimizer": True},
    "table": {"shards": 2},
}


def trained(world, compression="none", eager=False, shards=1, shard_optimizer=False):
    """Returns the weights of a table that is read by rows, and of a dense layer, after a training."""
    keras.utils.set_random_seed(1)
    trainer = tfdist.Trainer(world.trainer.strategy, compression=compression)
    with options_set(trainer.strategy, shard_optimizer=shard_optimizer):
        with trainer.scope():
            table = tfdist.layers.Embedding(12, 40, shards=shards)
            layers = [keras.Input((4,), dtype="int32"), table, keras.layers.GlobalAveragePooling1D()]
            model = keras.Sequential([*layers, keras.layers.Dense(40)])
            model.compile(keras.optimizers.Adam(0.125), "mse", run_eagerly=eager)
        trainer.fit(model, IDS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)
        if shards == 1:
            return model.get_weights()
        return [values for _, values in table.table.own(range(12))] + model.layers[-1].get_weights()


def train_each(name):
    def run(world):
        """Two numbers have one sum, so the bits are those of workers that sum on their CPUs; more are added in another order."""
        strategy = world.trainer.strategy
        found = trained(world, **TRAININGS[name])
        on_device = strategy.communicator
        strategy.communicator = CrossProcessCommunicator(
            on_device.ranks, on_device.size, tf_cluster.process_launcher(strategy)
        )
        try:
            right = trained(world, **TRAININGS[name])
        finally:
            strategy.communicator = on_device
        if name == "fp16" and on_device.size > 2:  # each of several sums is rounded to 11 bits, in another order
            return {"weights": (all(np.allclose(*each, atol=2e-3) for each in zip(found, right, strict=True)), True)}
        pairs = {"weights": (found, right)}
        if on_device.size == 2:
            equal = [np.array_equal(*each) for each in zip(found, right, strict=True)]
            pairs["equal bits"] = (equal, [True] * len(right))
        return pairs

    run.__module__ = __name__
    refused = TRAININGS[name].keys() & {"shards", "shard_optimizer"}
    case(ON_GPUS, name=name)(run)
    error = "is not possible with several GPUs of one of several workers" if refused else ""
    case(TWO_GPUS_EACH, name=f"{name}, two each", error=error)(run)


for each in TRAININGS:
    train_each(each)
