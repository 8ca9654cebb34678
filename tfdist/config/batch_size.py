"""How a global batch divides among replicas. No TensorFlow here."""

from __future__ import annotations

from tfdist.errors import ConfigError


def divisibility_fault(batch_size: int, replicas: int) -> str:
    """Returns the sentence for a global batch size that the replicas do not divide, or an empty text."""
    if batch_size % replicas == 0:
        return ""
    below = batch_size // replicas * replicas
    choice = f"{below} or {below + replicas}" if below else f"{replicas}"
    return f"global_batch_size {batch_size} is not divisible by {replicas} replicas; use {choice}."


def per_replica_batch_size(global_batch_size: int, num_replicas: int) -> int:
    """Returns the examples per step of each replica.

    Raises:
        ConfigError: The replicas do not divide the batch. An uneven split would weigh examples unequally.
    """
    if fault := divisibility_fault(global_batch_size, num_replicas):
        raise ConfigError(fault)
    return global_batch_size // num_replicas
