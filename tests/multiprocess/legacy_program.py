"""The reference: tf_keras under TensorFlow's own strategies. Arguments: strategy, output folder."""

import json
import os
import sys

import tensorflow as tf
import tf_keras

from tests.multiprocess import harness, models


def main(strategy_name: str, out: str) -> None:
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    results = {}
    for name, (build, optimizer) in models.CASES.items():
        with strategy.scope():
            model = models.compiled(tf_keras, build, optimizer)
        x, y = models.data(model)
        results[name] = models.train(model, x, y)
    harness.store(out, rank, results)


main(*sys.argv[1:])
