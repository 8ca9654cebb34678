"""Ends as `python -m tfdist.train` does, right after a collective."""

import tensorflow as tf

import tfdist
from tfdist import train

strategy = tfdist.create_strategy("multi_worker_mirrored")


@tf.function
def total(size):
    return tf.reduce_sum(strategy.reduce("SUM", strategy.run(lambda: tf.ones([size])), axis=None))


assert total(1) == 2
assert total(2_000_000) == 4_000_000
print("reduced", flush=True)
train.leave(0)
