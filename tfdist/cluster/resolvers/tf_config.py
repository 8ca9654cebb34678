"""TF_CONFIG: `tfdist.launch`, Kubeflow's TFJob, or by hand. No TensorFlow here."""

from __future__ import annotations

from tfdist.cluster.resolvers.environment import Environment
from tfdist.cluster.spec import ClusterSpec, TaskSpec, from_tf_config


def resolve(variables: Environment) -> tuple[ClusterSpec, TaskSpec] | None:
    text = variables.get("TF_CONFIG")
    return from_tf_config(text) if "".join(text.split()) != "{}" else None
