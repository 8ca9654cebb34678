"""The cache of `arrays_from`: equal rows from a cold, partly filled, warm or damaged cache, its key, its limit, and its errors."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.data.test_array_files import N, X, Y, npy, rows
from tests.multiprocess import harness
from tfdist import data
from tfdist.data import array_files
from tfdist.data.cached_rows import CachedRows
from tfdist.errors import ConfigError


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(array_files, "_BLOCK_ROWS", 4)
    npy(tmp_path, 9)


def double(x, y):
    return {"x": tf.cast(x, tf.float16) * 2}, y, x[:, 0, 0] > 9


def opened(folder, cache=None, map=double, **options):
    return data.arrays_from(folder / "*.npy", 4, map=map, cache=cache, **options)


def epochs(stored):
    return [tf.nest.flatten(batch) for batch in stored.dataset(2).as_numpy_iterator()]


def equal(batches, expected):
    for batch, other in zip(batches, expected, strict=True):
        for values, wanted in zip(batch, other, strict=True):
            np.testing.assert_array_equal(values, wanted)
            assert values.dtype == wanted.dtype
    return True


def reads(stored):
    """Counts the rows that are read from the source from now on."""
    counted, read = [], stored.source.read
    stored.source.read = lambda blocks, rows: (counted.append(len(rows)), read(blocks, rows))[1]
    return counted


def places(tmp_path):
    return ["memory", tmp_path / "cache"]


def keys(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("kind", [0, 1], ids=["memory", "folder"])
@pytest.mark.parametrize("cache_bytes", [None, 1, 250, 10**9])
def test_rows_are_equal_whatever_the_cache_holds(tmp_path, kind, cache_bytes):
    expected = epochs(opened(tmp_path))
    for _ in range(2):
        stored = opened(tmp_path, places(tmp_path)[kind], cache_bytes=cache_bytes)
        assert stored.dataset().element_spec == opened(tmp_path).dataset().element_spec
        assert equal(epochs(stored), expected)
        counted = reads(stored)
        assert equal(epochs(stored), expected)
        assert bool(sum(counted)) == (cache_bytes in (1, 250))
        assert equal(epochs(stored.in_order()), epochs(opened(tmp_path).in_order()))


def test_each_block_is_mapped_once_also_in_the_next_run(tmp_path):
    for expected in (N, 0):
        stored = opened(tmp_path, tmp_path / "cache")
        counted = reads(stored)
        list(stored.parts(1, [0], 0, 3).as_numpy_iterator())  # a part of the epoch
        epochs(stored)
        # Parallel reads may compute a block at the same moment.
        assert expected <= sum(counted) <= 4 * expected


def test_rows_without_a_map(tmp_path):
    stored = opened(tmp_path, "memory", None)
    x, y = rows(stored.dataset())
    np.testing.assert_array_equal(x, X[y])


def captured(value):
    return lambda x, y: (x * value, y)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (captured(2.0), captured(3.0)),
        (captured(tf.constant(2.0)), captured(tf.constant(3.0))),
        (captured(tf.Variable(2.0)), captured(tf.Variable(3.0))),
        (captured(2.0), lambda x, y: (2.0 + x, y)),
        (lambda x, y: (tf.map_fn(lambda row: row * 2, x), y), lambda x, y: (tf.map_fn(lambda row: row * 3, x), y)),
        (captured(2.0), lambda x, y: (x * 2.0, -y)),
    ],
    ids=["constant", "tensor", "variable", "operation", "inner function", "other column"],
)
def test_another_map_has_another_key(tmp_path, first, second):
    for map in (first, second, first):
        assert equal(epochs(opened(tmp_path, tmp_path / "cache", map)), epochs(opened(tmp_path, None, map)))
    assert len(keys(tmp_path / "cache")) == 2


def test_another_source_has_another_key(tmp_path):
    epochs(opened(tmp_path, tmp_path / "cache"))
    np.save(tmp_path / "x-00001.npy", -X[9:])
    assert equal(epochs(opened(tmp_path, tmp_path / "cache")), epochs(opened(tmp_path)))
    assert len(keys(tmp_path / "cache")) == 2


PROGRAM = """
import sys, keras, tensorflow as tf, tfdist.data
for number in range(int(sys.argv[1])):  # names of functions and layers are numbered per process
    tf.function(lambda x: tf.while_loop(lambda i: i < 3, lambda i: i + 1, [x]))(tf.constant(0))
    keras.layers.Rescaling(2.0)
scale = keras.layers.Rescaling(2.0)
def map(x, y):
    for _ in tf.range(2):
        if tf.shape(x)[0] > 2:
            x = x + 1.0
    return scale(tf.map_fn(lambda row: row * 2, x)), y
list(tfdist.data.arrays_from(sys.argv[2], 4, map=map, cache=sys.argv[3]).dataset())
"""


def test_the_key_is_the_same_in_another_process(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)  # AutoGraph needs a file
    for number in ("0", "3"):
        command = [sys.executable, tmp_path / "program.py", number, tmp_path / "*.npy", tmp_path / "cache"]
        environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), "PYTHONHASHSEED": number}
        subprocess.run(command, env=environ, check=True, timeout=120)
    assert len(keys(tmp_path / "cache")) == 1


def change(path, position=1):
    content = bytearray(path.read_bytes())
    content[position] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: change(folder / "0.rows"),
        lambda folder: change(folder / "index"),
        lambda folder: os.truncate(folder / "0.rows", 5),
        lambda folder: os.truncate(folder / "index", 5),
        lambda folder: os.remove(folder / "1.rows"),
        lambda folder: os.remove(folder / "index"),
    ],
)
def test_damaged_rows_are_computed_again(tmp_path, damage):
    expected = epochs(opened(tmp_path))
    epochs(opened(tmp_path, tmp_path / "cache"))
    (key,) = keys(tmp_path / "cache")
    damage(tmp_path / "cache" / key)
    stored = opened(tmp_path, tmp_path / "cache")
    counted = reads(stored)
    assert equal(epochs(stored), expected)
    assert sum(counted)
    stored = opened(tmp_path, tmp_path / "cache")
    counted = reads(stored)
    assert equal(epochs(stored), expected)
    assert not sum(counted), "the repaired rows are kept"


def test_a_full_disk_ends_the_filling_with_one_warning(tmp_path, caplog):
    stored = opened(tmp_path, tmp_path / "cache")
    list(stored.parts(1, [0], 0, 1).as_numpy_iterator())
    stored._cached._rows._files[0] = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115
    stored._cached._rows._lengths[0] = 0
    assert equal(epochs(stored), epochs(opened(tmp_path)))
    assert [f"stops filling: {os.strerror(errno.ENOSPC)}" in record.message for record in caplog.records] == [True]


def test_old_caches_that_no_process_uses_are_removed(tmp_path):
    def store(letter, number):
        kept = CachedRows(np.array([4, 4]), [8], str(tmp_path / "cache"), letter * 32, 170)  # space for two caches
        for block in kept.missing(np.array([0, 1])):
            kept.put(block, [np.full((4, 1), number)])
        return kept

    names = []
    for number, letter in enumerate("abac"):
        store(letter, number)
        for path in (tmp_path / "cache").glob("*/*"):  # times of files are coarse
            os.utime(path, (path.stat().st_mtime - 10,) * 2)
        names.append([key[0] for key in keys(tmp_path / "cache")])
    assert names == [["a"], ["a", "b"], ["a", "b"], ["a", "c"]], "the least recently used one is removed"
    in_use = [store("a", 0), store("c", 0)]
    assert [kept.take(np.array([1]), np.array([3]))[0].view(np.int64).item() for kept in in_use] == [0, 3]
    assert not store("d", 5).has(np.array([0, 1])).any(), "the others are in use"
    assert [key[0] for key in keys(tmp_path / "cache")] == ["a", "c", "d"]


TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(Y, Y), 0)
COUNTER = tf.Variable(0)


@pytest.mark.parametrize(
    ("map", "message"),
    [
        (lambda x, y: (x + tf.random.uniform([]), y), "map draws random numbers .RandomUniform"),
        (lambda x, y: (tf.map_fn(lambda row: tf.image.random_flip_up_down(row[None])[0], x), y), "map draws random"),
        (lambda x, y: (x + tf.random.stateless_normal([], [1, 2]), y), "map draws random numbers"),
        (lambda x, y: (x, tf.ensure_shape(tf.numpy_function(np.copy, [y], tf.int64), [None])), "map calls Python"),
        (lambda x, y: (x, TABLE.lookup(y)), "map uses a table"),
        (lambda x, y: (x, y + tf.cast(COUNTER.assign_add(1), tf.int64)), "map changes a variable"),
        (lambda x, y: (x, tf.strings.as_string(y)), "cache needs rows of numbers of a fixed shape"),
        (lambda x, y: (x[:, : tf.shape(x)[0]], y), "cache needs rows of numbers of a fixed shape"),
        (lambda x, y: (x, tf.reduce_sum(y)), "cache needs rows of numbers of a fixed shape"),
    ],
)
def test_a_map_whose_results_cannot_be_kept(tmp_path, map, message):
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, "memory", map)


def test_a_map_must_keep_the_number_of_rows(tmp_path):
    with pytest.raises(tf.errors.OpError, match=r"map must return a row for each row\. Received: 1 rows for 4 rows"):
        epochs(opened(tmp_path, "memory", lambda x, y: (x[:1], y)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": 3}, "cache must be 'memory' or a folder of this machine. Received: 3"),
        ({"cache": "s3://bucket/cache"}, "cache must be 'memory' or a folder of this machine"),
        ({"cache": "/proc/cache"}, "cache must be 'memory' or a folder in which files can be written"),
        ({"cache": "memory", "cache_bytes": 0}, "cache_bytes must be a whole number, 1 or more"),
        ({"cache_bytes": 9}, "cache_bytes limits a cache: set cache"),
    ],
)
def test_a_wrong_option_is_a_fault(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, **options)


def test_a_source_without_a_version_has_no_cache(tmp_path):
    source = opened(tmp_path).source
    source.version = ""
    with pytest.raises(ConfigError, match="set the attribute version of ArrayFiles"):
        data.stored.StoredData(source, 4, cache="memory")


KILLED = """
import os, signal, sys, tfdist.data
from tfdist.data import array_files, cached_rows
array_files._BLOCK_ROWS = 4
write, calls = cached_rows._write_at, []
def dies(file, content, position):
    calls.append(0)
    if len(calls) == int(sys.argv[3]):
        write(file, content[: len(content) // 2], position)
        os.kill(os.getpid(), signal.SIGKILL)
    write(file, content, position)
cached_rows._write_at = dies
def map(x, y):
    return x * 2, y
for x, y in tfdist.data.arrays_from(sys.argv[1], 4, map=map, cache=sys.argv[2]).dataset(2):
    print(x.numpy().tobytes().hex(), y.numpy())
"""


def test_processes_that_fill_a_cache_at_once_and_one_that_is_killed_within_a_write(tmp_path):
    def start(cache, dies_at):
        command = [sys.executable, "-c", KILLED, tmp_path / "*.npy", tmp_path / cache, str(dies_at)]
        environ = {**os.environ, "PYTHONPATH": str(harness.ROOT)}
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    runs = [start("shared", dies_at) for dies_at in (5, 0, 0)]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    outputs += [start("shared", 0).communicate(timeout=120)[0], start("other", 0).communicate(timeout=120)[0]]
    assert runs[0].returncode in (-9, 0), "0 if the others have written all blocks before"
    assert len(set(outputs[1:])) == 1
    assert outputs[1]
