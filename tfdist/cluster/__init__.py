"""The tasks of a training and their addresses: `ClusterSpec`, `TaskSpec`, TF_CONFIG, and the barrier at their start. No TensorFlow here."""

from tfdist.cluster.local import free_ports, local_cluster
from tfdist.cluster.spec import ClusterSpec, TaskSpec, from_tf_config

__all__ = ["ClusterSpec", "TaskSpec", "free_ports", "from_tf_config", "local_cluster"]
