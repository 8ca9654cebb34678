"""`keras.distribution.set_distribution` before a Trainer chooses the strategy and its devices; contradictions raise an error."""

import subprocess

import keras
import numpy as np
import pytest

import tfdist
from tests.helpers import fork_server
from tests.helpers.dense_model import build
from tfdist import ClusterSpec, ConfigError, StrategyConfig, TaskSpec

BOTH, FIRST = ["cpu:0", "cpu:1"], ["cpu:0"]
CONTRADICTS = "contradicts keras.distribution.DataParallel, .* Remove keras.distribution.set_distribution, or create tfdist.Trainer"
UNLIKE = "devices of tfdist.Trainer and of keras.distribution.DataParallel must be the same"
WORKERS = ClusterSpec({"worker": ("127.0.0.1:1", "127.0.0.1:2"), "evaluator": ("127.0.0.1:3",)})


def parallel(devices=BOTH):
    return keras.distribution.DataParallel(devices=devices)


@pytest.fixture
def distribution():
    """Sets Keras' distribution, and removes it after the test."""
    yield keras.distribution.set_distribution
    keras.distribution.set_distribution(None)


@pytest.mark.parametrize(
    ("devices", "arguments", "options", "kind", "names"),
    [
        (BOTH, (), {}, "mirrored", ["CPU:0", "CPU:1"]),
        (["/device:CPU:1"], (), {}, "mirrored", ["CPU:1"]),
        (FIRST, (None,), {}, "mirrored", ["CPU:0"]),
        (BOTH, ("mirrored",), {"devices": 2}, "mirrored", ["CPU:0", "CPU:1"]),
        (BOTH, (), {"devices": "CPU:1,cpu:0"}, "mirrored", ["CPU:1", "CPU:0"]),
        (FIRST, (StrategyConfig("mirrored"),), {}, "mirrored", ["CPU:0"]),
        (BOTH, ("multi_worker_mirrored",), {}, "multi_worker_mirrored", ["CPU:0", "CPU:1"]),
        (BOTH, ("one_device",), {}, "one_device", ["CPU:0"]),  # a reference run
        (None, (), {}, "mirrored", ["CPU:0", "CPU:1"]),  # without a distribution
    ],
)
def test_the_distribution_chooses(distribution, devices, arguments, options, kind, names):
    distribution(devices and parallel(devices))
    trainer = tfdist.Trainer(*arguments, **options)
    assert trainer.strategy.config.name == kind
    assert [device[-5:].upper() for device in trainer.strategy.extended.worker_devices] == names


def test_the_evaluator_of_a_cluster_is_not_one_of_its_workers(distribution):
    distribution(parallel())
    trainer = tfdist.Trainer(cluster=(WORKERS, TaskSpec("evaluator", 0)))
    assert trainer.strategy.config.name == "mirrored"


@pytest.mark.parametrize(
    ("devices", "arguments", "options", "message"),
    [
        (BOTH, ("parameter_server",), {}, f"strategy parameter_server {CONTRADICTS}"),
        (BOTH, ("central_storage",), {}, f"strategy central_storage {CONTRADICTS}"),
        (FIRST, ("mirrored",), {"devices": 2}, f"{UNLIKE}. Received: cpu:0, cpu:1 and cpu:0."),
        (BOTH, (), {"devices": "CPU:0"}, f"{UNLIKE}. Received: cpu:0 and cpu:0, cpu:1."),
        (["gpu:7"], (), {}, "DataParallel names gpu:7, which is not there. This process has cpu:0, cpu:1. Name the"),
        (BOTH, (), {"device": 2}, "did you mean 'devices'?"),
        (BOTH, ("mirrord",), {}, "did you mean 'mirrored'?"),
        (BOTH, (3,), {}, "strategy must be a name or a StrategyConfig"),
        (BOTH, (StrategyConfig("mirrored"),), {"devices": 2}, "strategy must be a name or a StrategyConfig"),
    ],
)
def test_contradictions_are_errors(distribution, devices, arguments, options, message):
    distribution(parallel(devices))
    with pytest.raises(ConfigError, match=message):
        tfdist.Trainer(*arguments, **options)


def test_a_strategy_that_was_made_before_is_compared(distribution, mirrored):
    distribution(parallel())
    assert tfdist.Trainer(mirrored).strategy is mirrored
    distribution(parallel(FIRST))
    with pytest.raises(ConfigError, match=UNLIKE):
        tfdist.Trainer(mirrored)


def test_model_parallel_names_the_reason(distribution):
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], BOTH)
    distribution(keras.distribution.ModelParallel(layout_map=keras.distribution.LayoutMap(mesh)))
    for arguments in ((), ("mirrored",), ("one_device",)):
        with pytest.raises(ConfigError, match="ModelParallel needs the strategy multi_worker_mirrored"):
            tfdist.Trainer(*arguments)


def test_the_trainer_stays_after_the_scope_of_the_distribution(mirrored):
    with parallel().scope():
        trainer = tfdist.Trainer(mirrored)
    model = build(trainer)
    assert len(model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0).history["loss"]) == 1


def test_a_distribution_that_is_set_later_is_compared_before_training(distribution, mirrored):
    model = build(tfdist.Trainer(mirrored))
    x, y = np.ones((8, 3)), np.ones((8, 2))
    distribution(parallel())
    model.fit(x, y, verbose=0)
    distribution(parallel(FIRST))
    for method in (model.fit, model.evaluate):
        with pytest.raises(ConfigError, match=f"{UNLIKE}.* create the Trainer after the call of set_distribution"):
            method(x, y, verbose=0)


def test_keras_initialize_names_the_way_to_start_tasks():
    with pytest.raises(ConfigError, match=r"initialize does not connect .* start the script with `tfdist launch`"):
        keras.distribution.initialize("127.0.0.1:1", 1, 0)


def test_devices_are_listed_before_tensorflow_starts():
    command = fork_server.command("tests.training.devices_program")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "['cpu:0'] ['cpu:0', 'cpu:1', 'cpu:2'] [] True\n", done.stderr
