"""`CompressionConfig`: the compression of gradients, and the options of each compressor. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from tfdist.config import registry, walk
from tfdist.config.constraints import at_least, one_of, option
from tfdist.config.options import NamedOptions
from tfdist.errors import ConfigError, describe_error


@dataclasses.dataclass(frozen=True)
class WrapperOptions:
    """Options of the wrappers around a compressor that a configuration names.

    Attributes:
        use_error_feedback: Whether a step's residual is added to the next step's gradient; for `powersgd`, `topk` and custom compressors.
        warmup_steps: Updates without compression at the begin of the training; for `topk` and custom compressors.
    """

    use_error_feedback: bool = False
    warmup_steps: int = option(0, *at_least(0))


@dataclasses.dataclass(frozen=True)
class Int8Options:
    """Options of `int8`.

    Attributes:
        block: Number of values that share a scale in `int8`; a power of two, at least 4.
        transport: The algorithm of `int8`: `"two_shot"`, or `"sum"`, which needs one round and loses accuracy with more replicas.
    """

    block: int = option(
        256, "a power of two, 4 to 2**30", lambda block: 4 <= block <= 2**30 and not block & (block - 1)
    )
    transport: str = option("two_shot", *one_of("two_shot", "sum"))


@dataclasses.dataclass(frozen=True)
class PowerSGDOptions:
    """Options of `powersgd`, with the names of torch's `PowerSGDState`.

    Attributes:
        matrix_approximation_rank: Columns of the two matrices of `powersgd`.
        min_compression_rate: Minimum compression ratio of `powersgd`; it sends a matrix that would shrink less uncompressed.
        warm_start: Whether `powersgd` starts from the previous step's matrices, which are state that is equal on all ranks;
            otherwise it starts from random matrices.
        orthogonalization_epsilon: Added to each column's length before the division by it, in matrices scaled to a largest
            value of 1.
        random_seed: Seed of the first matrices of `powersgd`.
    """

    matrix_approximation_rank: int = option(4, *at_least(1))
    min_compression_rate: float = option(2.0, *at_least(0))
    warm_start: bool = option(True)
    orthogonalization_epsilon: float = option(1e-8, *at_least(0))
    random_seed: int = option(0, *at_least(0))


@dataclasses.dataclass(frozen=True)
class PowerSGDWrapperOptions:
    """Options of the wrappers around `powersgd`.

    Attributes:
        start_powerSGD_iter: Updates without compression before `powersgd` begins.
    """

    use_error_feedback: bool = True
    start_powerSGD_iter: int = option(1000, *at_least(0))


@dataclasses.dataclass(frozen=True)
class TopKOptions:
    """Options of `topk`.

    Attributes:
        compress_ratio: The share of each gradient's values that `topk` sends, at least one value.
        selection: How `topk` selects the largest values: `"exact"`, or `"sampled"`, which is several times as fast. It sends
            values above a threshold, at most the share, and estimates the threshold from a different sample at each step.
        samples: Number of each gradient's values in the sample of `selection="sampled"`.
    """

    compress_ratio: float = option(0.01, "more than 0, and at most 1", lambda ratio: 0 < ratio <= 1)
    selection: str = option("sampled", *one_of("sampled", "exact"))
    samples: int = option(4096, *at_least(1))


@dataclasses.dataclass(frozen=True)
class TopKWrapperOptions(WrapperOptions):
    """Options of the wrappers around `topk`."""

    use_error_feedback: bool = True


# Compressor name to its class and the dataclasses of its options: those of the class, and those of its wrappers.
COMPRESSORS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "none": ("tfdist.compression.base:NoCompression", ()),
    "bf16": ("tfdist.compression.cast:BF16", ()),
    "fp16": ("tfdist.compression.cast:FP16", ()),
    "int8": ("tfdist.compression.int8:Int8", (Int8Options,)),
    "powersgd": ("tfdist.compression.powersgd:PowerSGD", (PowerSGDOptions, PowerSGDWrapperOptions)),
    "topk": ("tfdist.compression.topk:TopK", (TopKOptions, TopKWrapperOptions)),
}


@dataclasses.dataclass(init=False, repr=False, eq=False)
class CompressionConfig(NamedOptions):
    """The compression of gradients between replicas, as `CompressionConfig("powersgd", matrix_approximation_rank=2)`.

    Attributes:
        name: A name in `COMPRESSORS` or of an installed compressor, or your own as `package.module:Class`.

    Examples:
        >>> import tfdist
        >>> tfdist.CompressionConfig("powersgd", matrix_approximation_rank=2).matrix_approximation_rank
        2
    """

    WHAT: ClassVar = "compression"
    BUILT_IN: ClassVar = COMPRESSORS
    DOCUMENTED_BY: ClassVar = (
        WrapperOptions,
        *(kind for _, kinds in COMPRESSORS.values() for kind in kinds),
    )

    name: str = "none"

    def compressor_class(self) -> Any:
        """Imports and returns the compressor's class.

        Raises:
            ConfigError: The class does not exist, or is not a compressor.
        """
        compressor = registry.resolve("compression", self.name, {name: path for name, (path, _) in COMPRESSORS.items()})
        if not (
            isinstance(compressor, type) and dataclasses.is_dataclass(compressor) and hasattr(compressor, "exchange")
        ):
            raise ConfigError(f"compression {self.name!r} is not a subclass of tfdist.compression.Compressor.")
        return compressor

    def option_fields(self) -> dict[str, dataclasses.Field[Any]]:
        """Returns the fields of the compressor's options, by name; imports a custom compressor.

        Raises:
            ConfigError: The compressor does not exist.
        """
        if self.name in COMPRESSORS:
            _, kinds = COMPRESSORS[self.name]
        else:
            kinds = (WrapperOptions, self.compressor_class())
        return {field.name: field for kind in kinds for field in dataclasses.fields(kind) if field.init}

    def faults(self) -> Iterator[str]:
        """Yields the errors in the name, and of a custom compressor that cannot be created."""
        faults: list[str] = []
        try:
            self.option_fields()
            if self.name not in COMPRESSORS and not any(walk.faults(self)):
                cls, options = self.compressor_class(), self.all_options()
                cls(**{field.name: options[field.name] for field in dataclasses.fields(cls) if field.name in options})
        except ConfigError as e:
            faults = list(e.faults)
        except Exception as e:  # raised by a custom compressor
            faults = [f"compression {self.name!r} cannot be made: {describe_error(e)}"]
        yield from faults
