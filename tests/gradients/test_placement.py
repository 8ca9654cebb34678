"""The sums of compressed gradients of `mirrored` on GPUs, for which two virtual CPUs stand in."""

import collections

import tensorflow as tf

from tfdist.collectives import hardware
from tfdist.collectives.communicator import communicator_for
from tfdist.compression import BF16
from tfdist.compression.base import BucketedReduction


def test_devices_add_gradients_in_turn_and_encode_their_own(mirrored, monkeypatch):
    monkeypatch.setenv(hardware.STAND_IN, "1")
    monkeypatch.setattr(mirrored, "communicator", None)
    group = communicator_for(mirrored)
    layout = BucketedReduction(BF16(), [(str(number), (64, 64)) for number in range(4)])
    values = [[tf.fill([64, 64], float(rank + 1))] * 4 for rank in group.ranks]

    @tf.function(autograph=False)
    def summed():
        results = layout.run(group, values, [[()] * 4] * 2, group.contexts(tf.constant(0, tf.int64)))
        return [result.sums for result in results]

    places = collections.Counter(
        (op.type, op.device[-5:]) for op in summed.get_concrete_function().graph.get_operations()
    )
    for kind in ("Snapshot", "Cast"):  # a Snapshot follows each addition
        assert places[kind, "CPU:0"] == places[kind, "CPU:1"] > 0
        assert not places[kind, ""]
    assert all(float(tf.reduce_min(total)) == float(tf.reduce_max(total)) == 3 for sums in summed() for total in sums)
