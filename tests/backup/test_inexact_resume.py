"""Of what a resumed training cannot draw again, a run that takes backups says so."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.backup import test_exact_resume
from tests.backup.test_exact_resume import (
    BATCH,
    MOMENTS,
    PLAIN,
    DrawsRate,
    Noise,
    Noisy,
    Shuffled,
    backup,
    flipped,
    noisy_loss,
    numpy_noise,
    own,
    plain,
    resume,
    train,
)
from tests.helpers import tiers

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras says so of data of unknown size
trainer, listener = test_exact_resume.trainer, test_exact_resume.listener


class NoisyFromNowhere(Noisy):
    """Draws from a generator that nothing holds."""

    def __getitem__(self, index):
        self.rng = np.random.default_rng()
        return super().__getitem__(index)


def numpy_in_layer(generator):
    def draw(shape):
        noise = tf.numpy_function(lambda: generator.normal(size=shape).astype(np.float32), [], tf.float32)
        return tf.ensure_shape(noise, shape)

    return Noise(draw)


GENERATORS = []


def with_a_generator():
    GENERATORS.append(tf.random.Generator.from_seed(1))
    return PLAIN["data"]()


INEXACT = {
    "tf_in_layer": (
        {"layer": lambda: Noise(tf.random.normal)},
        r"RandomStandardNormal \(test_exact_resume.py:\d+\).*keras.random",
    ),
    "tf_in_loss": ({"loss": lambda: noisy_loss(tf.random.uniform)}, r"RandomUniform \(test_exact_resume.py:\d+\)"),
    "tf_in_step": ({"step": tf.random.normal}, r"RandomStandardNormal \(test_exact_resume.py:\d+\)"),
    "parallel_map": ({"data": lambda: flipped(parallel=2)}, "several threads.*enable_op_determinism"),
    "any_order": (
        {"data": lambda: plain().map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False).batch(BATCH)},
        "deterministic=False",
    ),
    "py_dataset": ({"data": NoisyFromNowhere}, r"the PyDataset NoisyFromNowhere draws.*give it state_dict\(\)"),
    "py_dataset_workers": (
        {"data": lambda: Noisy(workers=2)},
        "the workers of the PyDataset Noisy draw from a generator.*workers=1",
    ),
    "py_dataset_read_on": ({"data": Shuffled, "steps_per_epoch": 2}, "the PyDataset Shuffled ahead.*steps_per_epoch"),
    "numpy_function_in_threads": ({"data": lambda: numpy_noise(parallel=2)}, "several threads"),
    "numpy_in_layer": ({"layer": lambda: numpy_in_layer(own())}, "the step calls Python code that draws"),
    "callback": ({"data": Noisy, "callback": DrawsRate}, r"the callback DrawsRate may draw.*state_dict\(\)"),
    "generator_of_nobody": (
        {"data": with_a_generator, "step": lambda shape: GENERATORS[-1].normal(shape)},
        "StateVar.*attribute",
    ),
}


@pytest.mark.parametrize(
    "case", tiers.cases(INEXACT, quick=["tf_in_layer"], slow={*INEXACT} - {"tf_in_layer", "tf_in_loss"})
)
def test_what_cannot_be_exact_is_said_once(trainer, tmp_path, capfd, case):
    how, message = INEXACT[case]
    train(trainer, **how)
    assert "exact" not in capfd.readouterr().out, "not without a backup"
    printed = [""]

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            printed.append(capfd.readouterr().out)

    train(trainer, backup(tmp_path, "epoch"), **{"callback": Reads, **how})
    printed.append(capfd.readouterr().out)
    (line,) = [each for each in "".join(printed).splitlines() if "resume will not be exact" in each]
    assert re.search(message, line), line
    if case.startswith("tf_in"):
        assert line in printed[3], "after the second execution, not when the epoch has ended"


def test_a_py_dataset_of_another_order_is_found_when_it_matters(trainer, tmp_path, capsys):
    resume(trainer, tmp_path, {"data": lambda: Shuffled(np.random.default_rng())}, *MOMENTS["amid"])
    assert "resume is not exact: the PyDataset Shuffled yields its batches in another order" in capsys.readouterr().out
