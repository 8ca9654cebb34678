"""The cache of `arrays_from`: one conversion for all processes and runs, equal rows, its identity, its owner, its space, and its errors."""

from __future__ import annotations

import fcntl
import os
import pathlib
import resource
import runpy
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.data.formats import N, X, Y, npy
from tests.helpers import fork_server
from tests.multiprocess import harness
from tfdist import data
from tfdist.data import conversion, row_source
from tfdist.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(row_source, "BLOCK_ROWS", 4)
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
    """Returns the folders of the conversions."""
    return sorted(path for path in (folder / f"tfdist-{os.geteuid()}").iterdir() if path.is_dir())


@pytest.mark.parametrize("kind", [0, 1], ids=["memory", "folder"])
def test_rows_are_equal_and_each_is_mapped_once(tmp_path, kind):
    expected = epochs(opened(tmp_path))
    for run in range(2):
        stored = opened(tmp_path, places(tmp_path)[kind])
        counted = reads(stored)
        assert stored.dataset().element_spec == opened(tmp_path).dataset().element_spec
        for _ in range(2):
            assert equal(epochs(stored), expected)
        assert equal(epochs(stored.in_order()), epochs(opened(tmp_path).in_order()))
        assert sum(counted) == (0 if kind and run else N), "the next run reads the folder"


def test_columns_are_npy_files_of_this_user_only(tmp_path):
    epochs(opened(tmp_path, tmp_path / "cache"))
    (folder,) = keys(tmp_path / "cache")
    np.testing.assert_array_equal(np.load(folder / "0.npy"), X.astype(np.float16) * 2)
    np.testing.assert_array_equal(np.load(folder / "1.npy"), Y)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o700}


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.bool, tf.complex64])
def test_types_of_results(tmp_path, dtype):
    def map(x, y):
        return tf.cast(x, dtype), tf.reshape(x, [-1, 6])[:, :0]

    for _ in range(2):
        assert equal(epochs(opened(tmp_path, tmp_path / "cache", map)), epochs(opened(tmp_path, None, map)))


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


def test_the_key_is_the_same_in_another_process(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)  # AutoGraph needs a file
    arguments = [str(tmp_path / "*.npy"), str(tmp_path / "cache")]
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), "PYTHONHASHSEED": "0"}
    subprocess.run([sys.executable, program, "0", *arguments], env=environ, check=True, timeout=120)
    assert len(keys(tmp_path / "cache")) == 1
    monkeypatch.setattr(row_source, "BLOCK_ROWS", 1 << 12)  # as in that process
    monkeypatch.setattr(sys, "argv", [str(program), "3", *arguments])
    runpy.run_path(str(program))
    assert len(keys(tmp_path / "cache")) == 1


def change(path, position=-1):
    content = bytearray(path.read_bytes())
    content[position] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(folder / "0.npy", 200),
        lambda folder: os.truncate(folder / "0.npy", 5),
        lambda folder: os.remove(folder / "1.npy"),
        lambda folder: change(folder / "identity.json"),
        lambda folder: os.rename(folder, f"{folder}.partial"),
        lambda folder: (os.remove(folder / "0.npy"), os.symlink("/etc/passwd", folder / "0.npy")),
    ],
    ids=["truncated", "without header", "missing", "another identity", "partial", "link"],
)
def test_an_incomplete_conversion_is_not_used_but_done_again(tmp_path, damage):
    expected = epochs(opened(tmp_path))
    epochs(opened(tmp_path, tmp_path / "cache"))
    (folder,) = keys(tmp_path / "cache")
    damage(folder)
    for converted in (N, 0):
        stored = opened(tmp_path, tmp_path / "cache")
        counted = reads(stored)
        assert equal(epochs(stored), expected)
        assert sum(counted) == converted
    assert keys(tmp_path / "cache") == [folder]


def test_a_damaged_row_is_one_error_and_the_next_start_converts_again(tmp_path):
    expected = epochs(opened(tmp_path))
    epochs(opened(tmp_path, tmp_path / "cache"))
    change(keys(tmp_path / "cache")[0] / "0.npy")
    with pytest.raises(DataError, match=r"is damaged\. Start the training again"), row_source.explaining_reads():
        epochs(opened(tmp_path, tmp_path / "cache"))
    assert equal(epochs(opened(tmp_path, tmp_path / "cache")), expected)


def test_damage_in_memory_is_one_error_and_removes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "identity.json").touch()
    memory, create = [], os.memfd_create

    def created(*given):
        descriptor = create(*given)
        memory.append(os.dup(descriptor))
        return descriptor

    monkeypatch.setattr(os, "memfd_create", created)
    stored = opened(tmp_path, "memory")
    stored.dataset()
    change(pathlib.Path(f"/proc/self/fd/{memory[0]}"))
    with pytest.raises(DataError, match="cache in memory is damaged"), row_source.explaining_reads():
        epochs(stored)
    for descriptor in memory:
        os.close(descriptor)
    assert (tmp_path / "identity.json").exists()


def test_a_damaged_source_is_the_error_of_its_file(tmp_path):
    stored = opened(tmp_path, tmp_path / "cache")
    np.save(tmp_path / "x-00001.npy", X[:3])
    with pytest.raises(DataError, match=r"x-00001\.npy has changed since it was opened"):
        stored.dataset()
    assert not keys(tmp_path / "cache")


def test_a_folder_that_another_user_can_change_is_an_error(tmp_path):
    own = tmp_path / "cache" / f"tfdist-{os.geteuid()}"
    own.mkdir(parents=True)
    own.chmod(0o770)
    with pytest.raises(ConfigError, match=f"{own} must be a folder of user {os.geteuid()} with the permissions 700"):
        opened(tmp_path, tmp_path / "cache")
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=f"{own} must be a folder of user"):
        opened(tmp_path, tmp_path / "cache")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_file_of_another_user_is_an_error_that_names_it(tmp_path):
    epochs(opened(tmp_path, tmp_path / "cache"))
    file = keys(tmp_path / "cache")[0] / "1.npy"
    os.chown(file, 12345, -1)
    with pytest.raises(DataError, match=f"{file} belongs to user 12345"):
        opened(tmp_path, tmp_path / "cache").dataset()


def test_a_full_disk_is_one_warning_and_training_continues_without_a_cache(tmp_path, caplog):
    def large(x, y):
        return tf.tile(x, [1, 1, 10_000]), y

    stored = opened(tmp_path, tmp_path / "cache", large)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1 << 20, limits[1])
    )  # the kernel refuses to write more, as on a full disk
    try:
        batches = epochs(stored)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert equal(batches, epochs(opened(tmp_path, None, large)))
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert ["File too large. Training continues" in warning for warning in warnings] == [True]
    assert not keys(tmp_path / "cache")


def test_old_caches_that_no_process_uses_are_removed_the_least_recently_used_first(tmp_path, monkeypatch, caplog):
    def used():
        return sum(path.stat().st_size for folder in keys(tmp_path / "cache") for path in folder.glob("[0-9]*.npy"))

    def store(value):
        stored = opened(tmp_path, tmp_path / "cache", captured(value))
        assert equal(epochs(stored), epochs(opened(tmp_path, None, captured(value))))
        for folder in keys(tmp_path / "cache"):  # times of folders are coarse
            os.utime(folder, (folder.stat().st_mtime - 10,) * 2)
        return stored, {folder.name for folder in keys(tmp_path / "cache")}

    monkeypatch.setattr(conversion, "free_space", lambda place: 2100 - used())  # space for two
    _, first = store(1.0)
    _, both = store(2.0)
    assert len(both) == 2
    assert store(1.0)[1] == both
    in_use, after = store(3.0)
    assert first < after, "the second was used least recently"
    other, _ = store(1.0)
    assert store(4.0)[1] == after, "both are in use"
    assert "There is no cache in" in caplog.text
    del in_use, other


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
    with pytest.raises(DataError, match=r"map must return a row for each row\. Received: 1 rows for 4 rows"):
        epochs(opened(tmp_path, "memory", lambda x, y: (x[:1], y)))


def test_a_source_without_a_version_has_no_cache(tmp_path):
    source = opened(tmp_path).source
    source.version = ""
    with pytest.raises(ConfigError, match="set the attribute version of ArrayFiles"):
        data.stored.StoredData(source, 4, cache="memory")


def start(folder, proceed):
    words = [str(each) for each in (folder / "*.npy", folder / "cache", proceed)]
    command = fork_server.command("tests.data.conversion_program", *words)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def wait_for_line(run, text):
    for line in run.stdout:
        if text in line:
            return
    raise AssertionError(f"the process has ended without {text!r}")


@pytest.mark.timeout(240)
def test_one_process_converts_the_others_wait_and_a_conversion_that_is_killed_is_done_again(tmp_path):
    proceed = tmp_path / "proceed"
    runs = [start(tmp_path, proceed)]
    try:
        wait_for_line(runs[0], "converts 23 examples once for the cache")
        runs += [start(tmp_path, proceed), start(tmp_path, proceed)]
        for run in runs[1:]:
            wait_for_line(run, "waits for another process, which converts data")
        fork_server.kill(runs[0])
        proceed.touch()
        outputs = [run.communicate(timeout=120)[0].splitlines() for run in runs[1:]]
    finally:
        for run in runs:
            fork_server.kill(run)
            run.stdout.close()
    assert outputs[0][-2] == outputs[1][-2]
    assert sorted(int(output[-1]) for output in outputs) == [0, N], "one of those that waited has converted"
    assert len(keys(tmp_path / "cache")) == 1


def test_the_wait_for_another_process_is_bounded(tmp_path, monkeypatch):
    stored = opened(tmp_path, tmp_path / "cache")
    monkeypatch.setattr(conversion, "WAIT_SECONDS", 0.0)
    path = tmp_path / "cache" / f"tfdist-{os.geteuid()}" / ".lock"
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=f"Another process holds the lock {path}"):
            stored.dataset()
