"""The check of a compressor's fidelity: at some updates one bucket, in turn, is exchanged compressed and exact."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.collectives.requests import AllReduce, Cond, Exchange, ReduceResult, flatten

EVERY = 100  # updates between two checks
_MOST_ERROR = 0.02
_MOST_GROWTHS = 5


class Measures(NamedTuple):
    """The measures of a check, in the order in which `Reduction.fidelity` has them.

    Attributes:
        step: The number of updates before the checked one; 0 before the first check.
        bucket: The checked bucket, from 0, in the order in which they are sent.
        relative_error: |compressed sum - exact sum| / |exact sum|.
        cosine: The cosine between both sums.
        residual_ratio: |residuals| / |gradients|, over all ranks and variables; 0 without error feedback.
        growths: The number of checks in a row, up to this one, at which `residual_ratio` has grown.
    """

    step: float
    bucket: float
    relative_error: float
    cosine: float
    residual_ratio: float
    growths: float

    def broken_budget(self, has_feedback: bool) -> str:
        """Returns the budget that a compressor has broken, or an empty text.

        With error feedback a single sum may differ from the exact one, but the residual must not grow.
        """
        if has_feedback:
            if self.growths < _MOST_GROWTHS:
                return ""
            return f"residual {self.residual_ratio:.2g} of the gradient, grown for {_MOST_GROWTHS} checks"
        if self.relative_error <= _MOST_ERROR:
            return ""
        return f"relative error {self.relative_error:.2g} > {_MOST_ERROR}"


NOT_MEASURED = Measures(*[0.0] * len(Measures._fields))


class Check:
    """The check of one step in its graph; does nothing unless it is due. `step` is the number of updates so far, a scalar int64."""

    def __init__(self, step: tf.Tensor):
        self._step = step
        self._is_due = (step > 0) & (step % EVERY == 0)
        self._measured: list[tf.Tensor] = []

    def compare(
        self, exchange: Exchange, values: Sequence[tf.Tensor], chosen: Sequence[int], turn: int, turns: int
    ) -> Generator[Any, Any, Any]:
        """Runs the exchange of a bucket's `values`; at its turn also sums the `chosen` ones exactly. Returns the result and the measures, `[3]`."""
        result = yield from exchange
        is_due = self._is_due & (self._step // EVERY % turns == turn)
        measured = yield Cond(
            is_due,
            lambda: _compared([values[i] for i in chosen], [result.sums[i] for i in chosen], turn),
            lambda: _zeros(3),
        )
        return result, measured

    def take(self, by_rank: Sequence[tuple[ReduceResult, tf.Tensor]]) -> list[ReduceResult]:
        """Returns the results of `compare`, by rank, and keeps the measures, which are equal on all ranks."""
        results, measured = zip(*by_rank, strict=True)
        self._measured.append(measured[0])
        return list(results)

    def compare_residuals(
        self, values: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor]
    ) -> Generator[Any, Any, Any]:
        """Returns |residuals| / |gradients|, of one rank's values; 0 unless the check is due."""
        return (yield Cond(self._is_due, lambda: _ratio(residuals, values), lambda: _zeros(1)))

    def after(self, before: tf.Tensor, residual_ratio: tf.Tensor) -> tf.Tensor:
        """Returns the vector of `Measures` after this step, of the one before."""
        if not self._measured:
            return before
        old = Measures(*tf.unstack(before))
        growths = tf.where(residual_ratio[0] > old.residual_ratio, old.growths + 1, 0)
        step = tf.cast(self._step, tf.float64)
        now = tf.concat([[step], tf.add_n(self._measured), residual_ratio, [growths]], 0)
        return tf.where(self._is_due, now, before)


def _compared(values: Sequence[tf.Tensor], sums: Sequence[tf.Tensor], bucket: int) -> Generator[Any, Any, tf.Tensor]:
    totals = yield AllReduce(values)
    exact = tf.cast(flatten(totals), tf.float64)
    compressed = tf.cast(flatten(sums), tf.float64)
    norm = tf.norm(exact)
    error = tf.math.divide_no_nan(tf.norm(compressed - exact), norm)
    cosine = tf.math.divide_no_nan(tf.reduce_sum(exact * compressed), norm * tf.norm(compressed))
    return tf.stack([tf.constant(bucket, tf.float64), error, cosine])


def _ratio(residuals: Sequence[tf.Tensor], values: Sequence[tf.Tensor]) -> Generator[Any, Any, tf.Tensor]:
    squares = [tf.reduce_sum(tf.square(tf.cast(flatten(each), tf.float64))) for each in (residuals, values)]
    (totals,) = yield AllReduce([tf.stack(squares)])
    return tf.sqrt(tf.math.divide_no_nan(totals[:1], totals[1:]))


def _zeros(count: int) -> Generator[Any, Any, tf.Tensor]:
    """Returns zeros, as an exchange without a request."""
    yield from ()
    return tf.zeros([count], tf.float64)
