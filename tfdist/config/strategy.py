"""`StrategyConfig`: which strategy, on which devices. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from tfdist.config.ranges import MOST_SECONDS, Range
from tfdist.config.strategy_traits import STRATEGIES, StrategyTraits, find_traits
from tfdist.errors import ConfigError, format_value, truncate, unknown_name_message

PLACEMENTS = ("round_robin", "by_bytes")
TENSORFLOW_TRANSPORTS = ("auto", "grpc", "nccl")
TRANSPORTS = (*TENSORFLOW_TRANSPORTS, "gloo", "mpi", "shared_memory")


MAX_VIRTUAL_CPUS = 256


_DEVICE = re.compile(
    r"(/job:localhost(/replica:0)?(/task:0)?/device:|/device:|/)?(CPU|GPU|TPU)(:[0-9]+)?", re.IGNORECASE
)


@dataclasses.dataclass
class StrategyConfig:
    """The `tf.distribute` strategy, and its devices.

    Attributes:
        name: One of `STRATEGIES`, or your own factory as `"package.module:function"` (see docs/extending.md).
        devices: Device names, as `"GPU:0,GPU:1"` or a list of them, or a number of virtual CPUs of this process.
            Empty means all GPUs, or the CPU. For `tpu` it is the TPU's name or address.
        transport: How gradients travel between the workers of `multi_worker_mirrored`: by TensorFlow's `"grpc"` or `"nccl"` (GPUs),
            by `"gloo"` (CPUs, with PyTorch), by `"mpi"` (CPUs, workers that mpirun or srun has started), or by `"shared_memory"`
            (CPUs, workers of one host). `"auto"` takes one that fits (docs/transports.md). Under `mirrored`: `"nccl"`, or `"grpc"`, by one device.
        bucket_bytes: `multi_worker_mirrored` sums gradients in buckets of so many bytes, which travel while backward computes
            the others; 0 means one sum of all. `bf16`, `fp16` and `int8` cut larger gradients; `powersgd` and `topk`, which
            need a gradient whole, count its bytes as they send them.
        gather_loss_bytes: A loss that returns one number for a batch (a function's, Dice) is given the labels, predictions and
            weights of all replicas, so that it equals one process; but not where one example has more bytes of
            them than this: then each replica computes it of its part, the mean is trained, with a warning. The
            default takes in masks of 256 x 256 pixels, of which a batch of 32 is as much as the gradients of 4 million
            weights; not the 60 MB that a language model predicts for a sentence. An unknown dimension counts as 1.
        placement: Which server of `parameter_server` gets the next variable: `"round_robin"`, the next one, or
            `"by_bytes"`, the one with the fewest bytes.
        timeout_seconds: End a collective that takes longer than this many seconds with an error; 0 means no limit.

    Examples:
        >>> import tfdist
        >>> tfdist.StrategyConfig("mirrored", devices=2).name
        'mirrored'
    """

    name: str = "one_device"
    devices: str = ""
    transport: str = "auto"
    bucket_bytes: int = 4_000_000
    gather_loss_bytes: int = 1_000_000
    timeout_seconds: float = 0.0
    placement: str = "round_robin"

    def __post_init__(self) -> None:
        if isinstance(self.devices, (list, tuple)):
            self.devices = ",".join(map(str, self.devices))
        self.devices = "" if self.devices is None else str(self.devices)

    @property
    def traits(self) -> StrategyTraits:
        """The strategy's traits. Raises ConfigError as `find_traits`."""
        return find_traits(self.name)

    @property
    def virtual_cpus(self) -> int:
        """The number of virtual CPUs asked for, or 0."""
        # Cut, because Python refuses to convert thousands of digits.
        return min(int(self.devices[:9]), MAX_VIRTUAL_CPUS + 1) if self.devices.isdecimal() else 0

    @property
    def device_names(self) -> list[str]:
        """The names of the devices to use; empty means TensorFlow's choice."""
        if self.virtual_cpus:
            return [f"CPU:{i}" for i in range(self.virtual_cpus)]
        return [name.strip() for name in self.devices.split(",") if name.strip()]

    def faults(self) -> Iterator[str]:
        """Yields the errors in the strategy and its options."""
        if self.name not in STRATEGIES and ":" not in self.name:
            yield unknown_name_message("strategy", self.name, STRATEGIES)
            return
        try:
            devices = self.traits.devices
        except ConfigError as e:
            yield from e.faults
            return
        if self.transport not in TRANSPORTS:
            yield unknown_name_message("strategy.transport", self.transport, TRANSPORTS)
        elif (
            self.transport not in TENSORFLOW_TRANSPORTS
            and self.name in STRATEGIES
            and not self.traits.several_processes
        ):
            yield f"strategy.transport={self.transport} is for multi_worker_mirrored. Received: strategy {self.name}; leave it out."
        if self.placement not in PLACEMENTS:
            yield unknown_name_message("strategy.placement", self.placement, PLACEMENTS)
        for name, most in {"bucket_bytes": 2**40, "gather_loss_bytes": 2**40, "timeout_seconds": MOST_SECONDS}.items():
            yield from Range(0, most, off=True).faults(f"strategy.{name}", getattr(self, name))
        if self.devices.isdecimal() and not 1 <= self.virtual_cpus <= MAX_VIRTUAL_CPUS:
            yield f"strategy.devices must be 1 to {MAX_VIRTUAL_CPUS} virtual CPUs, or device names. Received: {truncate(self.devices)}."
        elif self.devices and not self.virtual_cpus and devices != "own":
            names = [name.upper() for name in self.device_names]
            if not names:
                yield f"strategy.devices names no device; leave it empty for all GPUs, or the CPU. Received: {format_value(self.devices)}."
            if strange := [name for name in names if not _DEVICE.fullmatch(name)]:
                yield f"strategy.devices must be names such as GPU:0, or a number of virtual CPUs. Received: {format_value(strange[0])}."
            elif len(set(names)) < len(names):
                yield f"strategy.devices names a device twice. Received: {format_value(self.devices)}."
        if devices == "none" and self.devices:
            yield (
                f"strategy.devices does not apply to {self.name}, which uses all GPUs it sees, or the CPU; "
                f"choose GPUs with CUDA_VISIBLE_DEVICES. Received: {format_value(self.devices)}."
            )
        if devices == "one" and len(self.device_names) > 1:
            yield f"strategy {self.name} takes one device. Received: {format_value(self.devices)}; use strategy.name=mirrored for several."
