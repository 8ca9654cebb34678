"""`Trainer` in one process with two replicas: fit, evaluate, predict and save."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers
from tests.helpers.dense_model import build
from tfdist import StrategyConfig


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


@pytest.fixture(scope="module")
def model(trainer):
    return build(trainer)


def test_a_loop_of_ones_own_may_run_a_compiled_models_step(trainer):
    model = build(trainer, steps_per_execution=4)
    x, y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    model.optimizer.build(model.trainable_variables)
    tf.function(lambda: trainer.strategy.run(model.test_step, ((x, y),)))()


def test_fit_says_once_on_how_many_replicas_it_trains(mirrored, model, capsys):
    for size, said in (
        (4, "mirrored: 2 replicas, global batch 4 = 2 x 2\n"),
        (5, "global batch 5, dealt out evenly\n"),
    ):
        tfdist.Trainer(mirrored)  # which the model's own fit calls from now on
        for _ in range(2):
            model.fit(np.zeros([5, 3]), np.zeros([5, 2]), batch_size=size, verbose=2)
        assert capsys.readouterr().out.count(said) == 1


@pytest.mark.parametrize(("steps", "said"), [(1, ["the training had 1 steps, fewer than"]), (3, [])])
def test_a_training_shorter_than_the_accumulation_says_so(trainer, caplog, steps, said):
    model = build(trainer)
    with trainer.scope():
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    trainer.fit(model, np.ones([4 * steps, 3]), np.ones([4 * steps, 2]), batch_size=4, verbose=0)
    found = [text for text in caplog.messages if "no weight was updated" in text]
    assert [part in text for part, text in zip(said, found, strict=True)] == [True] * len(said)


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
    whole = trainer.predict(model, x, batch_size=2, verbose=0)
    np.testing.assert_array_equal(trainer.predict(model, x, batch_size=2, steps=6, verbose=0), whole[:12])


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


def test_save_makes_the_folder(trainer, model, tmp_path):
    trainer.save(model, tmp_path / "new" / "deep" / "model.keras")
    assert (tmp_path / "new" / "deep" / "model.keras").exists()


def test_save_heeds_overwrite(trainer, model, tmp_path):
    path = tmp_path / "model.keras"
    trainer.save(model, path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="overwrite=False"):
        trainer.save(model, path, overwrite=False)
    assert path.read_bytes() == before


def test_arguments_go_by_keras_names_and_places(trainer, model):
    x, y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    assert len(trainer.fit(model, x=x, y=y, epochs=2, verbose=0).epoch) == 2
    assert len(trainer.fit(model, x, y, 2, 3, 0).epoch) == 3
    assert trainer.evaluate(model, x=x, y=y, verbose=0) == trainer.evaluate(model, x, y, 2, 0)
    assert trainer.predict(model, x=x, verbose=0).shape == (4, 2)
    with pytest.raises(TypeError, match="epoch"):
        trainer.fit(model, x, y, epoch=2)


def test_an_uncompiled_model_predicts(trainer):
    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert trainer.predict(model, np.ones((5, 3)), verbose=0).shape == (5, 2)


def test_a_failed_save_raises_and_keeps_the_file_before(trainer, model, tmp_path, monkeypatch):
    path = tmp_path / "model.keras"
    trainer.save(model, path)
    before = path.read_bytes()

    def fail(store):
        store["0"] = np.zeros(3)
        raise OSError("the disk is full")

    monkeypatch.setattr(model.layers[-1], "save_own_variables", fail)
    with pytest.raises(OSError, match="the disk is full"):
        trainer.save(model, path)
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["model.keras"]


def test_a_function_of_finite_data_ends_its_epochs_by_itself(trainer, model):
    def dataset(context):
        # 7 batches for 2 replicas: in the last step one replica has nothing.
        return tf.data.Dataset.from_tensors((np.ones((4, 3), np.float32), np.ones((4, 2), np.float32))).repeat(7)

    before = int(model.optimizer.iterations)
    # A warning that the data ran out would fail this test.
    trainer.fit(model, dataset, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == before + 8
    assert trainer.predict(model, dataset, verbose=0).shape == (28, 2)


def test_strategy_config_and_datasets_of_functions(trainer, model):
    assert tfdist.Trainer(StrategyConfig("mirrored", devices=2)).num_replicas == 2

    def dataset(context):
        assert (context.num_input_pipelines, context.num_replicas_in_sync) == (1, 2)
        return tf.data.Dataset.from_tensors((np.ones((4, 3), np.float32), np.ones((4, 2), np.float32))).repeat()

    before = int(model.optimizer.iterations)
    validation = {"validation_data": dataset, "validation_steps": 2}
    history = trainer.fit(model, dataset, steps_per_epoch=3, epochs=2, verbose=0, **validation)
    assert int(model.optimizer.iterations) == before + 6
    assert set(history.history) == {"loss", "val_loss"}
