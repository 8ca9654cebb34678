"""Callbacks and files that report a run: `TensorBoard`, `Throughput`, `Goodput`, `Tracker`, `WireBytes`, and its summary."""

from tfdist.monitoring.goodput import Goodput
from tfdist.monitoring.network import WireBytes
from tfdist.monitoring.tensorboard import TensorBoard
from tfdist.monitoring.throughput import Throughput
from tfdist.monitoring.tracker import Tracker

__all__ = ["Goodput", "TensorBoard", "Throughput", "Tracker", "WireBytes"]
