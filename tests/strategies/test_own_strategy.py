"""A strategy of your own, in a file outside of the package, from a configuration; and TensorFlow's own."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

import tfdist
from tests.strategies import toy_strategy
from tfdist import CompressionConfig, ConfigError, StrategyConfig, TrainConfig
from tfdist.config import STRATEGIES, ClusterConfig, StrategyTraits, validation
from tfdist.config.strategy_traits import traits_of

ROOT = pathlib.Path(__file__).parents[2]
TOY = "tests.strategies.toy_strategy:make"


def run(*arguments):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environ, text=True, capture_output=True, timeout=120, check=False
    )


def test_the_command_trains_under_it(tmp_path):
    options = [f"--config.strategy.name={TOY}", "--config.strategy.devices=2", "--config.compression.name=int8"]
    options += ["--config.epochs=1", "--config.steps_per_epoch=8", "--config.global_batch_size=64"]
    done = run("-m", "tfdist.train", "--config=digits", f"--workdir={tmp_path}", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["strategy"], summary["num_replicas"], summary["steps"]) == (TOY, 2, 8)
    assert summary["compression"]["name"] == "int8"
    assert f"strategy: {TOY}" in done.stdout and "replicas: 2" in done.stdout


def test_what_it_refuses_is_said_before_tensorflow_is_loaded():
    script = f"""
import sys
from tfdist import StrategyConfig, TrainConfig
from tfdist.config import validation
try:
    validation.check(TrainConfig(strategy=StrategyConfig({TOY!r}), global_batch_size=32, jit_compile=True))
except ValueError as e:
    print(e, "tensorflow" in sys.modules)
"""
    done = run("-c", script)
    assert done.stdout == f"jit_compile is not possible with {TOY}, which is a toy; leave it out. False\n", done.stderr


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("make", {"global_batch_size": 33, "devices": 2}, "global_batch_size 33 is not divisible by 2 replicas"),
        ("make", {"cluster": ClusterConfig(workers=2)}, f"'{TOY}' trains in one process, but cluster.workers is 2"),
        ("make", {"cluster": ClusterConfig(ps=1)}, f"'{TOY}' has no parameter servers, but cluster.ps is 1"),
        ("make_without_traits", {"compression": CompressionConfig("int8")}, "compression 'int8' is not possible with"),
        ("make_untyped", {}, "The traits of strategy .* must be StrategyTraits. Received: {'compresses': True}"),
        ("mak", {}, "has no 'mak'; did you mean 'make'?"),
    ],
)
def test_its_traits_count_in_a_configuration(name, fields, message):
    strategy = StrategyConfig(f"tests.strategies.toy_strategy:{name}", fields.pop("devices", ""))
    with pytest.raises(ConfigError, match=message) as raised:
        validation.check(TrainConfig(strategy=strategy, **{"global_batch_size": 32, **fields}))
    assert len(raised.value.faults) == 1


def test_create_strategy_gives_it_its_traits():
    strategy = tfdist.create_strategy(TOY)
    assert strategy.traits is toy_strategy.make.traits and strategy.num_replicas_in_sync == 2
    assert tfdist.create_strategy(TOY + "_without_traits").traits == StrategyTraits()
    for name in ("os:getcwd", "os:sep"):
        with pytest.raises(
            ConfigError, match=f"^strategy '{name}' must be a factory: a function of config, cluster, start_timeout"
        ):
            tfdist.create_strategy(name)
    with pytest.raises(ConfigError, match=r"among its bases\. Received: OneDeviceStrategy"):
        tfdist.create_strategy("tests.strategies.toy_strategy:make_nothing")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (tf.distribute.OneDeviceStrategy, "one_device"),
        (tf.distribute.MirroredStrategy, "mirrored"),
        (tf.distribute.MultiWorkerMirroredStrategy, "multi_worker_mirrored"),
        (tf.distribute.ParameterServerStrategy, "parameter_server"),
        (tf.distribute.experimental.CentralStorageStrategy, "central_storage"),
        (tf.distribute.TPUStrategy, "tpu"),
    ],
)
def test_tensorflows_own_strategies_have_traits_too(kind, name):
    assert traits_of(kind.__new__(kind)) is STRATEGIES[name]
    assert traits_of(tf.distribute.get_strategy()) == StrategyTraits()


@pytest.mark.full
def test_an_optimizer_compresses_under_tensorflows_own_strategies():
    script = """
import keras, numpy as np, tensorflow as tf, tfdist
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
for strategy in (tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), tf.distribute.MultiWorkerMirroredStrategy()):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(tfdist.distribute_optimizer(keras.optimizers.SGD(0.1), "int8"), "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=4, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], np.full((3, 1), 1 - 0.1 * 2 * (3 - 1)), rtol=1e-5)
    print("trained")
"""
    done = run("-c", script)
    assert done.stdout.count("trained") == 2, done.stderr
