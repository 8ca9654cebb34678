"""Recommendation: embeddings of users and items learn ratings, with the variables on parameter servers.

    tfdist launch --workers=2 --ps=1 -- python examples/ratings_parameter_server.py
    python examples/ratings_parameter_server.py --strategy=one_device                       # one process
    tfdist launch --workers=2 -- python examples/ratings_parameter_server.py --strategy=multi_worker_mirrored

A rating is 3, plus the product of the user's and the item's tastes, plus noise of standard deviation 0.5. No model has an
error below 0.5; predicting 3 for every rating has 1.5. Takes about 40 s on 2 cores; expect a root mean squared error below 0.6
on held-out ratings.
"""

import argparse
import pathlib

import keras
import numpy as np
import tensorflow as tf

import tfdist

USERS, ITEMS, TASTES = 2000, 1000, 4
BATCH_SIZE = 512  # examples in a step


def draw_ratings(count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns users and items, `[count]` each, and the ratings, `[count]`."""
    rng = np.random.default_rng(1)
    user_tastes, item_tastes = rng.normal(0, 1, (USERS, TASTES)), rng.normal(0, 0.7, (ITEMS, TASTES))
    user, item = rng.integers(USERS, size=count, dtype=np.int32), rng.integers(ITEMS, size=count, dtype=np.int32)
    rating = 3 + (user_tastes[user] * item_tastes[item]).sum(axis=1) + rng.normal(0, 0.5, count)
    return {"user": user, "item": item}, rating.astype(np.float32)


def dataset(begin: int, end: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(({name: x[name][begin:end] for name in x}, y[begin:end]))


def train_data(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Returns one worker's share as an infinite dataset. Each worker calls this function and reads its own share."""
    share = dataset(HELD_OUT, len(y)).shard(context.num_input_pipelines, context.input_pipeline_id)
    batch_size = context.get_per_replica_batch_size(BATCH_SIZE)
    return share.shuffle(len(y), seed=1).repeat().batch(batch_size).prefetch(tf.data.AUTOTUNE)


def build_model() -> keras.Model:
    """Returns a model of ratings: the product of embeddings, plus an offset for each user and each item."""
    names = {"user": USERS, "item": ITEMS}
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in names}
    embeddings = [
        keras.layers.Embedding(count, 8, name=f"{name}_tastes")(inputs[name]) for name, count in names.items()
    ]
    offsets = [keras.layers.Embedding(count, 1, name=f"{name}_offset")(inputs[name]) for name, count in names.items()]
    rating = keras.layers.Add()([keras.layers.Dot(axes=1)(embeddings), *offsets])
    return keras.Model(inputs, keras.layers.Rescaling(1.0, offset=3.0)(rating), name="ratings")


parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="parameter_server")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--steps", type=int, default=400, help="steps per epoch")
args = parser.parse_args()

trainer = tfdist.Trainer(args.strategy)  # before any tensor; workers and servers serve here until the chief ends
keras.utils.set_random_seed(1)
x, y = draw_ratings(220_000)
HELD_OUT = 20_000
validation = dataset(0, HELD_OUT).batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE)

with trainer.scope():
    model = build_model()
    model.compile(
        optimizer=keras.optimizers.Adam(5e-3),
        loss="mean_squared_error",
        metrics=[keras.metrics.RootMeanSquaredError(name="rmse")],
    )

callbacks = [keras.callbacks.EarlyStopping("val_rmse", mode="min", patience=2, restore_best_weights=True)]
model.fit(
    train_data,
    steps_per_epoch=args.steps,  # infinite data do not define the length of an epoch
    validation_data=validation,
    epochs=args.epochs,
    callbacks=callbacks,
    verbose=2,
)
results = model.evaluate(validation, return_dict=True, verbose=0)
pathlib.Path("runs").mkdir(exist_ok=True)
trainer.save(model, "runs/ratings.keras")
if trainer.is_chief:
    print(f"root mean squared error {results['rmse']:.4f}, {trainer.num_replicas} replicas")
