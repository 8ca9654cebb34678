"""Parts of backups as bytes, and the disks that hosts cannot share. Real processes are in tests/multiprocess/test_unshared.py."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist.backup import unshared


def test_tensors_of_all_types_arrive_as_they_were():
    tensors = {
        "float": tf.constant([[1.5, float("nan"), -0.0]]),
        "bfloat16": tf.constant([1, 2, 3], tf.bfloat16),
        "bool": tf.constant([True, False, True]),
        "a number": np.int64(-7),
        "empty": tf.zeros([0, 3]),
        "text": tf.constant("{}"),
        "texts": tf.constant([["a", "\u00e9"]]),
        "read text": b"{}",  # as a checkpoint's reader returns a text
    }
    values = {"format": 2, "about": {"x": [None, 0.1]}}
    content = np.concatenate(unshared.pack(values, tensors))
    received_values, received = unshared.unpack(content)
    assert received_values == values and list(received) == list(tensors)
    for name, tensor in tensors.items():
        expected = np.asarray(tensor)
        if expected.dtype.kind in "OS":
            assert np.asarray(received[name]).tolist() == expected.tolist()
        else:
            assert received[name].dtype == expected.dtype and received[name].shape == expected.shape
            assert received[name].tobytes() == expected.tobytes(), "the same bits"


def test_a_file_system_of_an_unknown_kind_may_be_shared():
    assert unshared.is_on_own_disk("/dev/shm/not/there/yet") and not unshared.is_on_own_disk("/proc")
