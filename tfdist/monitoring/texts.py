"""What a training runs on, as texts for TensorBoard: the cluster, the strategy, the versions."""

from __future__ import annotations

import platform
from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf

from tfdist.version import __version__


def versions() -> dict[str, str]:
    """Returns the versions that decide what is computed."""
    return {
        "tfdist": __version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def summary(strategy: tf.distribute.Strategy) -> tf.compat.v1.Summary:
    """Returns the texts `cluster`, `strategy` and `versions`, each a table in Markdown.

    Args:
        strategy: The strategy of the training.
    """
    resolver = getattr(strategy, "cluster_resolver", None)
    jobs = resolver.cluster_spec().as_dict() if resolver else {}
    tasks = [(f"{job}:{index}", address) for job in jobs for index, address in enumerate(jobs[job])]
    kind = getattr(strategy, "kind", "") or type(strategy).__name__.lstrip("_")
    texts = {
        "cluster": _table(("task", "address"), tasks or [("worker:0", "this process")]),
        "strategy": _table(("strategy", "replicas"), [(kind, str(strategy.num_replicas_in_sync))]),
        "versions": _table(("package", "version"), versions().items()),
    }
    made = tf.compat.v1.Summary()
    for tag, text in texts.items():
        metadata = tf.compat.v1.SummaryMetadata(data_class=2)  # a tensor
        metadata.plugin_data.plugin_name = "text"
        made.value.add(tag=tag, metadata=metadata, tensor=tf.make_tensor_proto(text))
    return made


def _table(columns: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"| {left} | {right} |" for left, right in (columns, ("---", "---"), *rows))
