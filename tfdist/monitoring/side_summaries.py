"""The summaries that TensorBoard shows beside the curves: texts, a layout of charts, hyperparameters and histograms."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as custom_scalars
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import summary as hparams_lib

from tfdist.compat import keras_internals
from tfdist.strategy import as_ours
from tfdist.version import __version__

_CHARTS_PAGE = "Training"
_CHARTS_LINK = (
    "The page [Custom Scalars](#custom_scalars) has the charts of this run: is it learning, how fast is it, who is slow, "
    "what did the network cost."
)
_IS_IT_LEARNING = "Is it learning? (loss)"
_WHO_IS_SLOW = "Who is slow? (ms per step)"
# Chart title to a regular expression of the tags that it shows, for all runs.
_CHARTS = {
    _IS_IT_LEARNING: r"^(batch_(\w+_)?loss|evaluation_(\w+_)?loss_vs_iterations)$",  # both by step, unlike `epoch_*`
    "How fast is it? (examples per second)": "^perf/examples_per_second$",
    _WHO_IS_SLOW: "^perf/step_ms$",
    # Without the gradients' bytes: they may travel through shared memory, and TensorBoard gives all lines of a run one color.
    "What did the network cost? (bytes per step)": "^comm/bytes_per_step$",
}
_COMPRESSION = {
    "What does compression change? (ratio of bytes, norm of the residuals)": "^comm/(compression_ratio|residual_norm)$"
}
_LOSS_BY_EPOCH = r"^epoch_(\w+_)?loss$"
_HISTOGRAM_BUCKETS = 30  # as TensorBoard's own


def environment_texts(strategy: tf.distribute.Strategy) -> tf.compat.v1.Summary:
    """Returns four Markdown texts: `charts`, which links to the page of charts, and the tables `cluster`, `strategy` and `versions`."""
    resolver = getattr(strategy, "cluster_resolver", None)
    jobs = resolver.cluster_spec().as_dict() if resolver else {}
    tasks = [(f"{job}:{index}", address) for job in jobs for index, address in enumerate(jobs[job])]
    texts = {
        "charts": _CHARTS_LINK,
        "cluster": _table(("task", "address"), tasks or [("worker:0", "this process")]),
        "strategy": _table(("strategy", "replicas"), [(_kind(strategy), str(strategy.num_replicas_in_sync))]),
        "versions": _table(("package", "version"), versions().items()),
    }
    summary = tf.compat.v1.Summary()
    for tag, text in texts.items():
        metadata = tf.compat.v1.SummaryMetadata(data_class=2)  # a tensor
        metadata.plugin_data.plugin_name = "text"
        summary.value.add(tag=tag, metadata=metadata, tensor=tf.make_tensor_proto(text))
    return summary


def _kind(strategy: tf.distribute.Strategy) -> str:
    ours = as_ours(strategy)
    return ours.config.name if ours else type(strategy).__name__.lstrip("_")


def _table(columns: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"| {left} | {right} |" for left, right in (columns, ("---", "---"), *rows))


def versions() -> dict[str, str]:
    """Returns the versions of the packages on which results depend."""
    return {
        "tfdist": __version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def charts_layout(by_step: bool, compresses: bool, has_own_times: bool) -> tf.compat.v1.Summary:
    """Returns the layout of the first page of the tab "Custom Scalars"; `by_step` if the training's loss is written by step, too."""
    charts = dict(_CHARTS)
    if not by_step:
        charts[_IS_IT_LEARNING] = _LOSS_BY_EPOCH
    if has_own_times:  # synchronous tasks end a step together: their `perf/step_ms` are equal
        charts[_WHO_IS_SLOW] = "^perf/own_step_ms(/.*)?$"
    if compresses:
        charts |= _COMPRESSION
    page = layout_pb2.Category(title=_CHARTS_PAGE)
    for title, tags in charts.items():
        page.chart.add(title=title, multiline=layout_pb2.MultilineChartContent(tag=[tags]))
    return custom_scalars.pb(layout_pb2.Layout(category=[page]))


def hparams_start(
    hparams: Mapping[str, Any], strategy: tf.distribute.Strategy, batch_size: int | None, learning_rate: float | None
) -> tf.compat.v1.Summary:
    """Returns the summary that lists a training with its hyperparameters in the tab "HParams".

    The tab sorts hyperparameters by name, capitals first, so the most important names begin with a capital.

    A nested group of them becomes `group.name`.
    """
    if learning_rate is not None:
        learning_rate = float(f"{float(learning_rate):.6g}")  # not 0.0010000000475
    first = {
        "Batch size": batch_size,
        "Learning rate": learning_rate,
        "Replicas": strategy.num_replicas_in_sync,
        "Strategy": _kind(strategy),
    }
    known = {name: value for name, value in first.items() if value is not None}
    return hparams_lib.session_start_pb({**known, **dict(flatten(hparams))})


def flatten(values: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested mappings, with names such as `optimizer.momentum`."""
    for name, value in values.items():
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Mapping):
            yield from flatten(value, f"{path}{name}.")
        # TensorBoard sends JSON, which has no infinite numbers.
        elif isinstance(value, (bool, str)) or (isinstance(value, (int, float)) and abs(value) <= sys.float_info.max):
            yield f"{path}{name}", value
        else:
            yield f"{path}{name}", str(value)


def hparams_end() -> tf.compat.v1.Summary:
    """Returns the summary that marks a training as finished in the tab "HParams"."""
    return hparams_lib.session_end_pb(api_pb2.STATUS_SUCCESS)


def weight_histograms(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns a `[buckets, 3]` array (left edge, right edge, count) for each weight, with the tags of Keras' TensorBoard.

    If replicas have different values of a weight, such as a moving statistic, this process's first value is used. Values that
    are not finite are skipped.
    """
    local = model.distribute_strategy.experimental_local_results
    weights = {
        weight.path: local(keras_internals.raw_value(weight))[0].numpy()
        for layer in model.layers
        for weight in layer.weights
    }
    return {f"{path.replace(':', '_')}/histogram": histogram(values) for path, values in weights.items()}


def histogram(values: np.ndarray) -> np.ndarray:
    """Returns the histogram of an array: `[buckets, 3]`, with left edge, right edge and count."""
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    if not values.size or values.min() == values.max():  # one bucket has all values, as in TensorBoard's own histograms
        edge = values[0] if values.size else 0.0
        return np.array([[edge, edge, 0]] * (_HISTOGRAM_BUCKETS - 1) + [[edge, edge, values.size]])
    counts, edges = np.histogram(values, _HISTOGRAM_BUCKETS)
    return np.stack([edges[:-1], edges[1:], counts], 1)
