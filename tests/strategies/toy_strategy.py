"""A strategy outside of the package, as a user writes one: `--config.strategy.name=tests.strategies.toy_strategy:make`."""

from __future__ import annotations

from tfdist.config import StrategyTraits


def make(config, *_):
    """Returns a strategy with two replicas, whatever the configuration says. Loads TensorFlow here, and not before."""
    import tensorflow as tf

    from tfdist.strategies.base import KerasStrategy

    class Toy(KerasStrategy, tf.distribute.MirroredStrategy):
        """Two replicas, on two virtual CPUs."""

    return Toy(["CPU:0", "CPU:1"])


make.traits = StrategyTraits(compresses=True, refuses={"jit_compile": "which is a toy; leave it out"})


def make_without_traits(config, *_):
    """Returns the same strategy, of which nothing is said."""
    return make(config)


def make_nothing(config, *_):
    """Returns what is no strategy of tfdist."""
    import tensorflow as tf

    return tf.distribute.OneDeviceStrategy("CPU:0")


def make_untyped(config, *_):
    """Has traits of another type."""


make_untyped.traits = {"compresses": True}
