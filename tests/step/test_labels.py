"""A label that is no class of the model is one sentence."""

import keras
import numpy as np
import pytest

import tfdist
from tfdist.errors import ConfigError


@pytest.mark.parametrize("wrong", [3, -1])
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_label_out_of_range_is_said(mirrored, wrong, method):
    trainer = tfdist.Trainer(mirrored)
    with trainer.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    labels = np.array([0, 1, 2, wrong] * 2)
    with pytest.raises(
        ConfigError, match=f"A batch has the label {wrong}, and the model 3 classes: labels go from 0 to 2"
    ):
        getattr(trainer, method)(model, np.ones((8, 2), np.float32), labels, batch_size=4, verbose=0)
