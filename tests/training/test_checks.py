"""What `Trainer` cannot train raises an error: arguments, strategies, models, optimizers and data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers
from tests.helpers.dense_model import build
from tfdist import ClusterSpec, ConfigError, StrategyConfig, TaskSpec

X = np.ones((16, 3), np.float32)


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


@pytest.fixture(scope="module")
def model(trainer):
    return build(trainer)


def test_an_argument_that_the_trainer_does_not_have_is_answered_by_its_own():
    with pytest.raises(ConfigError, match=r"argument of Trainer 'backupdir'; did you mean 'backup_dir'\? Known: "):
        tfdist.Trainer("one_device", backupdir="b")
    with pytest.raises(ConfigError, match=r"argument of Trainer 'bucketbytes'; did you mean 'bucket_bytes'\?"):
        tfdist.Trainer("one_device", bucketbytes=1)


SPEC = ClusterSpec({"worker": ["a:1"]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": 3}, r"strategy must be a name or a StrategyConfig, .* Received: 3, options \[\]\."),
        ({"strategy": StrategyConfig}, "strategy must be a name or a StrategyConfig, and options go with a name"),
        (
            {"strategy": StrategyConfig("one_device"), "devices": 2},
            r"options go with a name\. .* options \['devices'\]",
        ),
        ({"strategy": StrategyConfig(name=3)}, r"strategy\.name must be str\. Received: 3\."),
        ({"timeout_seconds": "x"}, r"strategy\.timeout_seconds must be float\. Received: 'x'\."),
        ({"gather_loss_bytes": 1.5}, r"strategy\.gather_loss_bytes must be int\. Received: 1\.5\."),
        ({"cluster": 3}, r"cluster must be a pair \(ClusterSpec, TaskSpec\), False .* Received: 3\."),
        ({"cluster": ()}, r"cluster must be a pair .* Received: \(\)\."),
        ({"cluster": (SPEC, "worker:0")}, "cluster must be a pair"),
        ({"cluster": (SPEC, TaskSpec("worker", 5))}, "task worker:5: index 5 is out of range"),
        ({"backup": keras.callbacks.BackupAndRestore("x")}, r"backup must be a tfdist\.BackupAndRestore\. Received: "),
        ({"backup_dir": 3}, r"backup_dir must be a text or a path\. Received: 3\."),
        ({"backup_dir": b"x"}, "backup_dir must be a text or a path"),
        ({"backup_dir": "a\0b"}, "backup_dir must be a folder, and a path has no null character"),
        ({"backup_dir": "x" * 5000}, "backup_dir must be a folder, and its name is too long"),
        ({"start_timeout": "x"}, r"start_timeout must be a number of seconds, 0 to 1000000000\. Received: 'x'\."),
        ({"start_timeout": float("nan")}, r"start_timeout must be a number of seconds.* Received: nan\."),
        ({"check_weights": "no"}, r"check_weights must be True or False\. Received: 'no'\."),
    ],
)
def test_a_wrong_argument_of_the_trainer_is_an_error_that_names_it(arguments, message):
    with pytest.raises(ConfigError, match=message):
        tfdist.Trainer(**{"strategy": "one_device", **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_every_seconds": "x"}, r"save_every_seconds must be a number of seconds, more than 0\. Received: 'x'\."),
        ({"grace_seconds": "x"}, "grace_seconds must be a number of seconds"),
        ({"delete_checkpoint": "no"}, r"delete_checkpoint must be True or False\. Received: 'no'\."),
    ],
)
def test_a_wrong_argument_of_a_backup_is_an_error_that_names_it(arguments, message):
    with pytest.raises(ConfigError, match=message):
        tfdist.BackupAndRestore("x", **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": None}, r"x must be data: .* Received: None\."),
        ({"epochs": 1.5}, r"epochs must be a whole number, 0 or more\. Received: 1\.5\."),
        ({"epochs": None}, "epochs must be a whole number, 0 or more"),
        ({"batch_size": 0}, r"batch_size must be a whole number, 1 or more\. Received: 0\."),
        ({"batch_size": "x"}, "batch_size must be a whole number, 1 or more"),
        ({"steps_per_epoch": -1}, "steps_per_epoch must be a whole number, 1 or more"),
        (
            {"validation_freq": 0},
            r"validation_freq must be a whole number, 1 or more, or a list of epochs\. Received: 0\.",
        ),
        ({"validation_split": 2}, r"validation_split must be a number, 0 to less than 1\. Received: 2\."),
        ({"validation_data": 3}, r"validation_data must be arrays .* Received: 3\."),
        (
            {"validation_data": tf.data.Dataset.from_tensors(([[0.0] * 3], [[0.0] * 2])).repeat()},
            "must be a dataset that ends, or",
        ),
        ({"x": lambda context: 3, "y": None}, r"A dataset function must return a tf\.data\.Dataset\. Received: int\."),
        ({"class_weight": {"a": 1}}, r"class_weight must be a dict .* Received: {'a': 1}\."),
        ({"callbacks": 3}, r"callbacks must be objects of keras\.callbacks\.Callback\. Received: 3\."),
        ({"callbacks": [keras.callbacks.EarlyStopping]}, "callbacks must be objects of keras"),
    ],
)
def test_a_wrong_argument_of_fit_is_an_error_that_names_it(trainer, model, arguments, message):
    with pytest.raises(ConfigError, match=message):
        trainer.fit(model, **{"x": np.zeros((4, 3)), "y": np.zeros((4, 2)), "verbose": 0, **arguments})


def test_trainer_takes_a_strategy_of_its_own_kind_only(trainer):
    assert tfdist.Trainer(trainer.strategy).strategy is trainer.strategy
    with pytest.raises(ConfigError, match=r"made by tfdist\.create_strategy"):
        tfdist.Trainer(tf.distribute.OneDeviceStrategy("CPU:0"))


def test_a_model_from_outside_the_scope_is_refused(trainer):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="was not built in this trainer's scope"):
        trainer.fit(model, np.ones((4, 3)), np.ones((4, 2)))


def test_an_own_train_step_cannot_be_compiled(trainer):
    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    with trainer.scope():
        model = Own([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ConfigError, match=r"with the train_step of Own, .* it may do more .* jit_compile=False"):
        trainer.fit(model, np.ones((4, 3)), np.ones((4, 2)))


def test_what_xla_cannot_compile_is_said(trainer):
    class Python(keras.layers.Layer):
        def call(self, x):
            return tf.ensure_shape(tf.numpy_function(lambda value: value, [x], tf.float32), [None, 3])

    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), Python(), keras.layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ConfigError, match=r"XLA cannot compile PyFunc of this model; .*jit_compile=False"):
        trainer.fit(model, np.ones((4, 3), np.float32), np.ones((4, 2), np.float32), verbose=0)


@pytest.mark.parametrize(
    ("capability", "jit_compile", "warns"),
    tiers.cases([((12, 0), True, True), ((12, 0), False, False), ((9, 0), True, False)], quick=2),
)
def test_a_gpu_that_is_newer_than_xla_is_warned_of(trainer, monkeypatch, caplog, capability, jit_compile, warns):
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    details = {"device_name": f"Card {warns}", "compute_capability": capability}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: details)
    with trainer.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=jit_compile)
    for _ in range(2):
        trainer.fit(model, np.ones((4, 2)), np.ones((4, 1)), batch_size=4, verbose=0)
    said = [each.getMessage() for each in caplog.records if "#111958" in each.getMessage()]
    assert len(said) == warns
    assert not warns or said[0].startswith("jit_compile=True on Card True (compute capability 12.0): XLA of TensorFlow")


def test_data_in_the_place_of_the_model_are_said(trainer):
    with pytest.raises(ConfigError, match=r"fit.*model"):
        trainer.fit(np.zeros([4, 3]), np.zeros([4, 2]))


def test_a_loop_of_ones_own_outside_of_the_replicas_is_said(trainer):
    said = "outside of the replicas: put the step into a function"
    with pytest.raises(ConfigError, match=said), trainer.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.zeros([1, 3])))
        tape.gradient(loss, model.trainable_variables)


def test_an_optimizer_from_outside_the_scope_is_refused(trainer):
    optimizer = keras.optimizers.Adam()
    model = build(trainer, optimizer=lambda: optimizer)
    with pytest.raises(ConfigError, match=r"Adam was created outside of this trainer's scope"):
        trainer.fit(model, np.ones((4, 3)), np.ones((4, 2)))


@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_no_data_are_no_training(trainer, model):
    some = (np.ones((4, 3)), np.ones((4, 2)))
    with pytest.raises(ConfigError, match="hold no batch"):
        trainer.fit(model, np.ones((0, 3)), np.ones((0, 2)), verbose=0)
    with pytest.raises(ConfigError, match="hold no batch"):
        trainer.evaluate(model, tf.data.Dataset.from_tensors((np.ones((4, 3)), np.ones((4, 2)))).take(0), verbose=0)
    with pytest.raises(ConfigError, match="validation hold no batch"):
        trainer.fit(model, *some, validation_data=(some[0][:0], some[1][:0]), verbose=0)
    with pytest.raises(ConfigError, match="predict hold no batch"):
        trainer.predict(model, np.ones((0, 3)), verbose=0)


def test_save_wants_a_keras_file(trainer, model, tmp_path):
    with pytest.raises(ConfigError, match=r"must end in '\.keras'"):
        trainer.save(model, tmp_path / "model.h5")


@pytest.mark.parametrize("path", [3, None, b"model.keras"])
@pytest.mark.parametrize("method", ["save", "export"])
def test_a_path_of_another_type_is_named(trainer, model, method, path):
    with pytest.raises(
        ConfigError, match=rf"^path must be a str or a pathlib\.Path, and not empty\. Received: {path!r}"
    ):
        getattr(trainer, method)(model, path)


def test_a_compressor_of_another_type_is_rejected_at_once(trainer):
    with pytest.raises(ConfigError, match=r"^compression must be a name, .* a compressor or None\. Received: int"):
        trainer.compression = 3
    assert trainer.compression is None


class OwnApply(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients(grads_and_vars)


def sequential(*layers, shape=(3,), batch=None):
    return keras.Sequential([keras.Input(shape, batch_size=batch), *layers, keras.layers.Dense(2)])


def multi_optimizer():
    optimizers = keras.optimizers.OptimizerMap(keras.optimizers.SGD(), {".*bias": keras.optimizers.Adam()})
    return keras.optimizers.MultiOptimizer(optimizers)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (
            lambda: sequential(keras.layers.BatchNormalization(synchronized=True, name="bn")),
            {"jit_compile": True},
            "synchronized=True of the layer bn, because .* jit_compile=False",
        ),
        (
            sequential,
            {"optimizer": OwnApply},
            "OwnApply is not possible with several replicas, because it overrides apply_gradients",
        ),
        pytest.param(
            sequential,
            {"optimizer": multi_optimizer},
            "MultiOptimizer is not possible with several replicas",
            marks=pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras has it since 3.15"),
        ),
        (
            lambda: sequential(keras.layers.LSTM(2, stateful=True), shape=(4, 3), batch=4),
            {},
            "stateful=True of the layer lstm",
        ),
        (lambda: sequential(keras.layers.Dense(2, dtype="float8_from_float32")), {}, "float8 layers"),
    ],
)
def test_what_cannot_be_trained_by_several_replicas_is_said(trainer, make, arguments, message):
    with trainer.scope():
        model = make()
        arguments = {name: value() if name == "optimizer" else value for name, value in arguments.items()}
        model.compile(**{"optimizer": "sgd", "loss": "mse", **arguments})
    with pytest.raises(ConfigError, match=message):
        trainer.fit(model, np.ones((4, *model.input_shape[1:])), np.ones((4, 2)), verbose=0)


def test_what_was_made_outside_of_the_scope_is_said(trainer):
    metric = keras.metrics.MeanAbsoluteError(name="far")
    with pytest.raises(ConfigError, match=r"A metric was created outside .* \(it has far/"):
        trainer.fit(build(trainer, metrics=[metric]), np.ones((4, 3)), np.ones((4, 2)))
    layer = keras.layers.Dense(2, name="away")
    layer.build((None, 3))
    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), layer])
        model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match=r"A layer was created outside .* \(it has away/kernel\)"):
        trainer.fit(model, np.ones((4, 3)), np.ones((4, 2)))


def test_data_that_are_no_batches_are_said(trainer, model):
    with pytest.raises(ConfigError, match=r"must hold batches: call its batch\(\)"):
        trainer.fit(model, tf.data.Dataset.from_tensor_slices((np.ones((4, 3)), np.ones(4))))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda trainer, model, data: trainer.fit(model, X, verbose=0), "The data have no labels"),
        (
            lambda trainer, model, data: trainer.evaluate(model, data.map(lambda x, y: x), verbose=0),
            "The data have no labels",
        ),
        (
            lambda trainer, model, data: trainer.fit(model, data.repeat()),
            "x must be a dataset that ends, or steps_per_epoch",
        ),
        (
            lambda trainer, model, data: trainer.evaluate(model, data.repeat()),
            "x must be a dataset that ends, or steps must",
        ),
        (
            lambda trainer, model, data: trainer.predict(model, data.repeat()),
            "x must be a dataset that ends, or steps must",
        ),
        (lambda trainer, model, data: trainer.export(model, ""), "path must be a str or a pathlib.Path, and not empty"),
        (lambda trainer, model, data: trainer.save(5, "a.keras"), "save takes the model first"),
        (lambda trainer, model, data: trainer.export(5, "a"), "export takes the model first"),
    ],
)
def test_bad_arguments_are_named(mirrored, call, words):
    trainer = tfdist.Trainer(mirrored)
    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(tfdist.ConfigError, match=words):
        call(trainer, model, tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(4))
