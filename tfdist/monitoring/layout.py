"""The first page of TensorBoard's tab "Custom Scalars"."""

from __future__ import annotations

import tensorflow as tf
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as summary_lib

_PAGE = "Training"
# A chart's title and which tags it shows, of all runs.
CHARTS = {
    "Is it learning?": r"^(batch_(\w+_)?loss|evaluation_(\w+_)?loss_vs_iterations)$",  # both by step, unlike `epoch_*`
    "How fast is it?": "^perf/examples_per_second$",
    "Who is slow?": "^perf/step_ms$",
    "What did the network cost?": "^comm/.*",
}
_BY_EPOCH = r"^epoch_(\w+_)?loss$"


def summary(by_step: bool) -> tf.compat.v1.Summary:
    """Returns the summary that holds the layout.

    Args:
        by_step: Whether the training's loss is written by step, besides by epoch.
    """
    charts = CHARTS if by_step else CHARTS | {"Is it learning?": _BY_EPOCH}
    page = layout_pb2.Category(title=_PAGE)
    for title, tags in charts.items():
        page.chart.add(title=title, multiline=layout_pb2.MultilineChartContent(tag=[tags]))
    return summary_lib.pb(layout_pb2.Layout(category=[page]))
