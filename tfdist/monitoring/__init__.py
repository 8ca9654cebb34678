"""What a run reports: speed, bytes, TensorBoard."""

from tfdist.monitoring.network import WireBytes
from tfdist.monitoring.tensorboard import Scalars
from tfdist.monitoring.throughput import Throughput

__all__ = ["Scalars", "Throughput", "WireBytes"]
