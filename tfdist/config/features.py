"""The table of features, and a strategy's own: one row for each, so that no other file names them. No TensorFlow here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist.config import registry
from tfdist.errors import ConfigError, format_value
from tfdist.feature import Feature

# In the order in which they are attached; around a step the first is the outermost.
FEATURES: Mapping[str, str] = {
    "synchronized_norm": "tfdist.step.synchronized_norm:SynchronizedNorm",
    "gradient_sums": "tfdist.gradients.optimizer:GradientSums",
    "model_parallel": "tfdist.gradients.laid_out_update:ModelParallel",
    "row_updates": "tfdist.gradients.row_updates:RowUpdates",
    "shard_optimizer": "tfdist.gradients.split_optimizer:SplitOptimizer",
    "sync_every": "tfdist.gradients.local_steps:LocalTraining",
    "batch_shares": "tfdist.step.share_selection:SharesBySpeed",
    "declared_weights": "tfdist.replicas.declared_weights:CombinedWeights",
    "nan_policy": "tfdist.step.finite_steps:FiniteSteps",
}


def make(strategy: Any) -> tuple[Feature, ...]:
    """Returns the features that a strategy's options ask for, and those that they name, in order; none for workers that are not in step.

    Raises:
        ConfigError: A named feature does not exist, or is none.
    """
    features: list[Feature] = []
    if strategy.traits.asynchronous:
        return ()
    for name in (*FEATURES, *strategy.config.own_features):
        kind = registry.resolve("feature", name, FEATURES)
        if not (isinstance(kind, type) and issubclass(kind, Feature)):
            raise ConfigError(
                f"strategy.features must name subclasses of tfdist.Feature. Received: {name!r}, which is {format_value(kind)}."
            )
        if kind.asks(strategy):
            feature = kind(strategy)
            feature.name = name
            features.append(feature)
    return tuple(_in_order(features))


def _in_order(features: list[Feature]) -> list[Feature]:
    """Returns features so that each follows those in its `after`, and otherwise as they are given."""
    ordered: list[Feature] = []
    pending = list(features)
    while pending:
        waiting = {feature.name for feature in pending}
        free = next((each for each in pending if waiting.isdisjoint(each.after)), None)
        if free is None:
            raise ConfigError(
                f"The features {', '.join(sorted(waiting))} each come after another one: change their `after`."
            )
        pending.remove(free)
        ordered.append(free)
    return ordered
