"""The layer on one device: initial values, combiners, and messages."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
import tfdist.layers.row_initializer

rng = np.random.default_rng(3)
TABLE = rng.standard_normal((9, 4)).astype("float32")
BAGS = [[3, 0, 3], [], [8]]
WEIGHTS = [[0.5, 2.0, -1.0], [], [3.0]]


def table(rows, columns, shards, **arguments):
    layer = tfdist.layers.Embedding(rows, columns, shards=shards, **arguments)
    layer.build()
    assert len(layer.weights) == shards
    return layer.table.numpy()


DRAWN = {
    "uniform": lambda: "uniform",
    "normal": lambda: keras.initializers.RandomNormal(1.0, 2.0, seed=3),
    "truncated": lambda: keras.initializers.TruncatedNormal(stddev=2.0, seed=4),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_a_row_begins_with_the_same_bits_for_any_number_of_shards(kind, monkeypatch):
    monkeypatch.setattr(tfdist.layers.row_initializer, "CHUNK", 700)  # several chunks
    one, two, three = (table(1001, 5, n, embeddings_initializer=DRAWN[kind](), seed=1) for n in (1, 2, 3))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, three)
    assert not np.array_equal(one, table(1001, 5, 2, embeddings_initializer=DRAWN[kind](), seed=2))


def test_initial_values_have_the_distribution_of_keras():
    count = 40_000
    drawn = {
        kind: np.sort(table(count, 1, 1, embeddings_initializer=make(), seed=1)[:, 0]) for kind, make in DRAWN.items()
    }
    for kind, make in DRAWN.items():
        keras_own = np.sort(keras.initializers.get(make())((count,)))
        # Kolmogorov and Smirnov: two samples of one distribution differ by less than this, except once in 1e6.
        places = np.searchsorted(keras_own, drawn[kind]) / count
        assert abs(places - np.arange(count) / count).max() < 2.7 * np.sqrt(2 / count), kind
        assert len(np.unique(drawn[kind])) > count * 0.9


def test_without_a_seed_keras_global_seed_counts():
    tables = []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(seed)
        tables.append(table(9, 4, 2))
    assert np.array_equal(tables[0], tables[1]) and not np.array_equal(tables[0], tables[2])


@pytest.mark.parametrize(("initializer", "value"), [("zeros", 0), ("ones", 1), (keras.initializers.Constant(3.0), 3)])
def test_rows_of_one_value(initializer, value):
    assert (table(9, 4, 2, embeddings_initializer=initializer) == value).all()


def combined(combiner, weights=WEIGHTS):
    """Returns the right results for `BAGS`."""
    results = []
    for ids, factors in zip(BAGS, weights, strict=True):
        total = sum((factor * TABLE[i].astype("float64") for i, factor in zip(ids, factors, strict=True)), np.zeros(4))
        divisor = {"sum": 1.0, "mean": sum(factors), "sqrtn": np.sqrt(np.square(factors).sum())}[combiner]
        results.append(total / divisor if divisor else total)
    return np.array(results)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_combiners_of_ragged_sparse_and_padded_ids(combiner, shards):
    layer = tfdist.layers.Embedding(9, 4, shards=shards, combiner=combiner, weights=TABLE)
    ids, weights = tf.ragged.constant(BAGS), tf.ragged.constant(WEIGHTS)
    ones = [[1.0] * len(bag) for bag in BAGS]
    np.testing.assert_allclose(layer(ids), combined(combiner, ones), rtol=1e-6)
    np.testing.assert_allclose(layer(ids, weights), combined(combiner), rtol=1e-6)
    np.testing.assert_allclose(layer(ids.to_sparse(), weights.to_sparse()), combined(combiner), rtol=1e-6)
    padded = tfdist.layers.Embedding(10, 4, shards=shards, combiner=combiner, mask_zero=True)
    padded.build()
    padded.table.assign(np.concatenate([TABLE[:1], TABLE]))
    np.testing.assert_allclose(padded((ids + 1).to_tensor()), combined(combiner, ones), rtol=1e-6)


@pytest.mark.parametrize("shards", [1, 3])
def test_rows_without_a_combiner_and_their_gradient(shards):
    layer = tfdist.layers.Embedding(9, 4, shards=shards, weights=TABLE, mask_zero=True)
    ids = tf.constant([[3, 0], [8, 3]], tf.int64)
    with tf.GradientTape() as tape:
        rows = layer(ids)
        total = tf.reduce_sum(rows)
    np.testing.assert_array_equal(rows, TABLE[ids])
    grads = tape.gradient(total, [shard.value for shard in layer.table.shards])
    assert all(isinstance(grad, tf.IndexedSlices) for grad in grads)
    assert sum(int(tf.size(grad.indices)) for grad in grads) == 4
    np.testing.assert_array_equal(layer.compute_mask(ids), [[True, False], [True, True]])
    ragged = layer(tf.ragged.constant(BAGS))
    assert ragged.to_list() == [TABLE[bag].tolist() for bag in BAGS]


def test_two_features_share_a_table():
    layer = tfdist.layers.Embedding(9, 4, shards=2, weights=TABLE)
    inputs = [keras.Input((), dtype="int32") for _ in range(2)]
    model = keras.Model(inputs, keras.layers.Dot(1)([layer(each) for each in inputs]))
    assert len(model.weights) == 2
    found = model.predict([np.array([3, 8]), np.array([0, 3])], verbose=0)
    np.testing.assert_allclose(found[:, 0], (TABLE[[3, 8]] * TABLE[[0, 3]]).sum(1), rtol=1e-5)


def test_results_have_the_layers_compute_dtype():
    layer = tfdist.layers.Embedding(9, 4, shards=2, combiner="sum", dtype="mixed_bfloat16")
    assert layer(tf.constant([[1, 2]])).dtype == tf.bfloat16
    assert layer.table.dtype == tf.float32


WRONG = {
    "input_dim must be an int of at least 1. Received: 0": {"input_dim": 0},
    "output_dim must be an int of at least 1. Received: 2.5": {"output_dim": 2.5},
    "shards must be an int of at least 1. Received: True": {"shards": True},
    "shards must be at most input_dim, 9. Received: 10": {"shards": 10},
    "combiner must be one of None, 'sum', 'mean', 'sqrtn'. Received: 'max'": {"combiner": "max"},
    "must draw each row separately: use one of .*give the table as weights=. Received: Orthogonal": {
        "embeddings_initializer": "orthogonal"
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_arguments_out_of_range(message):
    with pytest.raises(tfdist.ConfigError, match=message):
        tfdist.layers.Embedding(**{"input_dim": 9, "output_dim": 4, "name": "users", **WRONG[message]})


def test_a_constraint_over_all_rows_needs_one_shard():
    norm = keras.constraints.MaxNorm
    assert table(9, 4, 2, embeddings_constraint=norm(axis=1)).shape == (9, 4)
    with pytest.raises(tfdist.ConfigError, match=r"must treat each row separately.*shards=1. Received: MaxNorm"):
        table(9, 4, 2, embeddings_constraint=norm())


@pytest.mark.parametrize("ids", [[9], [-1]])
@pytest.mark.parametrize("shards", [1, 2])
def test_an_id_outside_of_the_table(ids, shards):
    layer = tfdist.layers.Embedding(9, 4, shards=shards, name="users")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"ids of users must be 0 to 8 \(input_dim=9\). Received:"):
        layer(tf.constant(ids))


@pytest.mark.parametrize("call", [lambda layer: layer(tf.constant([1.0])), lambda layer: layer(keras.Input((2,)))])
def test_ids_that_are_no_integers(call):
    with pytest.raises(tfdist.ConfigError, match=r"ids of users must be integers: .*dtype='int32'.*Received: float32"):
        call(tfdist.layers.Embedding(9, 4, name="users"))


def test_weights_without_a_combiner():
    with pytest.raises(tfdist.ConfigError, match="takes neither weights nor sparse ids: use combiner='sum'"):
        tfdist.layers.Embedding(9, 4)(tf.constant([[1]]), tf.constant([[1.0]]))
