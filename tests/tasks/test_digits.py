"""Smoothed labels of the digits: the loss is that of plain arithmetic, and digits are still counted right."""

import keras
import numpy as np

from tfdist.config import validation
from tfdist.tasks import digits


def test_the_loss_spreads_a_part_of_each_label():
    task = digits.Digits(digits.Options(filters=4, label_smoothing=0.2))
    model = task.build_model()
    model.compile("sgd", **task.compile_arguments())
    found = model.evaluate(task.eval_data(64), verbose=0, return_dict=True)
    images, labels = digits.load()[1]
    logits = model.predict(images, verbose=0).astype(np.float64)
    log = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    smoothed = 0.8 * np.eye(10)[labels] + 0.2 / 10
    np.testing.assert_allclose(found["loss"], -(smoothed * log).sum(axis=1).mean(), rtol=1e-5)
    np.testing.assert_allclose(found["accuracy"], (logits.argmax(axis=1) == labels).mean(), rtol=1e-6)
    assert next(validation.group_faults(digits.Options(label_smoothing=1.0), "task_options")).startswith(
        "task_options.label_smoothing must be"
    )
    assert isinstance(task.compile_arguments()["loss"], keras.losses.CategoricalCrossentropy)
