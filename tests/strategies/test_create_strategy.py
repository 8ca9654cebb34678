"""`create_strategy` and `Trainer`: options pass through, and mistakes are answered in a sentence."""

import itertools
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers
from tfdist import ClusterSpec, ConfigError, StrategyConfig, TaskSpec


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


def build(trainer, **kwargs):
    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        kwargs = {name: value() if callable(value) else value for name, value in kwargs.items()}
        model.compile(**{"optimizer": "sgd", "loss": "mse", **kwargs})
    return model


def test_subclasses_keep_the_types_that_keras_looks_for(trainer):
    assert isinstance(trainer.strategy, tf.distribute.MirroredStrategy)
    assert isinstance(tfdist.create_strategy("one_device"), tf.distribute.OneDeviceStrategy)
    central = tfdist.create_strategy("central_storage", devices=2)
    assert isinstance(central, tf.distribute.experimental.CentralStorageStrategy)
    assert (trainer.num_replicas, central.num_replicas_in_sync) == (2, 2)


def test_devices_choose_by_number_name_and_list(trainer):
    for devices in (2, "2", "CPU:0,CPU:1", ["CPU:0", "CPU:1"]):
        strategy = tfdist.create_strategy("mirrored", devices=devices)
        assert [device[-5:] for device in strategy.extended.worker_devices] == ["CPU:0", "CPU:1"]
    one = tfdist.create_strategy("one_device", devices="CPU:1")
    assert one.extended.worker_devices[0].endswith("CPU:1")


def test_communication_options_pass_through(trainer):
    # Alone in its cluster, a multi-worker strategy needs no server.
    strategy = tfdist.create_strategy("multi_worker_mirrored", transport="grpc", bucket_bytes=1000, timeout_seconds=5)
    options = strategy.extended._communication_options
    assert (strategy.bucket_bytes, options.timeout_seconds) == (1000, 5)
    assert options.implementation == tf.distribute.experimental.CommunicationImplementation.RING


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["mirrord"], {}, "did you mean 'mirrored'?"),
        (["mirrored"], {"device": 2}, "did you mean 'devices'?"),
        (["multi_worker_mirrored"], {"transport": "grpcs"}, "did you mean 'grpc'?"),
        (
            ["multi_worker_mirrored"],
            {"implementation": "ring"},
            "it is now called 'transport', of which 'ring' is 'grpc'",
        ),
        (["mirrored"], {"transport": "mpi"}, "strategy.transport=mpi is for multi_worker_mirrored"),
        (["multi_worker_mirrored"], {"transport": "ucx"}, "Known: auto, gloo, grpc, mpi, nccl, shared_memory"),
        (["multi_worker_mirrored"], {"devices": 2}, "CUDA_VISIBLE_DEVICES"),
        (
            ["mirrored"],
            {"devices": "GPU:9"},
            "strategy.devices names GPU:9, which is not there. This process has CPU:0, CPU:1.",
        ),
        (["one_device"], {"devices": "GPU:0"}, "strategy.devices names GPU:0, which is not there"),
        (["mirrored"], {"bucket_bytes": -1}, "must be 0 \\(off\\) or more"),
        (["one_device"], {"devices": 2}, "use strategy.name=mirrored"),
        (
            ["mirrored"],
            {"devices": 3},
            r"test_create_strategy\.py:\d+: strategy\.devices=3 virtual CPUs cannot be made",
        ),
    ],
)
def test_mistakes_are_answered(trainer, arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        tfdist.create_strategy(*arguments, **options)


def test_a_cluster_that_does_not_fit_is_refused(monkeypatch):
    jobs = {"worker": ["a:1", "b:1"]}
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": task}))
    with pytest.raises(ConfigError, match="is worker:0 of 2 training tasks"):
        tfdist.Trainer("mirrored", devices=2)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {**jobs, "chief": ["d:1"], "ps": ["c:1"]}, "task": task}))
    with pytest.raises(ConfigError, match="has no parameter servers"):
        tfdist.create_strategy("multi_worker_mirrored")
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": "evaluator", "index": 0}}))
    with pytest.raises(ConfigError, match="does not train"):
        tfdist.create_strategy("multi_worker_mirrored")


def test_tensorflow_in_use_before_a_multi_worker_strategy_is_named(monkeypatch):
    tf.constant(1)
    cluster = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(ConfigError, match=r"Create the strategy .* first"):
        tfdist.create_strategy("multi_worker_mirrored")


def test_an_argument_that_the_trainer_does_not_have_is_answered_by_its_own():
    with pytest.raises(
        ConfigError, match=r"argument of Trainer 'backupdir'; did you mean 'backup_dir'\? Known: backup, "
    ):
        tfdist.Trainer("one_device", backupdir="b")
    with pytest.raises(ConfigError, match=r"argument of Trainer 'bucketbytes'; did you mean 'bucket_bytes'\?"):
        tfdist.Trainer("one_device", bucketbytes=1)


def test_trainer_takes_a_strategy_of_its_own_kind_only(trainer):
    assert tfdist.Trainer(trainer.strategy).strategy is trainer.strategy
    with pytest.raises(ConfigError, match=r"made by tfdist\.create_strategy"):
        tfdist.Trainer(tf.distribute.OneDeviceStrategy("CPU:0"))


def test_a_model_from_outside_the_scope_is_refused(trainer):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="was not built in this trainer's scope"):
        trainer.fit(model, np.ones((4, 3)), np.ones((4, 2)))


def sgd(**arguments):
    return lambda: keras.optimizers.SGD(0.1, **arguments)


COMPILED = [
    {"jit_compile": True},
    {"steps_per_execution": 4},
    {"optimizer": sgd(gradient_accumulation_steps=2)},
    {"optimizer": sgd(use_ema=True, ema_overwrite_frequency=2)},
    {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))},
]


@pytest.mark.parametrize(
    ("method", "arguments"),
    tiers.cases(itertools.product(["fit", "train_on_batch"], COMPILED), quick=len(COMPILED) + 1),
    ids=[f"{method}-arguments{number}" for method in ("fit", "train_on_batch") for number in range(len(COMPILED))],
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


def test_a_loop_of_ones_own_may_run_a_compiled_models_step(trainer):
    model = build(trainer, steps_per_execution=4)
    x, y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    model.optimizer.build(model.trainable_variables)
    tf.function(lambda: trainer.strategy.run(model.test_step, ((x, y),)))()


def test_an_own_train_step_cannot_be_compiled(trainer):
    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    with trainer.scope():
        model = Own([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ConfigError, match=r"the one of Own may do more .* jit_compile=False"):
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


def test_fit_says_once_on_how_many_replicas_it_trains(mirrored, capsys):
    for size, said in (
        (4, "mirrored: 2 replicas, global batch 4 = 2 x 2\n"),
        (5, "global batch 5, dealt out evenly\n"),
    ):
        trainer = tfdist.Trainer(mirrored)
        model = build(trainer)
        for _ in range(2):
            model.fit(np.zeros([20, 3]), np.zeros([20, 2]), batch_size=size, verbose=2)
        assert capsys.readouterr().out.count(said) == 1


def test_a_second_trainer_trains_in_the_same_process(trainer):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((12, 3)), rng.standard_normal((12, 2))

    def losses(model):
        model.set_weights([np.ones([3, 2]), np.zeros([2])])
        return model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]

    expected = losses(build(tfdist.Trainer("one_device")))
    first, second = (tfdist.Trainer("mirrored", devices=2) for _ in range(2))
    for model in (build(first), build(second), build(first)):
        assert np.allclose(losses(model), expected, atol=1e-6)


def test_data_in_the_place_of_the_model_are_said(trainer):
    with pytest.raises(ConfigError, match=r"fit.*model"):
        trainer.fit(np.zeros([4, 3]), np.zeros([4, 2]))


def test_a_loop_of_ones_own_outside_of_the_replicas_is_said(trainer):
    said = "outside of the replicas: make a function of the step"
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
def test_no_data_are_no_training(trainer):
    model, some = build(trainer), (np.ones((4, 3)), np.ones((4, 2)))
    with pytest.raises(ConfigError, match="hold no batch"):
        trainer.fit(model, np.ones((0, 3)), np.ones((0, 2)), verbose=0)
    with pytest.raises(ConfigError, match="hold no batch"):
        trainer.evaluate(model, tf.data.Dataset.from_tensors((np.ones((4, 3)), np.ones((4, 2)))).take(0), verbose=0)
    with pytest.raises(ConfigError, match="validation, hold no batch"):
        trainer.fit(model, *some, validation_data=(some[0][:0], some[1][:0]), verbose=0)
    with pytest.raises(ConfigError, match="predict hold no batch"):
        trainer.predict(model, np.ones((0, 3)), verbose=0)


def test_a_callback_that_raises_stop_iteration_is_not_taken_for_the_end_of_the_data(trainer):
    stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: next(iter([])))
    with pytest.raises(StopIteration):
        trainer.fit(build(trainer), np.ones((4, 3)), np.ones((4, 2)), callbacks=[stop], verbose=0)


@pytest.mark.parametrize("dtype", tiers.cases(["float16", "bfloat16", "float64"], quick=1))
def test_gradients_of_several_types_are_reduced(trainer, dtype):
    with trainer.scope():
        layers = [keras.layers.Dense(4, dtype=dtype), keras.layers.Dense(2, dtype="float32")]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile("sgd", "mse")
    losses = trainer.fit(model, np.ones((4, 3)), np.ones((4, 2)), epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]


def test_a_prediction_of_some_steps_cut_by_an_execution(trainer):
    model = build(trainer, steps_per_execution=4)
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    batches = tf.data.Dataset.from_tensor_slices(x).batch(2)
    assert trainer.predict(model, batches.repeat(), steps=6, verbose=0).shape == (12, 2)
    with pytest.raises(ConfigError, match="steps=6 of predict must be a multiple of steps_per_execution=4"):
        trainer.predict(model, x, batch_size=2, steps=6, verbose=0)


def test_save_wants_a_keras_file(trainer, tmp_path):
    with pytest.raises(ConfigError, match=r"must end in '\.keras'"):
        trainer.save(build(trainer), tmp_path / "model.h5")


@pytest.mark.filterwarnings("ignore:The layer .* adds a loss of one number")
def test_a_lazily_built_model_takes_an_odd_batch_of_inputs_alone(trainer):
    class Autoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            y = self.dense(x)
            self.add_loss(keras.ops.mean((y - x) ** 2))
            return y

    with trainer.scope():
        model = Autoencoder()
        model.compile("sgd")
    dataset = tf.data.Dataset.from_tensor_slices(np.ones((5, 3), np.float32)).batch(5)
    assert np.isfinite(trainer.fit(model, dataset, verbose=0).history["loss"]).all()


def test_saving_after_a_loop_of_the_users_own_takes_the_mean(trainer, tmp_path):
    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.random.default_rng(0).standard_normal((8, 3), np.float32), np.ones((8, 1), np.float32)
    dataset = trainer.strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors((x, y)).repeat())
    batches = iter(dataset)
    step = tf.function(lambda batch: trainer.strategy.run(model.train_step, (batch,)))
    step(next(batches))
    trainer.evaluate(model, x, y, verbose=0)
    step(next(batches))
    mean = model.layers[0].moving_mean.value
    first, second = (c.numpy() for c in trainer.strategy.experimental_local_results(mean))
    assert (first != second).any()
    trainer.save(model, tmp_path / "model.keras")
    saved = keras.models.load_model(tmp_path / "model.keras").layers[0].moving_mean.numpy()
    assert saved == pytest.approx((first + second) / 2, abs=1e-7)


def test_save_makes_the_folder(trainer, tmp_path):
    trainer.save(build(trainer), tmp_path / "new" / "deep" / "model.keras")
    assert (tmp_path / "new" / "deep" / "model.keras").exists()


def test_save_heeds_overwrite(trainer, tmp_path):
    path = tmp_path / "model.keras"
    trainer.save(build(trainer), path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="overwrite=False"):
        trainer.save(build(trainer), path, overwrite=False)
    assert path.read_bytes() == before


STARVING = {
    "arrays": lambda x, y: (x, y),
    "dataset": lambda x, y: (tf.data.Dataset.from_tensor_slices((x, y)).batch(32),),
    "generator": lambda x, y: (((x[i : i + 32], y[i : i + 32]) for i in (0, 32)),),
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # as Keras says of any generator
@pytest.mark.parametrize(
    ("built", "kind"),
    tiers.cases(
        itertools.product([True, False], STARVING), quick=[(True, "arrays"), (False, "dataset"), (True, "generator")]
    ),
)
def test_an_empty_share_of_a_batch_never_makes_nan_of_batch_norm(trainer, kind, built):
    with trainer.scope():
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers] if built else layers)
        model.compile("sgd", "mse")
    x, y = np.ones((33, 3), np.float32), np.ones((33, 1), np.float32)
    trainer.fit(model, *STARVING[kind](x, y), verbose=0)
    assert all(np.isfinite(weights).all() for weights in model.get_weights())
    # Ones less their mean: what the last example alone moves is what all move.
    assert model.layers[0].moving_mean.numpy() == pytest.approx(np.full(3, 1 - 0.99**2), abs=1e-6)


def test_an_empty_share_trains_what_there_is(trainer):
    """The mean of nothing is NaN, and does not count."""

    def mean(y, predictions):
        return tf.reduce_mean((y - predictions) ** 2)

    for loss in (mean, "mse"):
        model = build(trainer, loss=lambda: loss, jit_compile=loss == "mse")  # noqa: B023
        before = model.get_weights()
        trainer.fit(model, np.ones((1, 3), np.float32), np.ones((1, 2), np.float32), verbose=0)
        assert all(np.isfinite(weights).all() for weights in model.get_weights())
        assert (before[0] != model.get_weights()[0]).any()


def test_arguments_go_by_keras_names_and_places(trainer):
    model = build(trainer)
    x, y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    assert len(trainer.fit(model, x=x, y=y, epochs=2, verbose=0).epoch) == 2
    assert len(trainer.fit(model, x, y, 2, 3, 0).epoch) == 3
    assert trainer.evaluate(model, x=x, y=y, verbose=0) == trainer.evaluate(model, x, y, 2, 0)
    assert trainer.predict(model, x=x, verbose=0).shape == (4, 2)
    with pytest.raises(TypeError, match="epoch"):
        trainer.fit(model, x, y, epoch=2)


class MoreArguments(keras.Sequential):
    def fit(self, *args, teacher=None, **kwargs):
        self.teacher = teacher
        return super().fit(*args, **kwargs)

    def predict(self, factor, x, verbose="auto"):
        return factor * super().predict(x, verbose=verbose)


class OtherArguments(MoreArguments):
    def fit(self, teacher, *args, epochs=3, **kwargs):
        return super().fit(*args, teacher=teacher, epochs=epochs, **kwargs)

    def evaluate(self, data, labels, **kwargs):
        return {"loss": super().evaluate(data, labels, **kwargs)}


def test_a_models_own_methods_take_more_arguments(trainer):
    x, y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    for kind, first in ((MoreArguments, ()), (OtherArguments, ("mine",))):
        with trainer.scope():
            model = kind([keras.Input((3,)), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
        assert len(trainer.fit(model, *first, x, y, 2, epochs=2, verbose=0).epoch) == 2
        assert model.teacher == (first[0] if first else None)
        once = trainer.predict(model, 1, x, verbose=0)
        np.testing.assert_allclose(trainer.predict(model, x=x, factor=3, verbose=0), 3 * once)
    assert len(trainer.fit(model, x=x, y=y, teacher="other", verbose=0).epoch) == 3
    assert model.teacher == "other"
    assert trainer.evaluate(model, x, y, verbose=0)["loss"] > 0


def test_an_uncompiled_model_predicts(trainer):
    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert trainer.predict(model, np.ones((5, 3)), verbose=0).shape == (5, 2)


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
            "the layer bn is synchronized=True .* jit_compile=False",
        ),
        (sequential, {"optimizer": OwnApply}, "OwnApply overrides apply_gradients"),
        pytest.param(
            sequential,
            {"optimizer": multi_optimizer},
            "MultiOptimizer is not supported",
            marks=pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras has it since 3.15"),
        ),
        (lambda: sequential(keras.layers.LSTM(2, stateful=True), shape=(4, 3), batch=4), {}, "lstm.* is stateful=True"),
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


def test_data_that_are_no_batches_or_come_out_of_order_are_said(trainer):
    model = build(trainer)
    with pytest.raises(ConfigError, match=r"must hold batches: call its batch\(\)"):
        trainer.fit(model, tf.data.Dataset.from_tensor_slices((np.ones((4, 3)), np.ones(4))))

    class Queue(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.ones((4, 3)), np.ones((4, 2))

    with pytest.raises(ConfigError, match="workers=2, use_multiprocessing=False comes out of order"):
        trainer.fit(model, Queue(workers=2))


def test_a_model_compiled_anew_may_be_fitted_by_itself(trainer):
    model = build(trainer)
    x, y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    trainer.fit(model, x, y, verbose=0)
    with trainer.scope():
        model.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse")
    model.fit(x, y, batch_size=2, verbose=0)
    assert model.optimizer._iterations.numpy() == 2


def test_a_failed_save_raises_and_keeps_the_file_before(trainer, tmp_path):
    model = build(trainer)
    path = tmp_path / "model.keras"
    trainer.save(model, path)
    before = path.read_bytes()

    def fail(store):
        store["0"] = np.zeros(3)
        raise OSError("the disk is full")

    model.layers[-1].save_own_variables = fail
    with pytest.raises(OSError, match="the disk is full"):
        trainer.save(model, path)
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["model.keras"]


def test_a_function_of_finite_data_ends_its_epochs_by_itself(trainer):
    model = build(trainer)

    def dataset(context):
        # 7 batches for 2 replicas: in the last step one replica has nothing.
        return tf.data.Dataset.from_tensors((np.ones((4, 3), np.float32), np.ones((4, 2), np.float32))).repeat(7)

    # A warning that the data ran out would fail this test.
    trainer.fit(model, dataset, epochs=2, verbose=0)
    assert model.optimizer.iterations.numpy() == 8
    assert trainer.predict(model, dataset, verbose=0).shape == (28, 2)


def test_strategy_config_and_datasets_of_functions(trainer):
    assert tfdist.Trainer(StrategyConfig("mirrored", devices=2)).num_replicas == 2
    model = build(trainer)

    def dataset(context):
        assert (context.num_input_pipelines, context.num_replicas_in_sync) == (1, 2)
        return tf.data.Dataset.from_tensors((np.ones((4, 3), np.float32), np.ones((4, 2), np.float32))).repeat()

    history = trainer.fit(
        model, dataset, steps_per_epoch=3, epochs=2, verbose=0, validation_data=dataset, validation_steps=2
    )
    assert model.optimizer.iterations.numpy() == 6
    assert set(history.history) == {"loss", "val_loss"}


@pytest.mark.parametrize(
    ("jobs", "task", "sentence"),
    [
        (
            None,
            None,
            "parameter_server needs a cluster: start its tasks with a scheduler, with --hosts, with TF_CONFIG",
        ),
        (
            {"worker": ["h:1"]},
            ("worker", 0),
            "add addresses to job 'chief' and 'ps'. Received: worker (1). Of a scheduler's ranks,",
        ),
        ({"chief": ["h:1"], "worker": ["h:2"]}, ("chief", 0), "job 'ps'. Received: chief (1), worker (1)."),
        (
            {"chief": ["h:1"], "worker": ["h:2"], "ps": ["h:3"]},
            ("evaluator", 0),
            "An evaluator does not train: use strategy one_device in its process.",
        ),
    ],
)
def test_parameter_servers_need_a_whole_cluster(monkeypatch, jobs, task, sentence):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    cluster = jobs and (ClusterSpec(jobs), TaskSpec(*task))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        tfdist.create_strategy("parameter_server", cluster)
