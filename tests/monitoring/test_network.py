"""Bytes of a step: planned, and counted by the sockets."""

from __future__ import annotations

import socket
import subprocess
import sys

import keras

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.compression import Int8
from tfdist.monitoring import compression_report, network

HERE = ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2"]})
APART = ClusterSpec({"worker": ["a:1", "b:1", "c:1"]})
ALONE = ClusterSpec({"worker": ["a:1"]})


def measured(cluster, counts, epochs=2, batches=range(3), task=0):
    counts = iter(counts)
    sent = network.WireBytes(cluster, TaskSpec("worker", task), lambda: next(counts))
    for epoch in range(epochs):
        sent.on_epoch_begin(epoch)
        for batch in batches:
            sent.on_train_batch_end(batch)
    return sent.per_step


def counts(one, other):
    return [{"1": one * n * n, "2": other * n * n} for n in range(6)]


def test_what_all_connections_send_is_summed_within_epochs():
    # 0 1 4 | 9 16 25: what is sent between epochs is no step's.
    assert measured(APART, counts(100, 7), task=1) == (4 + 16) * 107 / 4


def test_a_connection_that_closes_takes_nothing_back_and_one_that_opens_counts():
    assert measured(APART, [{"1": 500}, {"1": 600, "2": 30}, {"2": 40}], epochs=1) == (100 + 30 + 10) / 2


def test_executions_of_several_steps_count_as_such():
    assert measured(APART, counts(93, 7), batches=[3, 7, 11]) == (4 + 16) * 100 / 16


def test_steps_before_compression_begins_are_counted_apart():
    numbers = iter([0, 100, 300, 600, 610, 620])
    sent = network.WireBytes(HERE, TaskSpec("worker", 0), lambda: {"1": next(numbers)}, begins=3)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    sent.set_model(model)
    for epoch in range(2):
        sent.on_epoch_begin(epoch)
        for batch in range(3):
            model.optimizer.iterations.assign_add(1)
            sent.on_train_batch_end(batch)
    assert (sent.per_step_before, sent.per_step) == (300 / 2, 20 / 2)


def test_bytes_are_taken_since_the_last_time():
    numbers = iter([0, 100, 300, 600])
    sent = network.WireBytes(HERE, TaskSpec("worker", 0), lambda: {"1": next(numbers)})
    taken = []
    for step in range(4):
        sent.on_train_batch_end(step)
        if step != 2:
            taken.append(sent.take())
    assert taken == [None, 100, (200 + 300) / 2]


def test_steps_that_send_nothing_are_measured_as_zero():
    assert measured(HERE, [{"1": 70}] * 6) == 0


def test_what_cannot_be_told_is_none():
    assert measured(ALONE, counts(7, 100)) is None
    assert measured(APART, [{}] * 6) is None


SENDS = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
    client.sendall(bytes(50_000))
"""


def test_only_the_connections_of_this_process_count():
    before = network.read_sent_bytes()
    subprocess.run([sys.executable, "-c", SENDS], check=True, timeout=60)
    assert network.read_sent_bytes() == before
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(bytes(50_000))
        assert sum(network.read_sent_bytes().values()) == sum(before.values()) + 50_000


def test_a_plan_is_of_all_variables_unless_a_gradient_has_rows():
    dense = keras.Sequential([keras.Input((10,)), keras.layers.Dense(200), keras.layers.Dense(3)])
    assert compression_report.planned_bytes(dense, None, 2) == 4 * (10 * 200 + 200 + 200 * 3 + 3)
    blocks = -(-2000 // 512) * 2
    assert compression_report.planned_bytes(dense, Int8(), 2) == blocks * 260 + 4 * (200 + 200 * 3 + 3)
    dense.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=4)))
    assert compression_report.planned_bytes(dense, None, 2) == 10 * 200 + 200 + 200 * 3 + 3
    words = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(50, 8), keras.layers.Dense(3)])
    assert compression_report.planned_bytes(words, None, 2) is None
