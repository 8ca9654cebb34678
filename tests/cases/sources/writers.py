"""Functions that write a model's files, called by every rank with the same path."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import MIRRORED, SERVERS, WORKERS
from tests.cases.case import case

ROUNDS = 3  # a file that two ranks write at once is not torn every time
ROWS = np.random.default_rng(0).standard_normal((16, 3)).astype("float32")


def small_model():
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.BatchNormalization()(inputs)))


def export_archive(model, path):
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.call, [keras.InputSpec(shape=(None, 3), dtype="float32")])
    archive.write_out(path, verbose=False)


def saved_model(model, path):
    serve = tf.function(model.call, input_signature=[tf.TensorSpec((None, 3))])
    tf.saved_model.save(model, path, {"serving_default": serve})


WRITERS = {
    "ExportArchive": export_archive,
    "tf.saved_model.save": saved_model,
    "model.export": lambda model, path: model.export(path, verbose=False),
    "model.save.keras": lambda model, path: model.save(path),
    "save_model.keras": keras.saving.save_model,
    "save_model.h5": keras.models.save_model,
    "save_model.hdf5": keras.saving.save_model,
    "save_model zipped": lambda model, path: keras.saving.save_model(model, path, zipped=False),
    "save_weights.weights.h5": keras.saving.save_weights,
    "layer.weights.h5": lambda model, path: keras.saving.save_weights(model.layers[2], path),
    "shards.weights.json": lambda model, path: model.save_weights(path, max_shard_size=5e-8),
    "Checkpoint.write": lambda model, path: tf.train.Checkpoint(model=model).write(path),
    "Checkpoint.save": lambda model, path: tf.train.Checkpoint(model=model).save(path),
    "CheckpointManager": lambda model, path: tf.train.CheckpointManager(
        tf.train.Checkpoint(model=model), path, max_to_keep=2
    ).save(checkpoint_number=1),
}


def write_and_load(world, name, model):
    """Writes by every writer on every rank. Returns, of the chief, what a fresh process finds and what is right."""
    folder = world.folder / name
    folder.mkdir(exist_ok=True)
    for writer, write in WRITERS.items():
        for _ in range(ROUNDS):
            write(model, str(folder / writer))
    world.gather()
    if world.rank:
        return {"ranks that load": (0, 0)}
    right = model(ROWS, training=False).numpy()
    np.savez(folder / "right.npz", *model.get_weights())
    program = [sys.executable, "-m", "tests.cases.sources.writers", str(folder)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("TF_CONFIG", "TFDIST"))}
    done = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == WRITERS.keys()
    left = [path.name for path in folder.rglob("*partial*")]
    return {writer: (value, right) for writer, value in found.items()} | {"partial files": (len(left), 0)}


def made(world):
    keras.utils.set_random_seed(1)
    with world.scope():
        model = small_model()
        model.compile("adam", "mse")
    return model


@case(MIRRORED, WORKERS, SERVERS, full=(MIRRORED, SERVERS))
def writers_after_fit(world):
    model = made(world)
    model.fit(ROWS, ROWS[:, :2], batch_size=8, verbose=0)
    return write_and_load(world, "after fit", model)


@case(WORKERS, full=True)
def writers_after_a_loop_of_ones_own(world):
    model = made(world)

    def step():
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        model(ROWS[:8] * (1.0 + tf.cast(rank, tf.float32)), training=True)

    tf.function(lambda: world.trainer.strategy.run(step))()
    pairs = write_and_load(world, "own loop", model)
    mean = 0.01 * ROWS[:8].mean(0) * 1.5  # momentum 0.99; replicas saw the rows, and twice the rows
    return pairs | {"mean": (model.layers[1].moving_mean.numpy(), mean)}


@case(MIRRORED, WORKERS, SERVERS, full=True)
def writers_in_the_scope(world):
    model = made(world)
    model.fit(ROWS, ROWS[:, :2], batch_size=8, verbose=0)
    with world.scope():
        return write_and_load(world, "in scope", model)


def load(folder):
    """Returns what the model of each writer's files computes, in this process without a strategy."""

    def weighted(restore, model=None):
        model = model or small_model()
        restore(model)
        return model

    def checkpoint(path):
        return weighted(lambda model: tf.train.Checkpoint(model=model).restore(path).expect_partial())

    def layer(path):
        model = small_model()
        model.set_weights([*np.load(folder / "right.npz").values()])
        model.layers[2].set_weights([np.zeros((3, 2)), np.zeros(2)])
        keras.saving.load_weights(model.layers[2], path)
        return model

    def served(name):
        model = tf.saved_model.load(str(folder / name))
        serve = getattr(model, "serve", None) or model.signatures["serving_default"]
        value = serve(tf.constant(ROWS))
        return np.asarray(next(iter(value.values())) if isinstance(value, dict) else value)

    loaded = {}
    for name in WRITERS:
        path = str(folder / name)
        if name in ("ExportArchive", "tf.saved_model.save", "model.export"):
            loaded[name] = served(name)
            continue
        if name.startswith(("save_model", "model.save")):
            model = keras.models.load_model(path, compile=False)
        elif name.startswith("layer"):
            model = layer(path)
        elif name == "CheckpointManager":
            model = checkpoint(f"{path}/ckpt-1")
        elif name.startswith("Checkpoint"):
            model = checkpoint(path + "-1" * name.endswith(".save"))
        else:
            model = weighted(lambda model, path=path: model.load_weights(path))
        loaded[name] = model(ROWS, training=False).numpy()
    return {name: value.tolist() for name, value in loaded.items()}


if __name__ == "__main__":
    print(json.dumps(load(pathlib.Path(sys.argv[1]))))
