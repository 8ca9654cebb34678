"""The traits of strategies: one row for each, so that no other file tests a strategy's name or class. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Literal

from tfdist.config import registry
from tfdist.errors import ConfigError, format_value


@dataclasses.dataclass(frozen=True)
class StrategyTraits:
    """The traits of a strategy. The defaults describe a strategy of one process with a copy of the variables on each device.

    Attributes:
        factory: The function that creates the strategy, `package.module:function`, imported on first use; for rows of `STRATEGIES`.
        engine: The class `Engine(strategy, compressor)` that trains under the strategy, as `package.module:Class`.
        tensorflow: The name of TensorFlow's class, by which `traits_of` recognizes strategies that `create_strategy` did not create.
        several_processes: Whether the replicas are in several processes, the workers of a cluster, which train synchronously.
        asynchronous: Whether variables are on parameter servers, and each step runs on one worker.
        shared_variables: Whether all replicas use one copy of the variables; true with one replica, too.
        compresses: Whether tfdist's collectives sum the gradients, so that they can be compressed.
        gathers: Whether a replica can gather the others' tensors during a step.
        devices: The meaning of `strategy.devices`: `"each"`, every named device has a replica; `"one"`, one device may be named;
            `"none"`, the field must be empty; `"own"`, only the factory can validate the value, such as an address.
        refuses: Features that a model or a configuration cannot use under a strategy of your own (keys of `FEATURES` in `relations.py`, such
            as `"jit_compile"`), mapped to the end of the error, which has the reason and the remedy. Those of `STRATEGIES` are in the table.

    Examples:
        >>> from tfdist.config import STRATEGIES
        >>> STRATEGIES["multi_worker_mirrored"].several_processes
        True
    """

    factory: str = ""
    engine: str = "tfdist.step.synchronous_engine:SynchronousEngine"
    tensorflow: str = ""
    several_processes: bool = False
    asynchronous: bool = False
    shared_variables: bool = False
    compresses: bool = False
    gathers: bool = True
    devices: Literal["each", "one", "none", "own"] = "each"
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def mirrors(self) -> bool:
        """True if tfdist's collectives sum gradients for copies of the variables, one on each device."""
        return self.compresses and not self.shared_variables

    @property
    def mirrors_in_process(self) -> bool:
        """True if `mirrors`, and all copies are in this process."""
        return self.mirrors and not self.several_processes


STRATEGIES: Mapping[str, StrategyTraits] = {
    "one_device": StrategyTraits(
        factory="tfdist.strategies.single_process:one_device",
        tensorflow="OneDeviceStrategy",
        shared_variables=True,
        compresses=True,
        devices="one",
    ),
    "mirrored": StrategyTraits(
        factory="tfdist.strategies.single_process:mirrored",
        tensorflow="MirroredStrategy",
        compresses=True,
    ),
    "multi_worker_mirrored": StrategyTraits(
        factory="tfdist.strategies.multi_worker:multi_worker_mirrored",
        tensorflow="CollectiveAllReduceStrategy",
        several_processes=True,
        compresses=True,
    ),
    "parameter_server": StrategyTraits(
        factory="tfdist.parameter_server.strategy:parameter_server",
        engine="tfdist.parameter_server.engine:ParameterServerEngine",
        tensorflow="ParameterServerStrategyV2",
        asynchronous=True,
        shared_variables=True,
        devices="none",
    ),
    "central_storage": StrategyTraits(
        factory="tfdist.strategies.single_process:central_storage",
        tensorflow="CentralStorageStrategy",
        shared_variables=True,
    ),
    "tpu": StrategyTraits(
        factory="tfdist.strategies.tpu:tpu",
        tensorflow="TPUStrategyV2",
        gathers=False,
        devices="own",
    ),
}


_FACTORY_ARGUMENTS = ("config", "cluster", "start_timeout", "grace_seconds")


def find_traits(name: str) -> StrategyTraits:
    """Returns the traits of a strategy.

    Args:
        name: The strategy's name, or a custom factory as `package.module:function`, whose attribute `traits` overrides
            the defaults.

    Raises:
        ConfigError: The strategy does not exist, its module cannot be imported, or it is no factory.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    factory = registry.resolve("strategy", name, {})
    try:
        inspect.signature(factory).bind(*_FACTORY_ARGUMENTS)
    except ValueError:  # a function outside of Python may have no signature
        pass
    except TypeError as e:
        raise ConfigError(
            f"strategy {name!r} must be a factory: a function of {', '.join(_FACTORY_ARGUMENTS)}, which returns a strategy. "
            f"Received: {format_value(factory)} ({e})."
        ) from None
    traits = getattr(factory, "traits", StrategyTraits())
    if not isinstance(traits, StrategyTraits):
        raise ConfigError(f"The traits of strategy {name!r} must be StrategyTraits. Received: {format_value(traits)}.")
    return traits


def traits_of(strategy: object) -> StrategyTraits:
    """Returns the traits of a strategy object, which may also be one of TensorFlow's own or its default strategy."""
    own_traits: StrategyTraits | None = getattr(strategy, "traits", None)
    if own_traits is not None:
        return own_traits
    names = {cls.__name__ for cls in type(strategy).__mro__}
    return next((traits for traits in STRATEGIES.values() if traits.tensorflow in names), StrategyTraits())
