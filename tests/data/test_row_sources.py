"""What all sources of stored rows have in common: rows, their order, parts of batches, and files that change."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.formats import WRITERS, N, X, Y, cut, npy, opened, rows
from tests.helpers import tiers
from tfdist import data
from tfdist.data import array_files, record_files, row_source
from tfdist.data.stored import counts_of_part
from tfdist.errors import DataError

SHARDS = [((5, 5, 9),), ((0, 7),), ((),), ((1, 22),)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same rows in several files of each format."""
    folder = tmp_path_factory.mktemp("files")
    for write in WRITERS.values():
        write(folder, 4, 4, 15)
    return folder


@pytest.mark.parametrize("kind", WRITERS)
class TestRowSource:
    @pytest.mark.parametrize("shards", tiers.cases(SHARDS, quick=1))
    def test_each_row_is_once_in_an_epoch(self, tmp_path, monkeypatch, kind, shards):
        monkeypatch.setattr(row_source, "BLOCK_ROWS", 4)
        WRITERS[kind](tmp_path, *shards)
        found = opened(kind, tmp_path)
        assert (found.num_examples, found.steps_per_epoch) == (N, 6)
        x, y = rows(found.in_order().dataset())
        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(y, Y)
        x, y = rows(found.dataset(epochs=2))
        assert [sorted(epoch) for epoch in np.split(y, 2)] == [list(Y)] * 2
        assert (y[:N] != y[N:]).any()
        np.testing.assert_array_equal(x, X[y])
        np.testing.assert_array_equal(rows(found.dataset(1, start_epoch=1))[1], y[N:])
        assert [spec.shape.as_list() for spec in found.specimen().element_spec] == [[None, 2, 3], [None]]

    def test_a_description_is_of_the_rows_and_their_order(self, folder, kind):
        texts = {opened(kind, folder, **options).describe() for options in ({}, {}, {"seed": 1}, {"shuffle": False})}
        assert len(texts) == 3

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda path: cut(path, 300), r"has changed since it was opened \([\d,]+ bytes then, 300 now\)"),
            (lambda path: os.utime(path, (1, 1)), "has changed since it was opened"),
            (os.remove, "cannot be read any longer: No such file"),
        ],
        ids=["cut", "written", "removed"],
    )
    def test_a_file_that_changes_is_an_error_not_another_number(self, tmp_path, kind, change, message):
        WRITERS[kind](tmp_path)
        found = opened(kind, tmp_path)
        path = min(path for path in tmp_path.iterdir() if path.is_file())
        change(path)
        with pytest.raises(DataError, match=f"{path.name} {message}"), row_source.explaining_reads():
            list(found.dataset())


@pytest.mark.parametrize("kind", tiers.cases([*WRITERS], quick=1))
@settings(max_examples=10)
@given(st.integers(1, 30), st.integers(1, 3), st.integers(1, 2), st.integers(0, 5), st.integers(1, 9))
def test_parts_are_those_of_the_global_batches(folder, kind, size, workers, local, start, seed):
    """Workers of any number read the rows that one process reads, from any step on."""
    found = opened(kind, folder, size, seed=seed)
    replicas, steps = workers * local, found.steps_per_epoch + 1
    batches = list(found.parts(1, [0], start, steps).as_numpy_iterator())
    assert [len(y) for _, y in batches] == [
        min(size, N - step % found.steps_per_epoch * size) for step in range(start, start + steps)
    ]
    for worker in range(workers):
        parts = range(worker * local, (worker + 1) * local)
        dataset = found.parts(replicas, parts, start, steps, make=lambda batch, counts: (batch, counts))
        elements = list(dataset.as_numpy_iterator())
        assert len(elements) == steps * local
        for number, ((_, y), counts) in enumerate(elements):
            batch = batches[number // local][1]
            begin, expected = counts_of_part(len(batch), parts[number % local], replicas)
            assert counts.tolist() == [expected]
            np.testing.assert_array_equal(y, batch[begin : begin + max(expected[0], 1)])


@pytest.mark.parametrize(
    ("kind", "module", "limit"), [("npy", array_files, "MOST_MAPS"), ("tfrecord", record_files, "MOST_OPEN")]
)
def test_more_files_than_may_be_open(tmp_path, monkeypatch, kind, module, limit):
    monkeypatch.setattr(module, limit, 2)
    WRITERS[kind](tmp_path, *range(1, N))
    assert sorted(rows(opened(kind, tmp_path).dataset())[1]) == list(Y)


def test_map_takes_the_columns_of_a_batch(folder):
    def double(x, y):
        if tf.shape(x)[0] > 3:  # AutoGraph
            y = y + 1
        return tf.cast(x, tf.float16) * 2, y

    found = opened("npy", folder, shuffle=False, map=double)
    x, y = rows(found.dataset())
    np.testing.assert_array_equal(x, (X * 2).astype(np.float16))
    np.testing.assert_array_equal(y, np.where(Y < 20, Y + 1, Y))
    assert found.specimen().element_spec[0].dtype == tf.float16


def test_the_names_of_files_are_part_of_a_description(tmp_path):
    npy(tmp_path)
    before = data.arrays_from(tmp_path).describe()
    (tmp_path / "x.npy").rename(tmp_path / "x-0.npy")
    (tmp_path / "y.npy").rename(tmp_path / "y-0.npy")
    assert data.arrays_from(tmp_path).describe() != before
