"""`train_on_batch` and its siblings with arrays and `run_eagerly=True`; losses of ragged tensors that return a Python number."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
Y = np.zeros((4, 1), "float32")


def trainer_of(kind, request):
    return tfdist.Trainer(request.getfixturevalue("mirrored") if kind == "mirrored" else "one_device")


CASES = [("one_device", True), ("mirrored", False), ("one_device", False), ("mirrored", True)]


@pytest.mark.parametrize(("kind", "eager"), tiers.cases(CASES, quick=2))
def test_methods_on_a_batch_take_arrays(kind, eager, request):
    with trainer_of(kind, request).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=eager)
    weights = np.array([1.0, 0.0, 0.0, 1.0], "float32")
    assert model.test_on_batch(X, Y) == pytest.approx(7.5)  # the mean of 1, 4, 9, 16
    model.reset_metrics()
    assert model.test_on_batch(X, Y, weights) == pytest.approx(17 / 4)
    np.testing.assert_allclose(model.predict_on_batch(X), X, rtol=1e-6)
    model.reset_metrics()
    assert model.train_on_batch(X, Y, return_dict=True) == {"loss": pytest.approx(7.5)}
    np.testing.assert_allclose(model.get_weights()[0], [[1 - 0.01 * 15]], rtol=1e-6)  # of the gradient, 2 * 7.5


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize("number", tiers.cases([1.5, 0], quick=1))
def test_a_loss_of_ragged_tensors_may_return_a_python_number(mirrored, number):
    with tfdist.Trainer(mirrored).scope():
        model = keras.Sequential([keras.layers.Identity()])
        model.compile("sgd", lambda y, predicted: number)
    ragged = tf.ragged.constant([[1], [2, 3]])
    with pytest.warns(UserWarning, match="its arguments are not dense tensors"):
        history = model.fit(ragged, ragged, verbose=0)
    assert history.history["loss"] == [pytest.approx(number)]
    predicted = model.predict(ragged, verbose=0)
    assert isinstance(predicted, tf.RaggedTensor) and predicted.to_list() == [[1], [2, 3]]
