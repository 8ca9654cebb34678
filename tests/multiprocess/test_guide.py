"""The calls of Keras' guide to distributed training (https://keras.io/guides/distribution/) work on TensorFlow."""

import pytest

from tests.multiprocess import harness


@pytest.mark.full
def test_the_guide_trains_as_one_device(runs):
    (stock,), _ = runs("stock", "guide_program", "1x1")
    ranks, _ = runs("multi_worker_mirrored", "guide_program", "1x2", size=2)
    for rank in ranks:
        assert rank["elements"] == stock["elements"] - (28 * 28 + 1) * 200 // 2
        for kind in ("losses", "evaluated", "weights"):
            assert harness.difference(rank[kind], stock[kind]) < 1e-5
