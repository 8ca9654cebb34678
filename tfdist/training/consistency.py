"""What all workers must give to `fit` alike: found before training, as it would end amid it, or train some examples twice."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.ranks import Ranks
from tfdist.compat import tf_internals
from tfdist.errors import ConfigError

_NUMBERS = ("epochs", "initial_epoch", "steps_per_epoch", "batch_size", "validation_steps", "validation_batch_size")
_NONE = -1.0
_SHUFFLED = (
    "The dataset is shuffled with other seeds on some workers, which would train on other examples than their shares: a worker has "
    "drawn a random number, or made a dataset, that the others have not. Let all workers make the same calls before `shuffle`, or "
    "give `shuffle` a seed."
)


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
    gathered = ranks.gather(*mine.values(), *map(_order, (data, validation)))
    unlike = [len(set(column)) > 1 for column in gathered.T]
    faults = [
        f"{name} must be the same on all workers of a fit. Received: {_listed(column)}."
        for name, column, differs in zip(mine, gathered.T, unlike, strict=False)
        if differs
    ]
    if not faults and any(unlike):
        faults = [_SHUFFLED]
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


def _order(data: Any) -> float:
    """Returns a checksum of how a dataset is shuffled; 0 where it is not, or where workers have datasets of their own."""
    if not isinstance(data, tf.data.Dataset):
        return 0.0
    policy = data.options().experimental_distribute.auto_shard_policy
    if policy == tf.data.experimental.AutoShardPolicy.OFF:
        return 0.0
    return float(zlib.crc32(repr(list(_seeds(data))).encode()))


def _seeds(dataset: tf.data.Dataset) -> Iterator[list[int]]:
    if (seeds := tf_internals.shuffle_seeds(dataset)) is not None:
        yield seeds
    for each in tf_internals.inputs(dataset):
        yield from _seeds(each)
