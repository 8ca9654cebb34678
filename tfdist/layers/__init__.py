"""The Keras layer whose variables lie on several hosts: `Embedding`."""

from tfdist.layers.embedding import Embedding

__all__ = ["Embedding"]
