"""Ratings of items by users, drawn from a known model: a recommender whose best reachable error is known.

Each user and each item has tastes, numbers between -1.7 and 1.7 that are a function of its id. A rating is 3, plus half the
inner product of the tastes, plus noise. So no model has a root mean squared error below `Options.noise`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tfdist.config.constraints import Constraint, between, option
from tfdist.tasks.base import Task

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

MEAN_RATING = 3.0
_TASTES = 4
_ITEMS_OF_EXAMPLE = 8
_EVAL_EXAMPLES = 2_000
_MOST = 10**9
_NOISE: Constraint = ("0 or more", lambda noise: noise >= 0)


@dataclasses.dataclass
class Options:
    """Size of the tables and the data.

    Attributes:
        users: Rows of the table of users.
        items: Rows of the table of items.
        columns: Columns of both tables.
        examples: Number of training examples; each is a user's ratings of 8 items.
        noise: Standard deviation of the noise in a rating: the best reachable error.
        top: An example is a hit if its item of the highest rating is among the `top` items of the highest predictions.
    """

    users: int = option(2_000, *between(1, _MOST))
    items: int = option(1_000, *between(1, _MOST))
    columns: int = option(8, *between(1, 100_000))
    examples: int = option(30_000, *between(1, _MOST))
    noise: float = option(0.5, *_NOISE)
    top: int = option(3, *between(1, _ITEMS_OF_EXAMPLE))


class Ratings(Task):
    """A two-tower recommender: a rating is predicted by the product of a row of the user and a row of the item."""

    Options = Options

    def build_model(self) -> keras.Model:
        import keras

        from tfdist import layers

        user = keras.Input((1,), dtype="int32", name="user")
        items = keras.Input((_ITEMS_OF_EXAMPLE,), dtype="int32", name="items")

        def table(name: str, rows: int) -> layers.Embedding:
            initializer = keras.initializers.RandomUniform(-0.5, 0.5)  # its seed is another one for each table
            return layers.Embedding(rows, self.options.columns, embeddings_initializer=initializer, name=name)

        user_rows = table("user_rows", self.options.users)
        item_rows = table("item_rows", self.options.items)
        products = keras.layers.Dot(axes=2)([item_rows(items), user_rows(user)])
        ratings = keras.layers.Rescaling(1.0, offset=MEAN_RATING)(keras.layers.Flatten()(products))
        return keras.Model({"user": user, "items": items}, ratings, name="ratings")

    def compile_arguments(self) -> dict[str, Any]:
        import keras

        top = self.options.top
        metrics = [
            keras.metrics.RootMeanSquaredError(name="rmse"),
            # The true category is the item of the highest rating.
            keras.metrics.TopKCategoricalAccuracy(top, name=f"top_{top}"),
        ]
        return {"loss": "mean_squared_error", "metrics": metrics}

    def steps_per_epoch(self, global_batch_size: int) -> int:
        return self.options.examples // global_batch_size

    def train_data(self, context: tf.distribute.InputContext, global_batch_size: int, seed: int) -> tf.data.Dataset:
        from tfdist import data

        return data.epochs(self.examples(self.options.examples, split=0), context, global_batch_size, seed)

    def eval_data(self, global_batch_size: int) -> tf.data.Dataset:
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(self.examples(_EVAL_EXAMPLES, split=1)).batch(global_batch_size)

    def examples(self, count: int, split: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns the ids of users, `[count, 1]`, and of items, `[count, 8]`, and the ratings, `[count, 8]`."""
        import numpy as np

        rng = np.random.default_rng(split)
        user = rng.integers(self.options.users, size=(count, 1), dtype=np.int32)
        items = rng.integers(self.options.items, size=(count, _ITEMS_OF_EXAMPLE), dtype=np.int32)
        noise = rng.standard_normal(items.shape, np.float32) * np.float32(self.options.noise)
        return {"user": user, "items": items}, expected_ratings(user, items) + noise


def expected_ratings(user: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Returns the ratings without noise."""
    products = _tastes(user, 0) * _tastes(items, 1)
    return MEAN_RATING + products.sum(axis=-1) / 2  # of standard deviation 1


def _tastes(ids: np.ndarray, kind: int) -> np.ndarray:
    """Returns numbers of mean 0 and variance 1 for each id, `[..., 4]` float32, computed from the id: a table of them would be large."""
    import numpy as np

    number: Any = (ids[..., None].astype(np.uint64) * 2 + kind) * _TASTES + np.arange(_TASTES, dtype=np.uint64)
    # The mixing of SplitMix64.
    number *= np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    share = (number >> np.uint64(40)).astype(np.float32) / 2**24
    return (2 * share - 1) * np.float32(np.sqrt(3))
