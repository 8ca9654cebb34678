"""`CompressionConfig`: how gradients are compressed. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.errors import unknown_name_message

# Compressor name to its class and the arguments that it takes.
COMPRESSORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "none": ("tfdist.compression.base:NoCompression", ()),
    "bf16": ("tfdist.compression.cast:BF16", ()),
    "fp16": ("tfdist.compression.cast:FP16", ()),
    "int8": ("tfdist.compression.int8:Int8", ("block", "transport")),
    "powersgd": (
        "tfdist.compression.powersgd:PowerSGD",
        (
            "matrix_approximation_rank",
            "start_powerSGD_iter",
            "min_compression_rate",
            "use_error_feedback",
            "warm_start",
            "orthogonalization_epsilon",
            "random_seed",
        ),
    ),
    "topk": (
        "tfdist.compression.topk:TopK",
        ("compress_ratio", "selection", "samples", "use_error_feedback", "warmup_steps"),
    ),
}
_CHOICES = {"transport": ("two_shot", "sum"), "selection": ("sampled", "exact")}


@dataclasses.dataclass
class CompressionConfig:
    """How gradients are compressed on their way to the other replicas; what the compressor does not take must stay as it is.

    Attributes:
        name: One of `COMPRESSORS`.
        block: Numbers that share a scale, of `int8`; a power of two, at least 4.
        transport: Of `int8`: `"two_shot"`, or `"sum"`, which needs one round and is less exact the more replicas there are.
        matrix_approximation_rank: Columns of the two matrices of `powersgd`.
        start_powerSGD_iter: Updates without compression before `powersgd` begins.
        min_compression_rate: `powersgd` leaves matrices as they are that it would not make so many times smaller.
        use_error_feedback: Whether `powersgd` and `topk` add what a step leaves out to the next one.
        warm_start: Whether `powersgd` begins where the step before has ended.
        orthogonalization_epsilon: What `powersgd` adds to a column's length before it divides by it.
        random_seed: Of the first matrices of `powersgd`.
        compress_ratio: The share of each gradient's numbers that `topk` sends.
        selection: How `topk` finds them: `"sampled"` or `"exact"`.
        samples: Numbers of each gradient that `selection="sampled"` looks at.
        warmup_steps: Updates without compression before `topk` begins.
    """

    name: str = "none"
    block: int = 256
    transport: str = "two_shot"
    matrix_approximation_rank: int = 4
    start_powerSGD_iter: int = 1000
    min_compression_rate: float = 2.0
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = 1e-8
    random_seed: int = 0
    compress_ratio: float = 0.01
    selection: str = "sampled"
    samples: int = 4096
    warmup_steps: int = 0

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments that its compressor takes."""
        return {name: getattr(self, name) for name in COMPRESSORS[self.name][1]}

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the name and the arguments."""
        if self.name not in COMPRESSORS:
            yield unknown_name_message("compression", self.name, tuple(COMPRESSORS))
            return
        takes = COMPRESSORS[self.name][1]
        for field in dataclasses.fields(self):
            if field.name not in ("name", *takes) and getattr(self, field.name) != field.default:
                takes_what = f"It takes: {', '.join(takes)}." if takes else "It takes no arguments."
                yield f"compression {self.name!r} takes no {field.name!r}. {takes_what}"
        given = {name: value for name, value in vars(self).items() if name != "name"}
        yield from (f"compression.{fault}" for fault in argument_faults(given))


def argument_faults(given: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with compressors' arguments, by name; those of other names are not looked at."""
    fields: dict[str, Any] = {
        field.name: field.default for field in dataclasses.fields(CompressionConfig) if field.name != "name"
    }
    fields["steps"] = 0
    least = {"matrix_approximation_rank": 1, "samples": 1}
    for name in fields.keys() & given.keys():
        value, kind = given[name], type(fields[name])
        if type(value) is not kind and not (kind is float and type(value) is int):
            yield f"{name} must be of type {kind.__name__}. Received: {value!r}."
        elif name == "block":
            if value < 4 or value & (value - 1):
                yield f"block must be a power of two, and at least 4. Received: {value}."
        elif name == "compress_ratio":
            if not 0 < value <= 1:
                yield f"compress_ratio must be more than 0, and at most 1. Received: {value}."
        elif name in _CHOICES:
            if value not in _CHOICES[name]:
                yield f"{name} must be one of: {', '.join(_CHOICES[name])}. Received: {value!r}."
        elif not least.get(name, 0) <= value < float("inf"):
            yield f"{name} must be {least.get(name, 0)} or more, and finite. Received: {value}."
