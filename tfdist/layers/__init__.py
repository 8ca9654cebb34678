"""Keras layers whose variables lie on several hosts: `Embedding`, and `HashedEmbedding` for ids that are not known beforehand."""

from tfdist.layers.embedding import Embedding
from tfdist.layers.hashed_embedding import HashedEmbedding

__all__ = ["Embedding", "HashedEmbedding"]
