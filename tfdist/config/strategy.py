"""`StrategyConfig`: the strategy and its devices. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator

from tfdist.config.ranges import MOST_SECONDS, MOST_TASKS, Range
from tfdist.config.strategy_traits import STRATEGIES, StrategyTraits, find_traits
from tfdist.errors import ConfigError, format_value, truncate, unknown_name_message
from tfdist.runtime import progress

PLACEMENTS = ("round_robin", "by_bytes")
TENSORFLOW_TRANSPORTS = ("auto", "grpc", "nccl")
TRANSPORTS = (*TENSORFLOW_TRANSPORTS, "gloo", "mpi", "shared_memory")


MAX_VIRTUAL_CPUS = 256
_MOST_SHOWN = 8  # numbers of workers in a message
_MOST_REPLICAS = Range(0, MAX_VIRTUAL_CPUS * MOST_TASKS, off=True)


_DEVICE = re.compile(
    r"(/job:localhost(/replica:0)?(/task:0)?/device:|/device:|/)?(CPU|GPU|TPU)(:[0-9]+)?", re.IGNORECASE
)


@dataclasses.dataclass
class StrategyConfig:
    """The `tf.distribute` strategy, and its devices.

    Attributes:
        name: A name in `STRATEGIES`, or your own factory as `"package.module:function"` (see docs/extending.md).
        devices: Device names, as `"GPU:0,GPU:1"` or a list of names, or a number of virtual CPUs of this process.
            Empty means all GPUs, or the CPU. For `tpu`, the TPU's name or address.
        replicas: The replicas of all workers together, instead of `devices`: each of the workers of `multi_worker_mirrored`, or the one
            process of `mirrored`, gets an equal number of virtual CPUs, or uses as many of its GPUs. The run then continues with
            the same bits on another number of workers. 0 means `devices`; if that is empty, too, the environment variable
            TFDIST_REPLICAS, which applies to CPUs only.
        transport: The transport of gradients between the workers of `multi_worker_mirrored`: TensorFlow's `"grpc"` or `"nccl"` (GPUs),
            `"gloo"` (CPUs, with PyTorch), `"mpi"` (CPUs, workers that mpirun or srun has started), or `"shared_memory"` (CPUs,
            workers of one host). `"auto"` selects one (docs/transports.md). Under `mirrored`: `"nccl"`, or `"grpc"`, which sums on one device.
        bucket_bytes: Size of the buckets in which `multi_worker_mirrored` sums gradients while the backward pass computes further
            gradients; 0 means one sum of all gradients. `bf16`, `fp16` and `int8` split larger gradients; `powersgd` and `topk`
            need complete gradients, and count compressed bytes.
        gather_loss_bytes: A loss that returns one number per batch (a function's, Dice) gets the labels, predictions and weights
            of all replicas, so that it equals the loss of one process. If one example has more than this many bytes of
            these tensors, each replica computes the loss of its own examples; their mean is trained, with a warning. The
            default admits masks of 256 x 256 pixels: a batch of 32 is as large as the gradients of 4 million weights. It
            excludes the 60 MB that a language model predicts for a sentence. An unknown dimension counts as 1.
        placement: The server of `parameter_server` that gets the next variable: `"round_robin"`, the next server, or
            `"by_bytes"`, the server with the fewest bytes.
        timeout_seconds: Seconds that tasks wait for a task that is slow. They name it, with its line, in a warning after 60 s (or 5 times the
            longest step). At the limit the job ends or restarts as after a loss; earlier, after a third of the limit, if the task neither
            computes nor reads nor writes files. The building of a model, a first execution, saving and evaluating have 10 times the
            limit, and sections of `tfdist.slow` their own. None means 1,800 s under a Trainer, and no limit without one; 0 means no limit.

    Examples:
        >>> import tfdist
        >>> tfdist.StrategyConfig("mirrored", devices=2).name
        'mirrored'
    """

    name: str = "one_device"
    devices: str = ""
    replicas: int = 0
    transport: str = "auto"
    bucket_bytes: int = 4_000_000
    gather_loss_bytes: int = 1_000_000
    timeout_seconds: float | None = None
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
        """The requested number of virtual CPUs, or 0."""
        # Limit the digits, because Python raises an error for thousands of them.
        return min(int(self.devices[:9]), MAX_VIRTUAL_CPUS + 1) if self.devices.isdecimal() else 0

    @property
    def device_names(self) -> list[str]:
        """The names of the devices to use; empty means TensorFlow's choice."""
        if self.virtual_cpus:
            return [f"CPU:{i}" for i in range(self.virtual_cpus)]
        return [name.strip() for name in self.devices.split(",") if name.strip()]

    def on_workers(self, workers: int, gpus: int = 0) -> StrategyConfig:
        """Returns this configuration with `devices` in place of `replicas`, or of the environment variable `TFDIST_REPLICAS`.

        Args:
            workers: The number of workers. A strategy of one process has one.
            gpus: The number of GPUs of this process. With GPUs the environment variable has no effect.

        Raises:
            ConfigError: The workers do not divide the replicas, or a worker has too few GPUs.
        """
        workers = workers if self.traits.several_processes else 1
        field, replicas = "strategy.replicas", self.replicas
        if not replicas and not self.devices and not gpus and self.traits.mirrors:
            field, replicas = progress.REPLICAS, _replicas_of_environment()
        if not replicas:
            return self
        if faults := list(_replicas_faults(field, replicas, workers, gpus)):
            raise ConfigError(faults)
        own = replicas // workers
        devices = ",".join(f"GPU:{i}" for i in range(own)) if gpus else str(own)
        return dataclasses.replace(self, devices=devices, replicas=0)

    def replicas_faults(self, workers: int) -> Iterator[str]:
        """Yields the error of a number of `replicas` that a number of workers cannot share."""
        if self.replicas > 0:
            workers = workers if self.traits.several_processes else 1
            yield from _replicas_faults("strategy.replicas", self.replicas, workers)

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
            if getattr(self, name) is not None:
                yield from Range(0, most, off=True).faults(f"strategy.{name}", getattr(self, name))
        if self.devices.isdecimal() and not 1 <= self.virtual_cpus <= MAX_VIRTUAL_CPUS:
            yield f"strategy.devices must be 1 to {MAX_VIRTUAL_CPUS} virtual CPUs, or device names. Received: {truncate(self.devices)}."
        elif self.devices and not self.virtual_cpus and devices != "own":
            names = [name.upper() for name in self.device_names]
            if not names:
                yield f"strategy.devices names no device; leave it empty for all GPUs, or the CPU. Received: {format_value(self.devices)}."
            if invalid := [name for name in names if not _DEVICE.fullmatch(name)]:
                yield f"strategy.devices must be names such as GPU:0, or a number of virtual CPUs. Received: {format_value(invalid[0])}."
            elif len(set(names)) < len(names):
                yield f"strategy.devices names a device twice. Received: {format_value(self.devices)}."
        if devices == "none" and self.devices:
            yield (
                f"strategy.devices does not apply to {self.name}, which uses all GPUs it sees, or the CPU; "
                f"choose GPUs with CUDA_VISIBLE_DEVICES. Received: {format_value(self.devices)}."
            )
        if self.replicas not in _MOST_REPLICAS:
            yield from _MOST_REPLICAS.faults("strategy.replicas", self.replicas)
        elif self.replicas and not self.traits.mirrors:
            yield (
                f"strategy.replicas does not apply to {self.name}, which has no number of replicas to share among workers; use "
                f"strategy.name=mirrored or multi_worker_mirrored, or leave it at 0. Received: {self.replicas}."
            )
        elif self.replicas and self.devices:
            yield (
                "strategy.replicas and strategy.devices both set the devices of a worker; leave one of them out. "
                f"Received: {self.replicas} and {format_value(self.devices)}."
            )
        if devices == "one" and len(self.device_names) > 1:
            yield f"strategy {self.name} takes one device. Received: {format_value(self.devices)}; use strategy.name=mirrored for several."


def _replicas_of_environment() -> int:
    """Returns the number in the environment variable, or 0. Raises ConfigError if it is not a number of replicas."""
    text = os.environ.get(progress.REPLICAS, "").strip()
    replicas = int(text) if re.fullmatch("[0-9]{1,9}", text) else -1
    if text and replicas not in _MOST_REPLICAS:
        raise ConfigError(
            f"the environment variable {progress.REPLICAS} must be {_MOST_REPLICAS}. Received: {format_value(text)}."
        )
    return replicas if text else 0


def _replicas_faults(field: str, replicas: int, workers: int, gpus: int = 0) -> Iterator[str]:
    """Yields the error of a number of replicas that the workers, each with a number of GPUs, cannot share."""
    divisors = [number for number in range(1, min(replicas, MOST_TASKS) + 1) if replicas % number == 0]
    possible = [number for number in divisors if replicas // number <= (gpus or MAX_VIRTUAL_CPUS)]
    nearest = sorted(sorted(possible, key=lambda number: abs(number - workers))[:_MOST_SHOWN])
    choice = f"{_or(nearest)} workers" if nearest else "fewer replicas"
    if replicas % workers:
        yield f"{field}={replicas} is not divisible by {workers} workers; use {choice}, or a multiple of {workers} replicas."
    elif replicas // workers > (gpus or MAX_VIRTUAL_CPUS):
        needs = f"{replicas // workers} {'GPUs' if gpus else 'virtual CPUs'}{' of each worker' if workers > 1 else ''}"
        has = f"and this process has {gpus}" if gpus else f"more than {MAX_VIRTUAL_CPUS}"
        most = workers * (gpus or MAX_VIRTUAL_CPUS)
        yield f"{field}={replicas} needs {needs}, {has}; use {choice}, or at most {most} replicas."


def _or(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
