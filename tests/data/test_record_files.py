"""`records_from`: the records against a plain reader, damaged files, and errors of reading."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.formats import N, X, parse_all, parse_one, rows, tfrecord, write_records
from tfdist import data
from tfdist.data import record_files, row_source
from tfdist.errors import ConfigError, DataError


def labels(stored):
    return rows(stored.dataset())[1].tolist()


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


def test_a_function_of_a_batch_parses_it(tmp_path):
    tfrecord(tmp_path, 5, 9)
    stored = data.records_from(tmp_path, parse_all, 4, batched=True)
    x, y = rows(stored.dataset())
    assert sorted(y) == list(range(N))
    np.testing.assert_array_equal(x, X[y])


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
        write_records(folder / f"{number}.tfrecord", records)
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
        patch.setattr(row_source, "BLOCK_BYTES", block_bytes)
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
    tfrecord(tmp_path, 9)
    path = tmp_path / "part-1.tfrecord"
    found = positions(path)
    for index in (4, 6):
        flip(path, found[index] + (place if place > 0 else 16))
    stored = data.records_from(tmp_path, parse_one, 4, on_corrupt="skip")
    assert labels(stored.in_order()) == [y for y in range(N) if y not in (13, 15)]
    (record,) = caplog.records
    assert f"skipped damaged records: 2 of 14 in {path}; the first, at byte {found[4]:,}, {why}" in record.getMessage()


def test_an_error_of_the_system_names_the_file_and_the_position(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    tfrecord(tmp_path)
    stored = data.records_from(tmp_path, parse_one)
    monkeypatch.setattr(os, "pread", fails)
    message = r"part-0.tfrecord cannot be read at byte \d+: Input/output error. Check"
    with pytest.raises(DataError, match=message), data.row_source.explaining_reads():
        labels(stored)


def test_a_damaged_record_is_an_error_when_it_is_read(tmp_path):
    tfrecord(tmp_path)
    path = tmp_path / "part-0.tfrecord"
    position = positions(path)[17]
    flip(path, position + 15)
    stored = data.records_from(path, parse_one, 4).in_order()
    message = f"part-0.tfrecord is damaged: the record at byte {position:,} has another checksum. Write"
    with pytest.raises(DataError, match=message), data.row_source.explaining_reads():
        labels(stored)


def test_threads_that_open_a_file_at_once_read_its_records(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files, "MOST_OPEN", 1)  # so that threads keep opening files
    tfrecord(tmp_path, 12)
    source = data.records_from(tmp_path, parse_one, 1).source

    def read(row):
        return source.read(np.array([0]), np.array([row]))[0][0]

    expected = [read(row) for row in range(N)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for _ in range(200):
            assert [*threads.map(read, range(N))] == expected
