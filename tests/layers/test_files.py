"""Files hold one table, however many shards have written it, and however many read it."""

from __future__ import annotations

import pathlib
import re
import subprocess
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import fork_server
from tfdist.backup.storage import Storage
from tfdist.training import backup_export

ROOT = pathlib.Path(__file__).parents[2]
ROWS, COLUMNS = 11, 3
rng = np.random.default_rng(7)
IDS = rng.integers(0, ROWS, (24, 4)).astype("int32")
Y = rng.standard_normal((24, COLUMNS)).astype("float32")
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True, use_ema=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
}


@pytest.fixture(scope="module")
def trainer():
    return tfdist.Trainer("one_device")


def build(embedding, optimizer="adam"):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,), dtype="int32"), embedding, keras.layers.Flatten(), keras.layers.Dense(COLUMNS)]
    model = keras.Sequential(layers)
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def split(trainer, shards, optimizer="adam"):
    keras.backend.clear_session()  # a new process would have the same names of variables
    with trainer.scope():
        return build(tfdist.layers.Embedding(ROWS, COLUMNS, shards=shards, seed=1), optimizer)


def fit(model, **arguments):
    model.fit(IDS, Y, batch_size=6, shuffle=False, verbose=0, **arguments)


def with_shards(path, shards):
    """Returns a model from a file, with another number of shards."""
    copy = path.with_name(f"{shards}-{path.name}")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(copy, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "config.json":
                content = content.replace(b'"shards": 2', b'"shards": %d' % shards)
            new.writestr(name, content)
    return keras.models.load_model(copy)


def optimizer_state(model, folder):
    """Returns the optimizer's variables in Keras' layout."""
    path = folder / "state.keras"
    model.save(path)
    with zipfile.ZipFile(path) as file:
        file.extract("model.weights.h5", folder)
    with h5py.File(folder / "model.weights.h5") as file:
        return {name: file["optimizer/vars"][name][()] for name in file["optimizer/vars"]}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_model_and_its_optimizer_continue_with_another_number_of_shards(trainer, tmp_path, optimizer):
    model = split(trainer, 2, optimizer)
    fit(model)
    path = tmp_path / "model.keras"
    trainer.save(model, path, delete_backup=False)
    state = optimizer_state(model, tmp_path)
    fit(model)
    for shards in (1, 2, 3):
        with trainer.scope():
            loaded = with_shards(path, shards)
        assert len(loaded.layers[0].weights) == shards
        found = optimizer_state(loaded, tmp_path)
        assert found.keys() == state.keys()
        for name, value in state.items():
            np.testing.assert_array_equal(found[name], value)
        fit(loaded)
        np.testing.assert_array_equal(loaded.layers[0].table.numpy(), model.layers[0].table.numpy())


def test_keras_own_layer_loads_the_table_and_its_slots(trainer, tmp_path):
    path = tmp_path / "all.weights.h5"
    model = split(trainer, 3, "adagrad")
    fit(model)
    model.save_weights(path)
    plain = build(keras.layers.Embedding(ROWS, COLUMNS), "adagrad")
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(path)
    np.testing.assert_array_equal(plain.layers[0].embeddings, model.layers[0].table.numpy())
    slot = next(v for v in plain.optimizer.variables if tuple(v.shape) == (ROWS, COLUMNS))
    shards = [v.numpy() for v in model.optimizer.variables if "embeddings" in v.name]
    for shard, rows in enumerate(shards):
        np.testing.assert_array_equal(slot.numpy()[shard::3], rows)
    plain.save_weights(path)
    other = split(trainer, 2, "adagrad")
    with trainer.scope():
        other.optimizer.build(other.trainable_variables)
    other.load_weights(path)
    np.testing.assert_array_equal(other.layers[0].table.numpy(), plain.layers[0].embeddings)
    shards = [v.numpy() for v in other.optimizer.variables if "embeddings" in v.name]
    np.testing.assert_array_equal(shards[1], slot.numpy()[1::2])


def test_a_table_of_another_shape_is_an_error(trainer, tmp_path):
    path = tmp_path / "all.weights.h5"
    build(keras.layers.Embedding(ROWS + 1, COLUMNS)).save_weights(path)
    with pytest.raises(ValueError, match=r"embeddings_0 must have shape \(11, 3\): .* Received: \(12, 3\)"):
        split(trainer, 2).load_weights(path)


class Break(keras.callbacks.Callback):
    """Ends a training at a step."""

    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_backup_of_two_shards_continues_with_three_and_with_one(trainer, tmp_path):
    undisturbed = split(trainer, 1)
    fit(undisturbed, epochs=3)
    for shards, last in ((2, 3), (3, 4), (1, 0)):  # shards, and the step at which the training breaks
        model = split(trainer, shards)
        backup = tfdist.BackupAndRestore(str(tmp_path / "backup"), save_freq=1, delete_checkpoint=False)
        callbacks = [Break(last), backup]
        if last:
            with pytest.raises(KeyboardInterrupt):
                fit(model, epochs=3, callbacks=callbacks)
        else:
            fit(model, epochs=3, callbacks=callbacks)
    np.testing.assert_array_equal(model.layers[0].table.numpy(), undisturbed.layers[0].table.numpy())
    for found, right in zip(model.optimizer.variables, undisturbed.optimizer.variables, strict=True):
        np.testing.assert_array_equal(found.numpy(), right.numpy())


def test_an_evaluation_of_a_backup_has_its_own_number_of_shards(trainer, tmp_path):
    model = split(trainer, 2, "adagrad")
    fit(model, callbacks=[tfdist.BackupAndRestore(str(tmp_path), delete_checkpoint=False)])
    storage = Storage(str(tmp_path), 0, 1)
    point = storage.points()[0]
    _, weights = backup_export.read_weights(storage, point)
    evaluated = split(trainer, 3, "adagrad")
    with trainer.scope():
        evaluated.optimizer.build(evaluated.trainable_variables)
    backup_export.load_weights(evaluated, weights, "the backup")
    np.testing.assert_array_equal(evaluated.layers[0].table.numpy(), model.layers[0].table.numpy())


def test_an_exported_model_looks_ids_up(trainer, tmp_path):
    model = split(trainer, 2)
    trainer.export(model, tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(loaded.serve(IDS), model.predict(IDS, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_no_second_copy_of_a_table_is_in_memory(tmp_path):
    command = fork_server.command("tests.layers.memory_program", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (figures,) = re.findall(r"beyond the table: (-?\d+) (-?\d+)", done.stdout)
    assert max(map(int, figures)) < 230, figures  # a chunk of 64 MB, and copies of it
