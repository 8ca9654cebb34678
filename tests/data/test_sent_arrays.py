"""Arrays of a dataset function reach the workers, and its graph does not hold them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist import data
from tfdist.data import graph as graph_lib
from tfdist.data import sent_arrays
from tfdist.errors import ConfigError
from tfdist.parameter_server import worker_dataset


def traced_dataset(function, pipelines=2):
    made = worker_dataset.WorkerDataset(function, pipelines)
    return made, [made.trace(number) for number in range(pipelines)]


def test_arrays_are_given_to_a_traced_function_and_not_held_by_its_graph():
    x = np.zeros((1000, 100), np.float32)
    _, traced = traced_dataset(lambda context: data.epochs((x, x), context, 10, seed=0))
    assert [tensor.shape for tensor in traced[0].captured_inputs] == [(1000, 100)]
    assert all(each.graph.as_graph_def().ByteSize() < 20_000 for each in traced)
    assert traced[0].captured_inputs[0] is traced[1].captured_inputs[0], "one tensor for all workers"


@pytest.mark.parametrize("piece", [2**28, 5 * 400, 1])
@pytest.mark.parametrize(
    "source", ["epochs", "from_tensor_slices", "with a list", "from_tensors", "tensor", "within map"]
)
def test_arrays_reach_workers_in_pieces_with_the_values_of_whole_ones(monkeypatch, source, piece):
    monkeypatch.setattr(sent_arrays, "PIECE", piece)
    monkeypatch.setattr(sent_arrays, "SMALLEST", 100)
    x = np.arange(5300, dtype=np.float32).reshape(53, 100)
    names = np.array([f"example {number}" for number in range(53)])
    labels, outside = list(range(53)), tf.constant(x)

    def make(context):
        if source == "epochs":
            return data.epochs({"x": x, "y": (names,)}, context, 8, seed=3).take(20)
        if source == "from_tensors":
            return tf.data.Dataset.from_tensors({"x": x, "y": (names, labels)})
        if source == "within map":
            return tf.data.Dataset.range(2).flat_map(lambda _: tf.data.Dataset.from_tensor_slices(x))
        given = {"x": outside} if source == "tensor" else {"x": x, "y": (names, x[:, 0])}
        if source == "with a list":
            given["y"] = labels
        return tf.data.Dataset.from_tensor_slices(given).shuffle(20, seed=3, reshuffle_each_iteration=False).batch(5)

    expected = make(tf.distribute.InputContext(2, 0, 1))
    made, traced = traced_dataset(make)
    sent = made.dataset(0)
    assert sent.element_spec == expected.element_spec
    assert sent.cardinality() == expected.cardinality()
    tf.nest.map_structure(
        np.testing.assert_array_equal, list(sent.as_numpy_iterator()), list(expected.as_numpy_iterator())
    )
    constants = [op for each in traced for op in graph_lib.nodes(each.graph) if op.op == "Const"]
    assert max(op.ByteSize() for op in constants) < 1500  # small ones stay
    assert isinstance(vars(tf.data.Dataset)["from_tensor_slices"], staticmethod)
    assert "tfdist" not in tf.data.Dataset.from_tensor_slices.__code__.co_filename


def test_graphs_of_arrays_do_not_grow_with_them():
    def size(examples):
        x = np.zeros((examples, 1000), np.float32)
        functions = (
            lambda context: data.epochs((x, x), context, 10, seed=0),
            lambda context: tf.data.Dataset.from_tensor_slices((x, x)).batch(10),
        )
        return [traced_dataset(each, 1)[1][0].graph.as_graph_def().ByteSize() for each in functions]

    assert np.allclose(size(100), size(10_000), atol=50)


def test_tensors_too_large_for_a_graph_are_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(sent_arrays, "LARGEST", 10_000)
    x = np.zeros((100, 100), np.float32)
    with pytest.raises(
        ConfigError,
        match=r"tensors of 2 GB and more .* let it read files, .* give the arrays themselves to tfdist\.data",
    ):
        worker_dataset.WorkerDataset(lambda context: tf.data.Dataset.from_tensors(tf.constant(x) + 1), 2)
    with pytest.raises(ConfigError, match="tensors of 2 GB and more"):
        worker_dataset.WorkerDataset(lambda context: tf.data.Dataset.from_tensors(np.zeros((200, 100), np.float32)), 2)
