"""What a run reports: speed, bytes, TensorBoard."""

from tfdist.monitoring.goodput import Goodput
from tfdist.monitoring.network import WireBytes
from tfdist.monitoring.tensorboard import TensorBoard
from tfdist.monitoring.throughput import Throughput

__all__ = ["Goodput", "TensorBoard", "Throughput", "WireBytes"]
