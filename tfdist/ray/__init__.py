"""Tasks on the nodes of a Ray cluster, under the launcher's policy. No TensorFlow here, and no Ray before it is used."""

from tfdist.ray.function import run

__all__ = ["run"]
