"""`records_from`: the records and their order against a plain reader, damaged files, and errors of files."""

from __future__ import annotations

import concurrent.futures
import gzip
import struct
import types

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist import data
from tfdist.data import record_files
from tfdist.errors import ConfigError, DataError

N = 23
FEATURES = {"x": tf.io.FixedLenFeature([3], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}


def write(path, records):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def examples(begin=0, end=N):
    for y in range(begin, end):
        x = tf.train.Feature(float_list=tf.train.FloatList(value=[y, y + 0.5, -y]))
        label = tf.train.Feature(int64_list=tf.train.Int64List(value=[y]))
        yield tf.train.Example(features=tf.train.Features(feature={"x": x, "y": label})).SerializeToString()


def parse_one(record):
    example = tf.io.parse_single_example(record, FEATURES)
    return example["x"], example["y"]


def parse_all(records):
    example = tf.io.parse_example(records, FEATURES)
    return example["x"], example["y"]


def shards(folder, *ends):
    for number, (begin, end) in enumerate(zip([0, *ends], [*ends, N], strict=True)):
        write(folder / f"part-{number}.tfrecord", examples(begin, end))


def labels(stored, **options):
    return [y for _, batch in stored.dataset(**options).as_numpy_iterator() for y in batch.tolist()]


def positions(path):
    """Returns the position of each record, by a plain reader."""
    contents, position, found = path.read_bytes(), 0, []
    while position < len(contents):
        found.append(position)
        position += 16 + struct.unpack_from("<Q", contents, position)[0]
    return found


def flip(path, position):
    contents = bytearray(path.read_bytes())
    contents[position] ^= 4
    path.write_bytes(contents)


@pytest.mark.parametrize(("parse", "batched"), [(parse_one, False), (parse_all, True)])
@pytest.mark.parametrize("ends", [(), (0, 7), (1, 22), (5, 5, 9)])
def test_each_record_is_once_in_an_epoch(tmp_path, parse, batched, ends):
    shards(tmp_path, *ends)
    stored = data.records_from(tmp_path / "*.tfrecord", parse, 4, seed=2, batched=batched)
    assert (stored.num_examples, stored.steps_per_epoch) == (N, 6)
    assert labels(stored.in_order()) == list(range(N))
    y = labels(stored, epochs=2)
    assert sorted(y[:N]) == sorted(y[N:]) == list(range(N))
    assert y[:N] != y[N:]
    assert labels(stored, start_epoch=1) == y[N:]
    x, y = next(stored.dataset().as_numpy_iterator())
    np.testing.assert_array_equal(x, np.stack([y, y + 0.5, -y], 1))
    assert stored.specimen().element_spec[0].shape.as_list() == [None, 3]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.binary(max_size=40), max_size=9), min_size=1, max_size=4),
    st.integers(1, 7),
    st.integers(1, 64),
    st.sampled_from([None, "tail", "header", "data"]),
    st.data(),
)
def test_records_are_those_of_a_plain_reader(tmp_path_factory, files, size, block_bytes, damage, draw):
    """Also if one of them is damaged: the others are the same."""
    folder = tmp_path_factory.mktemp("records")
    for number, records in enumerate(files):
        write(folder / f"{number}.tfrecord", records)
    kept = [record for records in files for record in records]
    damaged = [number for number, records in enumerate(files) if any(records)]
    if damage and damaged:
        number = draw.draw(st.sampled_from(damaged))
        path, records = folder / f"{number}.tfrecord", files[number]
        last = len(records) - 1
        places = [i for i, record in enumerate(records) if record and all(records[i + 1 :])]
        index = last if damage == "tail" or not places else draw.draw(st.sampled_from(places))
        position = positions(path)[index]
        if damage == "tail" or not places:
            path.write_bytes(path.read_bytes()[: position + draw.draw(st.integers(1, 15))])
        else:
            flip(path, position + (draw.draw(st.integers(0, 11)) if damage == "header" else 12))
        del kept[sum(map(len, files[:number])) + index]
        if index == 0 and len(records) == 1 and damage == "header" and places:
            kept = []  # not a TFRecord file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_files, "_BLOCK_BYTES", block_bytes)
        if not kept:
            with pytest.raises(ConfigError, match=r"no records|is not a TFRecord file"):
                data.records_from(folder, lambda r: r, on_corrupt="skip")
            return
        stored = data.records_from(folder, lambda r: r, size, batched=True, on_corrupt="skip")
    assert [r for batch in stored.in_order().dataset().as_numpy_iterator() for r in batch.tolist()] == kept
    assert sorted(r for batch in stored.dataset().as_numpy_iterator() for r in batch.tolist()) == sorted(kept)


@pytest.mark.parametrize(
    ("place", "why"), [(12, "has another checksum"), (3, "has a damaged header"), (9, "has a damaged header"), (-1, "")]
)
def test_damaged_records_are_skipped_with_one_warning(tmp_path, caplog, place, why):
    shards(tmp_path, 9)
    path = tmp_path / "part-1.tfrecord"
    found = positions(path)
    for index in (4, 6):
        flip(path, found[index] + (place if place > 0 else 16))
    stored = data.records_from(tmp_path, parse_one, 4, on_corrupt="skip")
    assert labels(stored.in_order()) == [y for y in range(N) if y not in (13, 15)]
    (record,) = caplog.records
    assert f"skipped damaged records: 2 of 14 in {path}; the first, at byte {found[4]:,}, {why}" in record.getMessage()


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


FAULTS = {
    "no file": (lambda path: path.unlink(), r"no file matches .*x.tfrecord. Give a pattern"),
    "empty": (lambda path: path.write_bytes(b""), "x.tfrecord: no records"),
    "other": (lambda path: path.write_bytes(b"a" * 99), "x.tfrecord is not a TFRecord file"),
    "short": (lambda path: path.write_bytes(b"a"), "x.tfrecord is damaged: the record at byte 0 is truncated"),
    "gzip": (lambda path: path.write_bytes(gzip.compress(path.read_bytes())), "x.tfrecord is compressed.*`gunzip <"),
    "truncated": (lambda path: cut(path, 140), r"x.tfrecord is damaged: the record at byte \d+ is truncated. Write"),
    "header": (lambda path: flip(path, positions(path)[2] + 8), "has a damaged header. Write the file again, or"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_its_file_and_position(tmp_path, name):
    change, message = FAULTS[name]
    write(tmp_path / "x.tfrecord", examples())
    change(tmp_path / "x.tfrecord")
    with pytest.raises(ConfigError, match=message):
        data.records_from(tmp_path / "x.tfrecord", parse_one)


def test_faults_of_many_files_are_named_at_once(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.tfrecord").write_bytes(b"no records, but a text")
    with pytest.raises(ConfigError) as error:
        data.records_from(tmp_path, parse_one)
    assert len(error.value.faults) == 11
    assert error.value.faults[-1].startswith("20 further errors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_size": 0, "parse": None},
            "batch_size must be .*\nparse must be a function of a batch. Received: None",
        ),
        ({"on_corrupt": "warn"}, "on_corrupt must be 'fail' or 'skip'. Received: 'warn'"),
        ({"pattern": 3}, "pattern must be a path, .* Received: 3"),
        ({"pattern": []}, "pattern is an empty list"),
        (
            {"pattern": ["x-*", "s3://b/x-*"]},
            "no file matches x-.*\nrecords_from reads local files, not s3://b/x-",
        ),
    ],
)
def test_a_wrong_option_is_a_fault(tmp_path, options, message):
    shards(tmp_path)
    with pytest.raises(ConfigError, match=message):
        data.records_from(**{"pattern": tmp_path, "parse": parse_one, **options})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: cut(path, 300), r"part-0.tfrecord has changed since it was opened"),
        (lambda path: path.unlink(), "part-0.tfrecord cannot be read any longer: No such file"),
    ],
)
def test_a_file_that_changes_is_an_error(tmp_path, change, message):
    shards(tmp_path)
    stored = data.records_from(tmp_path, parse_one)
    labels(stored)
    change(tmp_path / "part-0.tfrecord")
    with pytest.raises(DataError, match=message), data.stored.explaining_reads():
        labels(stored)


def test_an_error_of_the_system_names_the_file_and_the_position(tmp_path):
    shards(tmp_path)
    stored = data.records_from(tmp_path, parse_one)
    stored.source._open = lambda path: types.SimpleNamespace(descriptor=-1)
    message = r"part-0.tfrecord cannot be read at byte \d+: Bad file descriptor. Check"
    with pytest.raises(DataError, match=message), data.stored.explaining_reads():
        labels(stored)


def test_a_damaged_record_is_an_error_when_it_is_read(tmp_path):
    shards(tmp_path)
    path = tmp_path / "part-0.tfrecord"
    position = positions(path)[17]
    flip(path, position + 15)
    stored = data.records_from(path, parse_one, 4).in_order()
    message = f"part-0.tfrecord is damaged: the record at byte {position:,} has another checksum. Write"
    with pytest.raises(DataError, match=message), data.stored.explaining_reads():
        labels(stored)


def test_more_files_than_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "_MOST_OPEN", 2)
    shards(tmp_path, *range(1, N))
    stored = data.records_from(tmp_path, parse_one, 4)
    assert sorted(labels(stored)) == list(range(N))


def test_threads_that_open_a_file_at_once_read_its_records(tmp_path):
    shards(tmp_path)
    source = data.records_from(tmp_path, parse_one, 1).source

    def read(row):
        return source.read(np.array([0]), np.array([row]))[0][0]

    expected = [read(row) for row in range(N)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for _ in range(200):
            source._open.cache_clear()
            assert [*threads.map(read, range(N))] == expected
