"""A run of TensorBoard: a folder of event files, which can be truncated to their sizes at a backup."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

BY_ITERATIONS = "evaluation_{name}_vs_iterations"  # Keras' tag for an evaluation
_OURS = ".tfdist"  # suffix of the files that tfdist writes; other files in the folder are not changed
_FLUSH_SECONDS = 10.0
# TensorBoard's plugins for scalars and histograms, and their class of data.
_SCALAR = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "scalars"}, data_class=1)
_HISTOGRAM = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": "histograms"}, data_class=2)
_FLOAT = tf.float32.as_datatype_enum
_numbers = itertools.count()
# The description of a curve in TensorBoard, with its unit, by the tag or by its prefix, which ends with "/".
_DESCRIPTIONS = {
    "perf/examples_per_second": "Speed of the training over all replicas, in examples per second.",
    "perf/step_ms": "Median time of a training step, in milliseconds.",
    "perf/own_step_ms": "Mean time of a step of this task until its gradients are ready, without waits for other tasks, in milliseconds.",
    "perf/own_step_ms/": "Mean time of a step of this worker, in milliseconds.",
    "perf/input_wait_ms": "Mean time that a step waited for its batch, in milliseconds.",
    "comm/bytes_per_step": "Bytes per step that this rank sends over the network, measured; without bytes in shared memory.",
    "comm/gradient_bytes_per_step": "Predicted bytes per step of the gradients that this rank sends, over the network or through shared memory.",
    "comm/compression_ratio": "Bytes of the gradients divided by the bytes that the compressor sends.",
    "comm/residual_norm": "L2 norm of the residuals of compression (error feedback), in units of the gradient.",
    "ps/steps_in_flight": "Mean number of steps that are scheduled and not completed.",
    "ps/staleness": "Mean number of other steps that ended during a step.",
    "cluster/workers": "Number of workers that train together.",
    "faults/restarts": "Number of restarts so far.",
    "faults/lost_steps": "Number of steps that restarts have repeated so far.",
    "goodput/productive": "Share of training steps in the wall time so far, from 0 to 1.",
    "goodput_seconds/": "Seconds of the wall time so far that belong to this part.",
    "system/rss_bytes": "Resident memory of this process, in bytes.",
    "system/cpu_percent": "Processor time of this process, in percent: 100 is one core.",
    "train/gradient_norm": "L2 norm of the last update's gradient.",
    "train/skipped_updates": "Number of updates that were skipped so far.",
}


def description(tag: str) -> str:
    """Returns the description of a curve with its unit; empty for the training's own logs, whose unit is the user's."""
    return _DESCRIPTIONS.get(tag) or next(
        (text for known, text in _DESCRIPTIONS.items() if known[-1] == "/" and tag.startswith(known)), ""
    )


class Run:
    """Writer of summaries to one folder; no other object may write there. The first summary creates the file.

    A file may be truncated, and another one started, while TensorBoard reads: TensorBoard reads files that it has not read yet, and
    a step that is written again replaces the curves from that step on. The folder must be local.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._writer: tf.io.TFRecordWriter | None = None
        self._flushed = 0.0
        self._described: set[str] = set()  # tags in the current file

    def start(self) -> None:
        """Creates the file if it does not exist: TensorBoard assigns colors to runs in the order of their files.

        Raises:
            tf.errors.OpError: The file cannot be written.
        """
        if self._writer is None:
            self._open(time.time())

    def _open(self, now: float) -> None:
        tf.io.gfile.makedirs(self._folder)
        # TensorBoard reads files in the order of their names.
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}{_OURS}"
        self._writer = tf.io.TFRecordWriter(os.path.join(self._folder, name))
        self._add(tf.compat.v1.Event(wall_time=now, file_version="brain.Event:2"))

    def write(self, values: Mapping[str, float | np.ndarray], step: int, at: float | None = None) -> None:
        """Writes a value for each tag: a number, or a histogram `[buckets, 3]` of left and right edges and counts.

        `at` is the time in seconds since the epoch; None means now.

        Raises:
            tf.errors.OpError: The file cannot be written.
        """
        summary = tf.compat.v1.Summary()
        for tag, value in values.items():
            if isinstance(value, np.ndarray):
                summary.value.add(tag=tag, metadata=_HISTOGRAM, tensor=tf.make_tensor_proto(value, tf.float64))
            else:  # the same as make_tensor_proto, which takes ten times as long
                tensor = {"dtype": _FLOAT, "float_val": [value], "tensor_shape": {}}
                added = summary.value.add(tag=tag, metadata=_SCALAR, tensor=tensor)
                if tag not in self._described:  # TensorBoard uses the first description of a tag
                    self._described.add(tag)
                    added.metadata.summary_description = description(tag)
        if values:
            self.write_summary(summary, step, at)

    def write_summary(self, summary: tf.compat.v1.Summary, step: int = 0, at: float | None = None) -> None:
        """Writes a summary of any of TensorBoard's plugins.

        Raises:
            tf.errors.OpError: The file cannot be written.
        """
        now = time.time()
        if self._writer is None:
            self._open(now)
        self._add(tf.compat.v1.Event(wall_time=at or now, step=step, summary=summary))
        if now - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def _add(self, event: tf.compat.v1.Event) -> None:
        if self._writer:
            self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        """Makes written values readable."""
        self._flushed = time.time()
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """Closes the file; later values go to a new file."""
        self._described.clear()
        writer = self._writer
        self._writer = None  # also if closing fails
        if writer:
            writer.close()

    def sizes(self) -> dict[str, int]:
        """Flushes the files, and returns their sizes in bytes by name."""
        self.flush()
        return {name: tf.io.gfile.stat(self._path(name)).length for name in self._names()}

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Truncates the files to `sizes`, and removes newer files: an ended process wrote this content after the backup."""
        self.close()
        for name in self._names():
            path = self._path(name)
            if name not in sizes:
                tf.io.gfile.remove(path)
            elif tf.io.gfile.stat(path).length > sizes[name]:
                with tf.io.gfile.GFile(path, "rb") as file:
                    content = file.read(sizes[name])
                # Replace the file atomically, because TensorBoard may be reading it.
                with tf.io.gfile.GFile(self._path(f"cut-{os.getpid()}"), "wb") as file:
                    file.write(content)
                tf.io.gfile.rename(self._path(f"cut-{os.getpid()}"), path, overwrite=True)

    def set_aside(self) -> None:
        """Renames the files, so that TensorBoard does not show them."""
        self.close()
        for name in self._names():
            tf.io.gfile.rename(self._path(name), self._path(name.replace(".tfevents.", ".before.")), overwrite=True)

    def _names(self) -> list[str]:
        if not tf.io.gfile.isdir(self._folder):
            return []
        names = tf.io.gfile.listdir(self._folder)
        return sorted(name for name in names if ".tfevents." in name and name.endswith(_OURS))

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)
