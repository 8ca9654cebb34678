"""Optimizers take their arguments, and no number that Keras would trip over."""

from __future__ import annotations

import contextlib

import pytest

from tests.config.checking import faults, make
from tfdist.config import (
    OptimizerConfig,
    TrainConfig,
    validation,
)
from tfdist.config import optimizer as optimizer_lib
from tfdist.errors import ConfigError

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
        ({"momentum": "x"}, "optimizer.momentum must be of type float. Received: 'x'."),
        ({"x": float("nan")}, "optimizer.x must be -1.797693e+308 to 1.797693e+308. Received: nan."),
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"rhos": 0.9},
            "optimizer 'adadelta' takes no 'rhos'; did you mean 'rho'? It takes: rho, epsilon, weight_decay,",
        ),
        ({"rho": "x"}, "optimizer.rho must be of type float. Received: 'x'."),
        ({"rho": 2.0}, "optimizer.rho must be 0 to 0.9999999. Received: 2.0."),
        ({"gradient_accumulation_steps": 1}, "must be 0 (off) or 2 to 2147483647. Received: 1."),
        ({"clipnorm": 1.0, "clipvalue": 1.0}, "may be set. Received: clipnorm, clipvalue."),
    ],
)
def test_a_wrong_option_is_one_sentence(options, said):
    (found,) = faults(make(optimizer=OptimizerConfig("adadelta", **options)))
    assert said in found


def test_weights_that_do_not_decay_need_a_decay():
    assert OptimizerConfig(weight_decay_exclude=" bias, gamma,").excluded_from_weight_decay() == ["bias", "gamma"]
    validation.check(make(optimizer=OptimizerConfig("adamw", weight_decay_exclude="bias")))
    (found,) = faults(make(optimizer=OptimizerConfig("adam", weight_decay_exclude="bias")))
    assert found.startswith(
        "optimizer.weight_decay_exclude is 'bias', but no weight decays: set optimizer.weight_decay"
    )


def test_the_users_own_optimizer_may_take_any_argument():
    validation.check(make(optimizer=OptimizerConfig(f"{__name__}:Optimizer", momentum=0.5, beta_1=0.5)))


@pytest.mark.parametrize(("steps", "sound"), [(-1, False), (0, True), (1, False), (2, True)])
def test_gradients_are_accumulated_over_several_steps_or_not_at_all(steps, sound):
    config = TrainConfig(global_batch_size=8)
    config.optimizer.gradient_accumulation_steps = steps
    with (
        contextlib.nullcontext()
        if sound
        else pytest.raises(ConfigError, match=r"0 \(off\) or 2 to 2147483647\. Received")
    ):
        validation.check(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("momentum", 2.0),
        ("momentum", float("nan")),
        ("beta_1", 2.0),
        ("beta_1", float("nan")),
        ("beta_2", 1.0),
        ("rho", -0.1),
        ("ema_momentum", 5.0),
        ("epsilon", -1.0),
        ("weight_decay", -1.0),
        ("clipnorm", -1.0),
        ("global_clipnorm", float("inf")),
        ("clipvalue", float("nan")),
    ],
)
def test_numbers_that_keras_would_take_or_trip_over_are_faults(name, value):
    takes = next((each for each, names in optimizer_lib.OPTIMIZERS.items() if name in names), "adam")
    found = [fault for fault in faults(make(optimizer=OptimizerConfig(takes, **{name: value}))) if name in fault]
    assert len(found) == 1 and found[0].startswith(f"optimizer.{name} must be ") and str(value) in found[0]
