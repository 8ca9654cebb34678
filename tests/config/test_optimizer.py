"""Optimizers take their arguments, and no number that Keras would trip over."""

from __future__ import annotations

import pytest

from tests.config.checking import faults, make
from tfdist.config import (
    OptimizerConfig,
    validation,
)
from tfdist.config import optimizer as optimizer_lib

SAMPLES = {bool: True, float: 0.75, int: 3, tuple: ("dense",)}


@pytest.mark.parametrize("name", optimizer_lib.OPTIMIZERS)
def test_each_optimizer_takes_its_arguments_and_gives_those_changed(name):
    for argument, default in {**optimizer_lib.EVERY_OPTIMIZER, **optimizer_lib.OPTIMIZERS[name]}.items():
        kind = type(default)
        changed = {argument: -0.5 if argument in ("beta_2_decay", "learning_rate_power") else SAMPLES[kind]}
        assigned = OptimizerConfig(name)
        setattr(assigned, argument, changed[argument])
        assert assigned == OptimizerConfig(name, **changed) and getattr(assigned, argument) == changed[argument]
        assert assigned.arguments() == changed
        validation.check(make(optimizer=assigned))


@pytest.mark.parametrize(
    ("name", "given", "arguments"),
    [
        ("adadelta", {"rho": 0.9}, {"rho": 0.9}),  # the default of rmsprop
        ("muon", {"momentum": 0.0}, {"momentum": 0.0}),  # of sgd
        ("adamw", {"weight_decay": 0.0}, {"weight_decay": 0.0}),  # of adam
        ("adam", {"weight_decay": 0.0, "clipnorm": 0, "gradient_accumulation_steps": 0}, {}),  # off, Keras' None
        ("sgd", {"momentum": 0}, {"momentum": 0.0}),
        ("package:Own", {"momentum": 0, "weight_decay": 0.0, "x": 0}, {"momentum": 0.0, "weight_decay": 0.0, "x": 0}),
    ],
)
def test_an_argument_is_given_that_equals_the_default_of_some_optimizer(name, given, arguments):
    found = OptimizerConfig(name, **given).arguments()
    assert found == arguments
    assert list(map(type, found.values())) == list(map(type, arguments.values()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"momentum": "x"}, "config.optimizer.momentum must be float. Received: 'x'."),
        ({"x": float("nan")}, "optimizer.x must be a finite number. Received: nan."),
        ({"clipnorm": -1.0}, "optimizer.clipnorm must be 0 (off) to 1e+30. Received: -1.0."),
    ],
)
def test_a_wrong_argument_of_ones_own_optimizer_is_one_sentence(arguments, said):
    assert faults(make(optimizer=OptimizerConfig(f"{__name__}:Own", **arguments))) == (said,)


def test_an_argument_that_is_not_set_has_its_default():
    assert [OptimizerConfig(name).rho for name in ("adadelta", "rmsprop")] == [0.95, 0.9]
    assert OptimizerConfig("package:Own").use_ema is False
    with pytest.raises(
        AttributeError, match="optimizer 'adam' takes no 'rho', which is an option of adadelta, rmsprop"
    ):
        OptimizerConfig("adam").rho  # noqa: B018
    with pytest.raises(AttributeError, match="Unknown optimizer 'adm'"):
        OptimizerConfig("adm").beta_1  # noqa: B018


def test_weights_that_do_not_decay_need_a_decay():
    assert OptimizerConfig(weight_decay_exclude=" bias, gamma,").excluded_from_weight_decay() == ["bias", "gamma"]
    validation.check(make(optimizer=OptimizerConfig("adamw", weight_decay_exclude="bias")))
    (found,) = faults(make(optimizer=OptimizerConfig("adam", weight_decay_exclude="bias")))
    assert found.startswith(
        "optimizer.weight_decay_exclude is 'bias', but no weight decays: set optimizer.weight_decay"
    )


def test_the_users_own_optimizer_may_take_any_argument():
    validation.check(make(optimizer=OptimizerConfig(f"{__name__}:Optimizer", momentum=0.5, beta_1=0.5)))
