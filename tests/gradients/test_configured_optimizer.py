"""The optimizer that a configuration asks for."""

import inspect

import keras
import numpy as np
import pytest

from tfdist.config import OptimizerConfig, TrainConfig
from tfdist.config.optimizer import EVERY_OPTIMIZER, OPTIMIZERS
from tfdist.errors import ConfigError
from tfdist.gradients.configured_optimizer import build_optimizer

# What wraps or divides among other optimizers has no name in a configuration.
CLASSES = {
    name.lower(): each
    for name, each in vars(keras.optimizers).items()
    if isinstance(each, type)
    and issubclass(each, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
}
SINCE = {"schedulefreeadamw": "3.14"}  # the release of Keras that brought it
THERE = [name for name in OPTIMIZERS if name in CLASSES or name not in SINCE]


def test_every_optimizer_of_keras_has_its_name_here():
    assert sorted(THERE) == sorted(CLASSES), "a release of Keras has changed them: mend OPTIMIZERS"
    numbers = tuple(map(int, keras.__version__.split(".")[:2]))
    later = {name for name, since in SINCE.items() if tuple(map(int, since.split("."))) > numbers}
    assert later == set(OPTIMIZERS) - set(CLASSES)


def test_one_that_the_installed_keras_lacks_is_said(monkeypatch):
    monkeypatch.delattr(keras.optimizers, "Lion")
    with pytest.raises(ConfigError, match=f"Keras {keras.__version__} has no optimizer 'lion'"):
        build_optimizer(TrainConfig(optimizer=OptimizerConfig("lion")))


@pytest.mark.parametrize("name", CLASSES)
def test_each_takes_what_its_class_takes(name):
    takes = set(inspect.signature(CLASSES[name].__init__).parameters) - {"self", "learning_rate", "name", "kwargs"}
    assert {*OPTIMIZERS[name], *EVERY_OPTIMIZER} == takes, "a release of Keras has changed them: mend OPTIMIZERS"


@pytest.mark.parametrize("name", CLASSES)
def test_the_defaults_of_each_are_those_of_its_class(name):
    """None is 0, no layers, or a scale of 1."""
    parameters = inspect.signature(CLASSES[name].__init__).parameters
    for argument, default in {**EVERY_OPTIMIZER, **OPTIMIZERS[name]}.items():
        keras_own = parameters[argument].default
        assert default == keras_own or (keras_own is None and default in (0, 1, ())), argument


@pytest.mark.parametrize("name", THERE)
def test_each_is_made_with_its_arguments(name):
    values = {bool: False, float: 0.75, int: 3}
    options = {argument: values[type(value)] for argument, value in OPTIMIZERS[name].items() if type(value) in values}
    options |= {"learning_rate_power": -0.75} if name == "ftrl" else {}
    config = TrainConfig(learning_rate=0.25, optimizer=OptimizerConfig(name, **options))
    made = build_optimizer(config)
    assert type(made) is CLASSES[name]
    found = made.get_config()
    assert {argument: found[argument] for argument in options} == options and found["learning_rate"] == 0.25


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_what_weight_decay_leaves_out_stays_as_it_is(precision):
    optimizer = OptimizerConfig("sgd", weight_decay=0.5, weight_decay_exclude="bias,gamma")
    made = build_optimizer(TrainConfig(learning_rate=0.5, precision=precision, optimizer=optimizer))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    for weight in model.trainable_weights:
        weight.assign(np.ones(weight.shape))
    made.build(model.trainable_weights)
    made.apply([np.zeros(weight.shape, np.float32) for weight in model.trainable_weights])
    found = {weight.name: weight.numpy().flat[0] for weight in model.trainable_weights}
    assert found == {"kernel": 0.75, "bias": 1.0, "gamma": 1.0, "beta": 0.75}


def own_optimizer(learning_rate, **arguments):
    return keras.optimizers.SGD(learning_rate) if learning_rate < 1 else "none"


def test_a_function_may_make_the_optimizer():
    named = TrainConfig("digits", optimizer=OptimizerConfig(f"{__name__}:own_optimizer"), learning_rate=0.5)
    assert float(build_optimizer(named).learning_rate) == 0.5
    named.learning_rate = 1.5
    with pytest.raises(ConfigError, match=r"own_optimizer' must return a keras.optimizers.Optimizer. Received: 'none'"):
        build_optimizer(named)
