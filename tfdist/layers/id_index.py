"""The rows of the ids of a `HashedEmbedding`, in ordinary variables: files, backups and copies on devices need no further code.

An id belongs to a bucket of 64 cells, which a lookup compares with it. There are twice as many cells as ids that the index may hold, so
that a bucket has a cell for a new id, except for one in five million of a full index. Nothing moves: an eviction empties cells.
"""

from __future__ import annotations

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.layers.row_initializer import mixed
from tfdist.layers.table import components, local_copy

EMPTY = np.iinfo(np.int64).min  # of a cell without an id; as an id it is never admitted
_WAYS = 64  # cells of a bucket
_CELLS_PER_ID = 2
_KEPT = 0.9  # the part that an eviction leaves


class Admitted(NamedTuple):
    """The ids that one batch adds to the table.

    Attributes:
        ids: The ids, ascending.
        rows: Their rows.
        is_full: Whether another id of the batch has found no place.
    """

    ids: tf.Tensor
    rows: tf.Tensor
    is_full: tf.Tensor


class IdIndex:
    """Counts ids, and gives a row of the table to those that are seen often enough. Row 0 is that of all other ids.

    All copies of the variables hold the same values: each process computes them from the ids of all replicas.

    Attributes:
        variables: The state, in the order of files.
    """

    def __init__(self, capacity: int, min_count: int):
        self._capacity = capacity
        self._min_count = min_count
        # Ids without a row are counted in as many further cells.
        self._limit = capacity if min_count == 1 else 2 * capacity
        self._buckets = -(-self._limit * _CELLS_PER_ID // _WAYS)
        self.variables: list[keras.Variable] = []

        def add(name: str, shape: tuple[int, ...], initial: object = 0) -> keras.Variable:
            variable = keras.Variable(
                lambda shape, dtype=None: tf.broadcast_to(tf.constant(initial, tf.int64), shape),
                shape=shape,
                dtype="int64",
                trainable=False,
                autocast=False,
                # The copies are equal, so that a backup holds one of them, and need no reduction.
                synchronization="on_write",
                aggregation="only_first_replica",
                name=name,
            )
            self.variables.append(variable)
            return variable

        cells = (self._buckets * _WAYS,)
        self._ids = add("ids", (self._buckets, _WAYS), EMPTY)
        self._rows = add("rows", cells)
        self._counts = add("counts", cells)
        self._last_seen = add("last_seen", cells)
        # The rows in the order of their use. The first `used` ones are in use.
        self._free = add("free", (capacity,), np.arange(1, capacity + 1))
        self._used = add("used", (1,))
        self._known = add("known", (1,))  # the number of ids in cells
        self._calls = add("calls", (1,))

    def find(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the rows of a vector of ids."""
        cells, is_known, _ = self._search(ids)
        return tf.where(is_known, tf.gather(local_copy(self._rows), cells), 0)

    def admit(self, ids: tf.Tensor, counts: tf.Tensor) -> Admitted:
        """Counts the ids of a batch of all replicas, and gives rows to some; lower ids come first. Outside of replicas.

        Args:
            ids: A vector. An id may be in it several times.
            counts: How often each is in the batch.
        """
        order = tf.argsort(ids, stable=True)
        ids, places = tf.unique(tf.gather(ids, order))
        counts = tf.math.segment_sum(tf.gather(counts, order), places)
        cells, is_known, is_placed = self._place(ids)
        seen = is_known | is_placed
        ids_seen = tf.boolean_mask(ids, seen)
        cells = tf.boolean_mask(cells, seen)
        totals = tf.gather(local_copy(self._counts), cells) + tf.boolean_mask(counts, seen)
        rows = tf.gather(local_copy(self._rows), cells)
        waits = (rows == 0) & (totals >= self._min_count)
        used = local_copy(self._used)
        numbers = used + tf.cumsum(tf.cast(waits, tf.int64), exclusive=True)
        is_admitted = waits & (numbers < self._capacity)
        new_rows = tf.gather(local_copy(self._free), tf.boolean_mask(numbers, is_admitted))
        new_ids = tf.boolean_mask(ids_seen, is_admitted)
        is_full = ~tf.reduce_all(seen) | tf.reduce_any(waits & ~is_admitted)

        calls = local_copy(self._calls) + 1
        places_seen = tf.stack([cells // _WAYS, cells % _WAYS], 1)
        _update(self._ids, "scatter_nd_update", places_seen, ids_seen)
        _update(self._rows, "scatter_update", tf.IndexedSlices(new_rows, tf.boolean_mask(cells, is_admitted)))
        _update(self._counts, "scatter_update", tf.IndexedSlices(totals, cells))
        _update(self._last_seen, "scatter_update", tf.IndexedSlices(tf.repeat(calls, tf.size(cells)), cells))
        _update(self._known, "assign_add", tf.math.count_nonzero(is_placed, keepdims=True))
        _update(self._used, "assign_add", tf.math.count_nonzero(is_admitted, keepdims=True))
        _update(self._calls, "assign", calls)
        return Admitted(new_ids, new_rows, is_full)

    def evict(self, by_count: bool) -> np.ndarray:
        """Removes ids down to 90 % of the table, and of the ids without a row; returns the rows that are free again. Not in a step.

        Args:
            by_count: Whether the ids with the lowest counts go, instead of those that were not seen for the longest time. Of equal ones the
                lower id goes.
        """
        ids = self._ids.numpy().reshape(-1)
        rows = self._rows.numpy()
        kept = int(self._capacity * _KEPT)
        order = np.lexsort((ids, (self._counts if by_count else self._last_seen).numpy()))
        order = order[ids[order] != EMPTY]
        with_row = order[rows[order] > 0]
        without = order[rows[order] == 0]
        evicted = [group[: max(0, len(group) - kept)] for group in (with_row, without)]
        cells = np.concatenate(evicted)
        if not len(cells):
            return cells
        freed = np.sort(rows[evicted[0]])
        used = len(with_row) - len(freed)
        ids[cells] = EMPTY
        self._ids.assign(ids.reshape(self._ids.shape))
        for variable in (self._rows, self._counts, self._last_seen):
            values = variable.numpy()
            values[cells] = 0
            variable.assign(values)
        free = self._free.numpy()
        free[used:] = np.sort(np.concatenate([freed, free[len(with_row) :]]))
        self._free.assign(free)
        self._used.assign([used])
        self._known.assign([len(order) - len(cells)])
        return freed

    def _search(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the cells of ids, whether they are there, and the contents of their buckets."""
        buckets = tf.cast(tf.bitwise.right_shift(mixed(tf.cast(ids, tf.uint64)), tf.constant(1, tf.uint64)), tf.int64)
        buckets %= self._buckets
        contents = tf.gather(local_copy(self._ids), buckets)
        is_id = (contents == ids[:, None]) & (ids[:, None] != EMPTY)
        return buckets * _WAYS + tf.argmax(is_id, 1), tf.reduce_any(is_id, 1), contents

    def _place(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the cells of ascending ids, whether they are known, and whether they are new and have an empty cell."""
        cells, is_known, contents = self._search(ids)
        is_new = ~is_known & (ids != EMPTY)
        # Several new ids of one bucket take its empty cells in turn.
        buckets = cells // _WAYS
        order = tf.argsort(buckets, stable=True)
        sorted_buckets = tf.gather(buckets, order)
        before = tf.cumsum(tf.cast(tf.gather(is_new, order), tf.int64), exclusive=True)
        before -= tf.gather(before, tf.searchsorted(sorted_buckets, sorted_buckets))
        turns = tf.gather(before, tf.math.invert_permutation(order))
        is_empty = contents == EMPTY
        is_own = is_empty & (tf.cumsum(tf.cast(is_empty, tf.int64), 1) == turns[:, None] + 1)
        has_cell = is_new & tf.reduce_any(is_own, 1)
        room = self._limit - local_copy(self._known)
        is_placed = has_cell & (tf.cumsum(tf.cast(has_cell, tf.int64)) <= room)
        return tf.where(is_known, cells, buckets * _WAYS + tf.argmax(is_own, 1)), is_known, is_placed


def _update(variable: keras.Variable, method: str, *values: object) -> None:
    """Calls a method of each copy of a variable in this process."""
    for copy in components(variable):
        with tf.device(copy.device):
            getattr(copy, method)(*values)
