"""Ends as `python -m tfdist.train` does, right after a collective. Argument: of how many numbers."""

import sys

import tensorflow as tf

import tfdist
from tfdist.runtime.end import process_end

strategy = tfdist.create_strategy("multi_worker_mirrored")


@tf.function
def total(size):
    return tf.reduce_sum(strategy.reduce("SUM", strategy.run(lambda: tf.ones([size])), axis=None))


assert total(1) == 2
assert total(int(sys.argv[1])) == 2 * int(sys.argv[1])
print("reduced", flush=True)
process_end.leave(0)
