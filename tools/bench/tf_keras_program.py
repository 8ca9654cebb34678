"""One task of tf_keras' `fit` under TensorFlow's MultiWorkerMirroredStrategy, without tfdist. Arguments: output folder, options as JSON.

`options`: `rounds`, `steps` of a round, `batch`. TensorFlow is as it comes.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before all else of TensorFlow

import tf_keras  # noqa: E402

from tools.bench import models, turns  # noqa: E402

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
_, RANK = turns.cluster()
examples = turns.examples(RANK, OPTIONS["batch"])


def dataset(_=None):
    return tf.data.Dataset.from_tensor_slices(examples).batch(OPTIONS["batch"], drop_remainder=True).repeat()


@tf.function(autograph=False)
def total():
    return strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)


def meet():
    return total().numpy()


data = strategy.distribute_datasets_from_function(dataset)
with strategy.scope():
    model = models.mlp(tf_keras)
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf_keras.optimizers.SGD(0.01), loss)
model.fit(data, steps_per_epoch=1, verbose=0)  # makes the function that `step` calls, as `fit` does
iterator = iter(data)


def step():
    return tf.nest.map_structure(np.asarray, model.train_function(iterator))


turns.write(FOLDER, RANK, turns.measure(step, meet, OPTIONS["rounds"], OPTIONS["steps"]))
meet()
time.sleep(2)  # until the others have what this task has sent them
os._exit(0)
