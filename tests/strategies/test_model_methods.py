"""A model's own `fit`, `predict` and the like do what its trainer's do."""

import itertools

import keras
import numpy as np
import pytest

import tfdist
from tests.helpers import tiers
from tests.helpers.dense_model import build


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


def sgd(**arguments):
    return lambda: keras.optimizers.SGD(0.1, **arguments)


COMPILED = [
    {"jit_compile": True},
    {"steps_per_execution": 4},
    {"optimizer": sgd(gradient_accumulation_steps=2)},
    {"optimizer": sgd(use_ema=True, ema_overwrite_frequency=2)},
    {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))},
]
QUICK = [("fit", COMPILED[1]), ("train_on_batch", COMPILED[2])]


@pytest.mark.parametrize(
    ("method", "arguments"), tiers.cases(itertools.product(["fit", "train_on_batch"], COMPILED), quick=QUICK)
)
def test_a_model_without_a_trainer_trains_as_with_one(trainer, monkeypatch, arguments, method):
    def train(model):
        model.set_weights([np.full_like(w, 0.5) for w in model.get_weights()])
        given = {"batch_size": 4, "shuffle": False, "verbose": 0} if method == "fit" else {}
        getattr(model, method)(x, y, **given)
        return model.get_weights()

    x, y = np.random.default_rng(0).standard_normal((14, 3)), np.ones((14, 2))
    own, trained = build(trainer, **arguments), build(trainer, **arguments)
    expected = train(trained)
    monkeypatch.setattr(trainer.strategy, "trainer", None)
    for mine, theirs in zip(train(own), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_model_that_is_compiled_anew_predicts_a_batch_once(trainer):
    model, x = build(trainer), np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    expected = x @ model.get_weights()[0] + model.get_weights()[1]
    np.testing.assert_allclose(model.predict_on_batch(x), expected, rtol=1e-5)
    with trainer.scope():
        model.compile("sgd", "mse")
    for predict in (model.predict_on_batch, model.predict):
        np.testing.assert_allclose(predict(x), expected, rtol=1e-5)


class OtherArguments(keras.Sequential):
    def fit(self, teacher, *args, epochs=3, **kwargs):
        self.teacher = teacher
        return super().fit(*args, epochs=epochs, **kwargs)

    def evaluate(self, data, labels, **kwargs):
        return {"loss": super().evaluate(data, labels, **kwargs)}

    def predict(self, factor, x, verbose="auto"):
        return factor * super().predict(x, verbose=verbose)


def test_a_models_own_methods_take_other_arguments(trainer):
    x, y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    with trainer.scope():
        model = OtherArguments([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    assert len(trainer.fit(model, "mine", x, y, 2, epochs=2, verbose=0).epoch) == 2
    assert model.teacher == "mine"
    assert len(trainer.fit(model, x=x, y=y, teacher="other", verbose=0).epoch) == 3
    assert model.teacher == "other"
    once = trainer.predict(model, 1, x, verbose=0)
    np.testing.assert_allclose(trainer.predict(model, x=x, factor=3, verbose=0), 3 * once)
    assert trainer.evaluate(model, x, y, verbose=0)["loss"] > 0


def test_a_model_compiled_anew_may_be_fitted_by_itself(trainer):
    model = build(trainer)
    x, y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    trainer.fit(model, x, y, verbose=0)
    with trainer.scope():
        model.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse")
    model.fit(x, y, batch_size=2, verbose=0)
    assert model.optimizer.iterations.numpy() == 1
