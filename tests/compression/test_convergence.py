"""Compressed training learns as well: digits, seeds in pairs. Two replicas of one process do to the bit what two processes do
(tests/multiprocess/test_compression.py)."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfdist
from tfdist import compression
from tfdist.config import CompressionConfig
from tfdist.tasks import digits

SEEDS, MORE = range(5), range(5, 20)
EPOCHS = 12
COMPRESSORS = {
    "bf16": CompressionConfig("bf16"),
    "fp16": CompressionConfig("fp16"),
    "int8": CompressionConfig("int8"),
    "int8_sum": CompressionConfig("int8", transport="sum"),
    "powersgd": CompressionConfig("powersgd", start_powerSGD_iter=10),
    "topk": CompressionConfig("topk", compress_ratio=0.1),
    "topk_exact": CompressionConfig("topk", compress_ratio=0.1, selection="exact"),
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def accuracy(mirrored):
    trainer = tfdist.Trainer(mirrored)
    train, validation = digits.load()
    known = {}

    def run(name, optimizer, seed):
        if (name, optimizer, seed) not in known:
            keras.backend.clear_session()
            keras.utils.set_random_seed(seed)
            trainer.compression = compression.create(COMPRESSORS.get(name))
            with trainer.scope():
                model = digits.Digits(digits.Digits.Options()).build_model()
                made = keras.optimizers.SGD(0.05, momentum=0.9) if optimizer == "sgd" else keras.optimizers.Adam(2e-3)
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile(made, loss, metrics=["accuracy"])
            trainer.fit(model, *train, batch_size=64, epochs=EPOCHS, verbose=0)
            result = trainer.evaluate(model, *validation, batch_size=360, verbose=0, return_dict=True)
            known[name, optimizer, seed] = result["accuracy"]
        return known[name, optimizer, seed]

    yield run
    trainer.compression = None


@pytest.mark.parametrize("name", COMPRESSORS)
def test_accuracy_is_that_of_uncompressed_training(accuracy, name):
    """One of eight compressors that change nothing is more than two standard errors away over five seeds; fifteen
    fresh ones tell it from one that does."""
    optimizer = "sgd" if name.startswith("topk") else "adam"

    def differences(seeds):
        return [100 * (accuracy(name, optimizer, seed) - accuracy(None, optimizer, seed)) for seed in seeds]

    points = differences(SEEDS)
    assert np.mean(points) > -0.5, points
    assert is_nothing(points) or is_nothing(more := differences(MORE)), (points, more)


def is_nothing(points):
    """Whether the mean of differences, in percentage points, is within two standard errors of zero."""
    error = np.std(points, ddof=1) / np.sqrt(len(points))
    print(f"{np.mean(points):.2f} points, standard error {error:.2f}, of {len(points)} seeds")
    return abs(np.mean(points)) <= 2 * error + 1e-9
