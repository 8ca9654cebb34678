"""Logs that a step of one's own computes from its metrics' results, as `{"loss": self.total_loss.result()}`.

Within a step a metric holds what its replica has counted, and the replicas' results are averaged. At the end of an epoch or
evaluation Keras takes the metrics' results over all replicas for logs that have the metrics' names; here, the others too are
computed from what the metrics hold on all replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.step import graph_copies


class ComputedLogs:
    """The logs of a step, as far as they depend on its metrics alone.

    Args:
        model: The model.
        logs: What its step has returned, on a replica for which the step is being traced.
    """

    def __init__(self, model: keras.Model, logs: Mapping[str, Any]):
        graph = tf.compat.v1.get_default_graph()
        variables = [variable.value for metric in model.metrics for variable in metric.variables]
        self._variables = {id(graph.capture(variable.handle)): variable for variable in variables}
        self._logs = {
            name: value
            for name, value in logs.items()
            if graph_copies.depends_only_on(lambda tensor: self._read(tensor) is not None, value)
        }
        self._compute = tf.function(self._copied, autograph=False)

    def now(self) -> dict[str, Any]:
        """Returns these logs as they are for all replicas: collectives, where workers hold the metrics."""
        if not self._logs:
            return {}
        found: dict[str, Any] = self._compute({key: tf.convert_to_tensor(v) for key, v in self._variables.items()})
        return found

    def _read(self, tensor: tf.Tensor) -> int | None:
        """Returns which variable a tensor is read from."""
        if tensor.op.type != "ReadVariableOp" or id(tensor.op.inputs[0]) not in self._variables:
            return None
        return id(tensor.op.inputs[0])

    def _copied(self, values: dict[int, tf.Tensor]) -> Any:
        def now(tensor: tf.Tensor) -> tf.Tensor | None:
            variable = self._read(tensor)
            return None if variable is None else values[variable]

        return graph_copies.copied(now, self._logs)
