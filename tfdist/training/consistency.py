"""What all workers must give to `fit` alike: found before training, as it would end amid it, or train some examples twice."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.ranks import Ranks
from tfdist.data import order
from tfdist.errors import ConfigError

_NUMBERS = ("epochs", "initial_epoch", "steps_per_epoch", "batch_size", "validation_steps", "validation_batch_size")
_NONE = -1.0
_COLUMNS = 32  # transformations of a dataset that are compared one by one
_TEXT = 200  # bytes of a transformation's text in a message


def check_consistency(ranks: Ranks, data: Any, validation: Any, given: Mapping[str, Any]) -> None:
    """Judges whether all workers were given the same. A collective.

    Args:
        ranks: The workers.
        data: What `fit` was given as `x`.
        validation: And as `validation_data`.
        given: Its other arguments.

    Raises:
        ConfigError: They were not; on all workers.
    """
    if ranks.size == 1:
        return
    mine = {name: _number(given.get(name)) for name in _NUMBERS}
    mine |= {f"{name} given": float(value is not None) for name, value in _present(validation, given)}
    mine |= {f"length of {name}": _length(value) for name, value in (("x", data), ("validation_data", validation))}
    orders = [*_order(data), *_order(validation)]
    gathered = ranks.gather(*mine.values(), *(float(zlib.crc32(text.encode())) for text in orders))
    unlike = [len(set(column)) > 1 for column in gathered.T]
    faults = [
        f"{name} must be the same on all workers of a fit. Received: {_listed(column)}."
        for name, column, differs in zip(mine, gathered.T, unlike, strict=False)
        if differs
    ]
    if not faults and any(unlike):
        faults = [_other_order(ranks, orders[unlike.index(True) - len(mine)])]
    if faults:
        raise ConfigError(faults)


def _present(validation: Any, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "validation_data", validation
    for name in ("y", "sample_weight", "class_weight"):
        yield name, given.get(name)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float, np.number)) else _NONE


def _listed(column: Sequence[float]) -> str:
    return ", ".join(
        f"{'none' if number == _NONE else f'{number:g}'} on worker:{rank}" for rank, number in enumerate(column)
    )


def _length(data: Any) -> float:
    """Returns how many examples arrays have, or batches a dataset; those of a function may differ."""
    if isinstance(data, tf.data.Dataset):
        return float(data.cardinality())
    first = next((each for each in tf.nest.flatten(data) if hasattr(each, "shape")), None)
    return float(first.shape[0]) if first is not None and len(first.shape) else _NONE


def _order(data: Any) -> list[str]:
    """Returns `_COLUMNS` texts of how a dataset orders its elements; empty ones where workers have datasets of their own."""
    texts = []
    if isinstance(data, tf.data.Dataset):
        policy = data.options().experimental_distribute.auto_shard_policy
        if policy != tf.data.experimental.AutoShardPolicy.OFF:
            texts = order.describe_order(data)
    last = _COLUMNS - 1
    return [*texts[:last], *[""] * (last - len(texts)), " ".join(texts[last:])]


def _other_order(ranks: Ranks, mine: str) -> str:
    """Returns what differs first between the workers' datasets. A collective."""
    gathered = ranks.gather(*mine.encode()[:_TEXT].ljust(_TEXT))
    texts = (bytes(map(int, row)).decode(errors="replace").strip() or "no more transformations" for row in gathered)
    return (
        "The dataset must yield the same elements in the same order on all workers, of which each trains on its share. Received: "
        f"{', '.join(f'{text} on worker:{rank}' for rank, text in enumerate(texts))}. Seeds differ if a worker has drawn a random "
        "number, or made a dataset, that the others have not: make the same calls on all workers before, or give a seed to `shuffle` "
        "and its like. If each worker has data of its own, set experimental_distribute.auto_shard_policy of the dataset's "
        "options to AutoShardPolicy.OFF."
    )
