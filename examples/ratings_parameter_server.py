"""Recommendation: tables of users and items learn ratings, with their rows on parameter servers.

    tfdist launch --workers=2 --ps=2 -- python examples/ratings_parameter_server.py
    python examples/ratings_parameter_server.py --strategy=one_device                       # one process
    tfdist launch --workers=2 -- python examples/ratings_parameter_server.py --strategy=multi_worker_mirrored

A rating is 3, plus half the product of the user's and the item's tastes, plus noise of standard deviation 0.5. No model has an
error below 0.5; predicting 3 for every rating has 1.1. Each server holds half of the rows, and a step reads and updates only the
rows of its batch. Takes about 40 s on 2 cores; expect a root mean squared error below 0.57 on held-out ratings.
"""

import argparse
import pathlib

import keras
import numpy as np
import tensorflow as tf

import tfdist
import tfdist.layers

TASTES = 4
ITEMS_OF_EXAMPLE = 8  # an example is a user, with ratings of some items
BATCH_SIZE = 64  # examples in a step

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="parameter_server")
parser.add_argument("--users", type=int, default=2000)
parser.add_argument("--items", type=int, default=1000)
parser.add_argument("--columns", type=int, default=8, help="of both tables")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--steps", type=int, default=450, help="steps per epoch")
args = parser.parse_args()


def draw_ratings(count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns users, `[count, 1]`, items, `[count, 8]`, and the ratings, `[count, 8]`."""
    rng = np.random.default_rng(1)
    user_tastes = rng.standard_normal((args.users, TASTES), np.float32)
    item_tastes = rng.standard_normal((args.items, TASTES), np.float32)
    user = rng.integers(args.users, size=(count, 1), dtype=np.int32)
    items = rng.integers(args.items, size=(count, ITEMS_OF_EXAMPLE), dtype=np.int32)
    rating = 3 + (user_tastes[user] * item_tastes[items]).sum(axis=-1) / 2
    noise = 0.5 * rng.standard_normal(rating.shape, np.float32)
    return {"user": user, "items": items}, rating + noise


def dataset(begin: int, end: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(({name: x[name][begin:end] for name in x}, y[begin:end]))


def train_data(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Returns one worker's share as an infinite dataset. Each worker calls this function and reads its own share."""
    share = dataset(HELD_OUT, len(y)).shard(context.num_input_pipelines, context.input_pipeline_id)
    batch_size = context.get_per_replica_batch_size(BATCH_SIZE)
    return share.shuffle(len(y), seed=1).repeat().batch(batch_size).prefetch(tf.data.AUTOTUNE)


def build_model() -> keras.Model:
    """Returns a model of two towers: a rating is 3, plus the product of a row of the user and a row of the item."""
    user = keras.Input((1,), dtype="int32", name="user")
    items = keras.Input((ITEMS_OF_EXAMPLE,), dtype="int32", name="items")
    initializer = keras.initializers.RandomUniform(-0.5, 0.5)
    user_row = tfdist.layers.Embedding(args.users, args.columns, embeddings_initializer=initializer, seed=1)(user)
    item_rows = tfdist.layers.Embedding(args.items, args.columns, embeddings_initializer=initializer, seed=2)(items)
    products = keras.layers.Flatten()(keras.layers.Dot(axes=2)([item_rows, user_row]))
    ratings = keras.layers.Rescaling(1.0, offset=3.0)(products)
    return keras.Model({"user": user, "items": items}, ratings, name="ratings")


trainer = tfdist.Trainer(args.strategy)  # before any tensor; workers and servers serve here until the chief ends
keras.utils.set_random_seed(1)
x, y = draw_ratings(32_000)
HELD_OUT = 2_000
validation = dataset(0, HELD_OUT).batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE)

with trainer.scope():
    model = build_model()
    model.compile(
        # Adagrad updates only the rows of a batch. The gradients of a row are small, and so must its first accumulator be.
        optimizer=keras.optimizers.Adagrad(0.1, initial_accumulator_value=1e-7),
        loss="mean_squared_error",
        metrics=[
            keras.metrics.RootMeanSquaredError(name="rmse"),
            keras.metrics.TopKCategoricalAccuracy(3, name="top_3"),  # the best of the 8 items is among 3
        ],
    )

model.fit(
    train_data,
    steps_per_epoch=args.steps,  # infinite data do not define the length of an epoch
    validation_data=validation,
    epochs=args.epochs,
    verbose=2,
)
results = model.evaluate(validation, return_dict=True, verbose=0)
pathlib.Path("runs").mkdir(exist_ok=True)
trainer.save(model, "runs/ratings.keras")
if trainer.is_chief:
    print(
        f"root mean squared error {results['rmse']:.4f}, top 3 {results['top_3']:.3f}, {trainer.num_replicas} replicas"
    )
