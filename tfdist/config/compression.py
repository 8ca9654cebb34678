"""`CompressionConfig`: how gradients are compressed, and the options of each compressor. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from tfdist.config import registry
from tfdist.errors import ConfigError, describe_error, did_you_mean, format_value

_MOST = 2**31 - 1
_KINDS = {kind.__name__: kind for kind in (bool, int, float, str)}
_Range = tuple[str, Callable[[Any], bool]]


def option(default: Any, expected: str = "", holds: Callable[[Any], bool] = lambda value: True) -> Any:
    """Returns a field of a dataclass whose type and value are checked when a compressor is made.

    Args:
        default: Its default.
        expected: What it must be, for messages, as `"more than 0"`.
        holds: Whether a value of its type is that.
    """
    return dataclasses.field(default=default, metadata={"expected": expected, "holds": holds})


def _at_least(least: float) -> _Range:
    return f"{least} to {_MOST}", lambda value: least <= value <= _MOST


def _one_of(*names: str) -> _Range:
    return f"one of: {', '.join(names)}", lambda value: value in names


def option_faults(field: dataclasses.Field[Any], value: Any, where: str) -> Iterator[str]:
    """Yields what is wrong with the value of an option.

    Args:
        field: The field of the dataclass.
        value: The value.
        where: What messages call it.
    """
    kind = option_type(field)
    if kind and type(value) is not kind and not (kind is float and type(value) is int):
        yield f"{where} must be of type {kind.__name__}. Received: {format_value(value)}."
    elif field.metadata.get("expected") and not field.metadata["holds"](value):
        yield f"{where} must be {field.metadata['expected']}. Received: {format_value(value)}."


def option_type(field: dataclasses.Field[Any]) -> type | None:
    """Returns the type of an option if it is a plain one, which may be written as a text."""
    return _KINDS.get(getattr(field.type, "__name__", str(field.type)))


@dataclasses.dataclass(frozen=True)
class WrapperOptions:
    """Options of the wrappers around a compressor that a configuration names.

    Attributes:
        use_error_feedback: Whether what a step leaves out is added to the next one; of `powersgd` and `topk`; as an option of your own, too.
        warmup_steps: Updates without compression before it begins; of `topk`; as an option of your own, too.
    """

    use_error_feedback: bool = False
    warmup_steps: int = option(0, *_at_least(0))


@dataclasses.dataclass(frozen=True)
class Int8Options:
    """Options of `int8`.

    Attributes:
        block: Numbers that share a scale, of `int8`; a power of two, at least 4.
        transport: Of `int8`: `"two_shot"`, or `"sum"`, which needs one round and is less exact the more replicas there are.
    """

    block: int = option(
        256, "a power of two, 4 to 2**30", lambda block: 4 <= block <= 2**30 and not block & (block - 1)
    )
    transport: str = option("two_shot", *_one_of("two_shot", "sum"))


@dataclasses.dataclass(frozen=True)
class PowerSGDOptions:
    """Options of `powersgd`, by the names of torch's `PowerSGDState`.

    Attributes:
        matrix_approximation_rank: Columns of the two matrices of `powersgd`.
        min_compression_rate: `powersgd` leaves matrices as they are that it would not make so many times smaller.
        warm_start: Whether `powersgd` begins where the step before has ended, with state that is the same on all ranks;
            otherwise with random numbers.
        orthogonalization_epsilon: What `powersgd` adds to a column's length, of a matrix whose largest number is 1, before
            it divides by it.
        random_seed: Of the first matrices of `powersgd`.
    """

    matrix_approximation_rank: int = option(4, *_at_least(1))
    min_compression_rate: float = option(2.0, *_at_least(0))
    warm_start: bool = option(True)
    orthogonalization_epsilon: float = option(1e-8, *_at_least(0))
    random_seed: int = option(0, *_at_least(0))


@dataclasses.dataclass(frozen=True)
class PowerSGDWrapperOptions:
    """Options of the wrappers around `powersgd`.

    Attributes:
        start_powerSGD_iter: Updates without compression before `powersgd` begins.
    """

    use_error_feedback: bool = True
    start_powerSGD_iter: int = option(1000, *_at_least(0))


@dataclasses.dataclass(frozen=True)
class TopKOptions:
    """Options of `topk`.

    Attributes:
        compress_ratio: The share of each gradient's numbers that `topk` sends, at least one number.
        selection: How `topk` finds them: `"exact"`; or `"sampled"`, several times as fast: those above a threshold that is
            taken from some of the numbers, other ones at each step, and at most the share.
        samples: Numbers of each gradient that `selection="sampled"` looks at.
    """

    compress_ratio: float = option(0.01, "more than 0, and at most 1", lambda ratio: 0 < ratio <= 1)
    selection: str = option("sampled", *_one_of("sampled", "exact"))
    samples: int = option(4096, *_at_least(1))


@dataclasses.dataclass(frozen=True)
class TopKWrapperOptions(WrapperOptions):
    """Options of the wrappers around `topk`."""

    use_error_feedback: bool = True


# Compressor name to its class and the dataclasses of its options: the class's own, and of what goes around it.
COMPRESSORS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "none": ("tfdist.compression.base:NoCompression", ()),
    "bf16": ("tfdist.compression.cast:BF16", ()),
    "fp16": ("tfdist.compression.cast:FP16", ()),
    "int8": ("tfdist.compression.int8:Int8", (Int8Options,)),
    "powersgd": ("tfdist.compression.powersgd:PowerSGD", (PowerSGDOptions, PowerSGDWrapperOptions)),
    "topk": ("tfdist.compression.topk:TopK", (TopKOptions, TopKWrapperOptions)),
}


@dataclasses.dataclass
class CompressionConfig:
    """The compression of gradients on their way to the other replicas; options that the compressor does not take must keep their defaults.

    Attributes:
        name: One of `COMPRESSORS`, an installed one, or your own compressor as `package.module:Class`.
        options: Options of the compressor, by name. Those of older compressors are fields here, too; an option counts more.
    """

    name: str = "none"
    block: int = Int8Options.block
    transport: str = Int8Options.transport
    matrix_approximation_rank: int = PowerSGDOptions.matrix_approximation_rank
    start_powerSGD_iter: int = PowerSGDWrapperOptions.start_powerSGD_iter
    min_compression_rate: float = PowerSGDOptions.min_compression_rate
    use_error_feedback: bool = PowerSGDWrapperOptions.use_error_feedback
    warm_start: bool = PowerSGDOptions.warm_start
    orthogonalization_epsilon: float = PowerSGDOptions.orthogonalization_epsilon
    random_seed: int = PowerSGDOptions.random_seed
    compress_ratio: float = TopKOptions.compress_ratio
    selection: str = TopKOptions.selection
    samples: int = TopKOptions.samples
    warmup_steps: int = TopKWrapperOptions.warmup_steps
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    # Their docstrings explain the fields in `--help`.
    documented_by: ClassVar = (WrapperOptions, *(kind for _, kinds in COMPRESSORS.values() for kind in kinds))

    def compressor_class(self) -> Any:
        """Returns its compressor's class, imported.

        Raises:
            ConfigError: There is no such class, or it is no compressor.
        """
        found = registry.resolve("compression", self.name, {name: path for name, (path, _) in COMPRESSORS.items()})
        if not (isinstance(found, type) and dataclasses.is_dataclass(found) and hasattr(found, "exchange")):
            raise ConfigError(f"compression {self.name!r} is no subclass of tfdist.compression.Compressor.")
        return found

    def option_fields(self) -> dict[str, dataclasses.Field[Any]]:
        """Returns the fields of its options, by name; imports the user's own compressor.

        Raises:
            ConfigError: There is no such compressor.
        """
        known = COMPRESSORS.get(self.name)
        kinds = known[1] if known else (WrapperOptions, self.compressor_class())
        return {field.name: field for kind in kinds for field in dataclasses.fields(kind) if field.init}

    def arguments(self) -> dict[str, Any]:
        """Returns the value of each option: of `options`, of a field here, or the default."""
        fields = self.option_fields()
        defaults = {name: field.default for name, field in fields.items() if field.default is not dataclasses.MISSING}
        return defaults | {name: value for name, value in self._changed().items() if name in fields} | self.options

    def _changed(self) -> dict[str, Any]:
        """Returns the values of fields that hold a built-in compressor's option and differ from the default."""
        fields = [field for field in dataclasses.fields(self) if field.name not in ("name", "options")]
        return {field.name: value for field in fields if (value := getattr(self, field.name)) != field.default}

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the name and the options."""
        try:
            fields = self.option_fields()
        except ConfigError as e:
            yield from e.faults
            return
        if not isinstance(self.options, dict):
            yield f"compression.options must be a dict of names and values. Received: {format_value(self.options)}."
            return
        own = self.name not in COMPRESSORS
        takes = f"It takes{' compression.options' * own}: {', '.join(fields)}." if fields else "It takes no arguments."
        wrong = [name for name in self._changed() if own or name not in fields]
        for name in [*wrong, *(name for name in self.options if name not in fields)]:
            yield f"compression {self.name!r} takes no {name!r}{did_you_mean(name, fields)} {takes}"
        given = {name: value for name, value in self.arguments().items() if name in fields}
        faults: list[str] = []
        try:
            for name, value in given.items():
                where = "compression.options" if name in self.options else "compression"
                faults += option_faults(fields[name], value, f"{where}.{name}")
            if own and not faults:
                made = self.compressor_class()
                made(**{field.name: given[field.name] for field in dataclasses.fields(made) if field.name in given})
        except Exception as e:  # of the user's own compressor
            faults = [f"compression {self.name!r} cannot be made: {describe_error(e)}"]
        yield from faults
