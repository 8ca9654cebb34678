"""A model's step, traced for data of one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.parameter_server.results_table import ResultsTable


class TracedStep:
    """A step traced for data of one form.

    Attributes:
        function: The concrete function of (data, given).
        ledger: Where it writes what it counts; None where it returns that.
        own: The logs that are no metrics: their structure.
        names: All logs.
        held: What each of the metrics' variables holds at the step's end, in its graph, by its id.
        computed: The logs that are computed from `held`.
        count: Adds what steps have counted; returns what metrics and `computed` are then.
    """

    def __init__(self, ledger: ResultsTable | None = None, own: Any = None, names: Sequence[str] = ()):
        self.names = names
        self.function: Any = None
        self.ledger = ledger
        self.custom_logs = own
        self.held: dict[int, tf.Tensor] = {}
        self.computed: dict[str, Any] = {}
        self.count: Any = None

    def packed(self, arrays: Sequence[np.ndarray]) -> Any:
        """Returns what `WorkerStep.call` has returned, in the structure of what the step returns."""
        structure = self.function.structured_outputs
        return tf.nest.pack_sequence_as(structure, list(map(tf.constant, arrays)), expand_composites=True)
