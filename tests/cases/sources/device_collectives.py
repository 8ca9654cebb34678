"""The communicator of workers with GPUs, on CPU devices: each of its methods, and a training with it."""

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import TWO_EACH, WORKERS
from tests.cases.case import case
from tests.cases.sources.local_steps import EPOCHS, SIZE, Adam, X, Y, diloco, is_near, linear, local
from tfdist.collectives.communicator import Communicator, DeviceCommunicator
from tfdist.collectives.requests import AllGather, AllReduce, AllToAll, Cond

STEP = tf.constant(5, tf.int64)


def values(rank, shape):
    """Returns what a rank sends."""
    return np.random.default_rng(rank).normal(size=shape).astype("float32")


def on_graph(function):
    """Calls a function in a graph, as a step does; returns its numbers."""
    return tf.nest.map_structure(lambda value: value.numpy(), tf.function(function, autograph=False)())


def unequal(rank):
    """Returns rows and their numbers, more on later ranks."""
    return values(rank, (rank + 1, 3)), np.arange(rank + 1) * 2


@case(WORKERS, TWO_EACH, full=(TWO_EACH,))
def every_method(world):
    group = DeviceCommunicator(world.trainer.strategy)
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
    return {name: (on_graph(function), right) for name, (function, right) in found.items()}


@case(WORKERS)
def local_steps(world):
    strategy = world.trainer.strategy
    usual, strategy.communicator = strategy.communicator, DeviceCommunicator(strategy)
    try:
        with local(world, 5):
            model = linear(world, keras.optimizers.Adam)
            model.fit(X, Y, batch_size=SIZE, epochs=EPOCHS, shuffle=False, verbose=0)
    finally:
        strategy.communicator = usual
    anchors = diloco([Adam() for _ in range(world.workers)], (5, 10, 12), 1.0, 0.0)
    return {"weights": (is_near(model.get_weights(), anchors[-1]), True)}
