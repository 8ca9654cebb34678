"""`ResultsTable`: what each step has counted, written by the step to a parameter server and read by the chief.

A step's result could be returned to the chief; but a worker that dies before it is fetched takes it along, and fetching it
costs two round trips for each step. A row on a server costs the step next to nothing, many are read at once, and a step
that runs again writes its row again: what it counts, counts once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.replicas.random_seeds import run_in_clean_thread

_SERVER = "/job:ps/replica:0/task:0/device:CPU:0"


class ResultsTable:
    """Rows on the first server, of which each step on its way has one.

    Args:
        rows: How many steps may be on their way or unread.
        width: Numbers of a step.
    """

    def __init__(self, rows: int, width: int):
        def make() -> tf.Variable:
            with tf.device(_SERVER):
                return tf.Variable(tf.zeros([rows, width + 1], tf.float64), trainable=False, name="ledger")

        self._rows = run_in_clean_thread(make)  # a step may be in tracing, which would take the variable for its own
        self._gather = tf.function(self._read_rows, input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)

    def write(self, attempt_id: tf.Tensor, row: tf.Tensor, numbers: tf.Tensor) -> None:
        """Writes a step's row. In the graph of the step.

        Args:
            ticket: The step's own number, `[]` float64.
            row: Which row, `[]` float64.
            numbers: `[width]` float64.
        """
        place = tf.cast(tf.reshape(row, [1]), tf.int64)
        self._rows.scatter_update(tf.IndexedSlices(tf.concat([[attempt_id], numbers], 0)[None], place))

    def read(self, attempt_ids: Sequence[int], rows: Sequence[int]) -> list[np.ndarray | None]:
        """Returns the numbers of steps that have ended, `[width]` float64 each.

        None for a step whose row another one has overwritten: one that had been given up, and came late.
        """
        # A function: a single operation would hold Python's lock while it waits, and the watch must go on (`watch.py`).
        found = self._gather(tf.constant(rows, tf.int32)).numpy()
        return [row[1:] if row[0] == attempt_id else None for row, attempt_id in zip(found, attempt_ids, strict=True)]

    def _read_rows(self, rows: tf.Tensor) -> tf.Tensor:
        with tf.device(_SERVER):
            return tf.gather(self._rows, rows)
