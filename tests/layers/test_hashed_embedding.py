"""`tfdist.layers.HashedEmbedding` beside a dict of ids in NumPy."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers.hashed_rows import Dict, batches_of_ids

BATCH, STEPS, COLUMNS = 6, 12, 3


def train(optimizer, layer, ids, y):
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer, keras.layers.Flatten()])
    model.compile(optimizer, "mse")
    model.fit(ids, y, batch_size=BATCH, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("min_count", [1, 3])
def test_numbers_of_a_dict(min_count):
    ids, y = batches_of_ids(STEPS * BATCH, 2 * COLUMNS)
    layer = tfdist.layers.HashedEmbedding(8, COLUMNS, min_count, seed=3)
    layer.build()
    expected = Dict(8, COLUMNS, min_count, unknown=layer.table.numpy()[0], first=first_row)
    model = train(keras.optimizers.SGD(0.1), layer, ids, y)
    for begin in range(0, len(ids), BATCH):
        expected.train(ids[begin : begin + BATCH], y[begin : begin + BATCH].reshape(BATCH, 2, COLUMNS), 0.1)
    assert len(expected.rows) == 8
    asked = np.unique([*ids.flat, 12345])
    np.testing.assert_allclose(layer(asked), expected.look_up(asked), rtol=1e-5)
    before = layer.get_weights()
    model.predict(ids, verbose=0)
    model.evaluate(ids + 1, y, verbose=0)
    for old, new in zip(before, layer.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def first_row(number, seed=3):
    """Returns the first value of the row of an id: that of a table with one id."""
    layer = tfdist.layers.HashedEmbedding(1, COLUMNS, seed=seed)
    return layer(tf.constant([number]), training=True).numpy()[0]


def test_a_first_value_depends_on_the_seed_and_the_id_alone():
    ids = np.array([7, -(2**60), 3])
    layer = tfdist.layers.HashedEmbedding(50, COLUMNS, seed=3)
    layer(tf.range(100, 120), training=True)
    rows = layer(ids, training=True).numpy()
    np.testing.assert_array_equal(rows, [first_row(number) for number in ids])
    assert not np.array_equal(first_row(7), first_row(7, seed=4))


@pytest.mark.parametrize(("evict_by", "left"), [("age", range(2, 20)), ("count", [0, 1, *range(4, 20)])])
def test_an_eviction_by_age_and_by_count(evict_by, left):
    layer = tfdist.layers.HashedEmbedding(20, COLUMNS, evict_by=evict_by, embeddings_initializer="ones")
    model = keras.Sequential([keras.Input((None,), dtype="int64"), layer])
    for ids in ([0, 0, 0, 1], [1, *range(2, 20)], [2] if evict_by == "age" else [1]):
        layer(tf.constant(ids), training=True)
    model.compile("sgd", "mse")
    layer.table.assign(np.arange(21.0)[:, None] * np.ones(COLUMNS))
    layer.evict(model)
    assert np.flatnonzero(layer(tf.range(20)).numpy()[:, 0]).tolist() == list(left)
    layer(tf.range(50, 60), training=True)
    known = layer(tf.range(50, 60)).numpy()[:, 0]
    np.testing.assert_array_equal(known, [1] * 2 + [0] * 8)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_an_eviction_resets_the_slots_of_its_rows(optimizer):
    layer = tfdist.layers.HashedEmbedding(10, COLUMNS, seed=3)
    ids = np.repeat(np.arange(10), 2).reshape(-1, 2)
    model = train(keras.optimizers.get(optimizer), layer, ids, np.ones((10, 2 * COLUMNS), "float32"))
    layer(tf.range(1, 10), training=True)
    slots = [slot for slot in model.optimizer.variables if slot.shape == (11, COLUMNS)]
    before = [slot.numpy() for slot in slots]
    layer.evict(model)
    initial = 0.1 if optimizer == "adagrad" else 0.0
    for old, slot in zip(before, slots, strict=True):
        (changed,) = np.unique(np.nonzero(old != slot.numpy())[0])
        np.testing.assert_array_equal(slot.numpy()[changed], np.full(COLUMNS, initial, "float32"))
    np.testing.assert_array_equal(layer(tf.constant([99]), training=True).numpy()[0], first_row(99))


def test_a_full_table_warns_once(caplog):
    layer = tfdist.layers.HashedEmbedding(2, COLUMNS, name="users")
    with caplog.at_level(logging.WARNING):
        for first in (0, 2, 4):
            layer(tf.range(first, first + 2), training=True)
    assert [record.getMessage() for record in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert "users is full: new ids stay unknown until a backup removes ids. Raise capacity=2" in caplog.text
    np.testing.assert_array_equal(layer(tf.range(2, 6)), np.tile(layer.table.numpy()[0], (4, 1)))


def test_combiners_and_padding():
    layer = tfdist.layers.HashedEmbedding(5, COLUMNS, combiner="mean", mask_zero=True, seed=3)
    combined = layer(tf.constant([[7, 0], [0, 0]]), training=True)
    np.testing.assert_array_equal(combined, [first_row(7), np.zeros(COLUMNS)])
    ragged = layer(tf.ragged.constant([[7], [7, 9]], dtype=tf.int64), training=True)
    np.testing.assert_allclose(ragged, [first_row(7), (first_row(7) + first_row(9)) / 2], rtol=1e-6)
    layer.trainable = False
    unknown = layer.table.numpy()[0]
    np.testing.assert_array_equal(layer(tf.constant([[8]]), training=True), [unknown])


def test_files_and_an_export_look_ids_up(tmp_path):
    ids, y = batches_of_ids(24, 2 * COLUMNS)
    model = train("adam", tfdist.layers.HashedEmbedding(8, COLUMNS, 2), ids, y)
    expected = model.predict(ids, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(ids, verbose=0), expected)
    for one in (model, loaded):
        one.fit(ids[::-1], y, batch_size=BATCH, shuffle=False, verbose=0)
    for old, new in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(served.serve(tf.constant(ids)), model.predict(ids, verbose=0), rtol=1e-6)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("capacity must be an int of at least 1. Received: 0", {"capacity": 0}),
        ("min_count must be an int of at least 1. Received: 0.5", {"min_count": 0.5}),
        ("evict_by must be 'age' or 'count'. Received: 'size'", {"evict_by": "size"}),
    ],
)
def test_arguments_out_of_range(message, arguments):
    with pytest.raises(tfdist.ConfigError, match=message):
        tfdist.layers.HashedEmbedding(**{"capacity": 9, "output_dim": 4, **arguments})
