"""The sum of a model's gradients alone, without the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.communicator import Communicator
from tfdist.compression.base import NONE, BucketedReduction, Compressor


def exchanger(
    group: Communicator, compressor: Compressor | None, shapes: Sequence[tuple[int, ...]], bucket_bytes: int = 0
) -> Callable[[], Any]:
    """Returns a function that sums gradients through a compressor, of which it keeps the state.

    Args:
        group: The ranks.
        compressor: The compressor, or None.
        shapes: Of the gradients.
        bucket_bytes: As `config.strategy.bucket_bytes`.
    """
    layout = BucketedReduction(compressor or NONE, [("", shape) for shape in shapes])
    values = [tf.random.normal(shape) for shape in shapes]
    states = [
        [tuple(tf.Variable(s.initial(s.shape, number)) for s in slots) for number, slots in enumerate(layout.slots)]
        for _ in group.ranks
    ]
    step = tf.Variable(0, dtype=tf.int64)

    @tf.function(autograph=False)
    def exchange() -> tf.Tensor:
        members = group.contexts(step.assign_add(1))
        held = [[tuple(v.read_value() for v in slots) for slots in mine] for mine in states]
        results = layout.run(group, [values] * len(members), held, members, bucket_bytes=bucket_bytes)
        for result, mine in zip(results, states, strict=True):
            for slots, news in zip(mine, result.states, strict=True):
                for variable, new in zip(slots, news, strict=True):
                    variable.assign(new)
        return _all_there(results[0].sums)

    return lambda: exchange().numpy()


def of_tensorflow(strategy: tf.distribute.Strategy, shapes: Sequence[tuple[int, ...]]) -> Callable[[], Any]:
    """Returns a function that sums gradients as TensorFlow does by itself."""
    values = [tf.random.normal(shape) for shape in shapes]

    def each() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return _all_there(context.all_reduce(tf.distribute.ReduceOp.SUM, values))

    exchange = tf.function(lambda: strategy.experimental_local_results(strategy.run(each))[0], autograph=False)
    return lambda: exchange().numpy()


def _all_there(totals: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a number that needs all of them, and no pass over them."""
    return tf.add_n([tf.reshape(total, [-1])[0] for total in totals])
