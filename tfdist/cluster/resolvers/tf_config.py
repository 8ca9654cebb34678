"""TF_CONFIG: `tfdist launch`, Kubeflow's TFJob, or by hand. No TensorFlow here."""

from __future__ import annotations

from tfdist.cluster.resolvers.environment import Environment
from tfdist.cluster.spec import ClusterTask, from_tf_config


def resolve(variables: Environment) -> ClusterTask | None:
    """Returns the cluster and the task of `TF_CONFIG`, or None if it is an empty object.

    Raises:
        ConfigError: `TF_CONFIG` is invalid.
    """
    text = variables.get("TF_CONFIG")
    return from_tf_config(text) if "".join(text.split()) != "{}" else None
