"""`StrategyConfig`: the strategy and its devices. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator

from tfdist.config import registry, relations
from tfdist.config.constraints import MOST_SECONDS, MOST_TASKS, between, choice, option, parsed
from tfdist.config.strategy_traits import STRATEGIES, StrategyTraits, find_traits
from tfdist.errors import ConfigError, format_value, truncate, unknown_name_message
from tfdist.runtime.report import progress

ROW_UPDATES = ("auto", "lazy", "off")
PLACEMENTS = ("round_robin", "by_bytes")
TENSORFLOW_TRANSPORTS = ("auto", "grpc", "nccl")
BATCH_SHARES = ("even", "by_speed")
WEIGHTS_DTYPES = ("float32", "bfloat16")
TRANSPORTS = (*TENSORFLOW_TRANSPORTS, "mpi", "shared_memory", "tcp")

MAX_VIRTUAL_CPUS = 256
_MOST_SHOWN = 8  # numbers of workers in a message
_REPLICAS = between(0, MAX_VIRTUAL_CPUS * MOST_TASKS, off=True)
_BYTES = between(0, 2**40, off=True)

_DEVICE = re.compile(
    r"(/job:localhost(/replica:0)?(/task:0)?/device:|/device:|/)?(CPU|GPU|TPU)(:[0-9]+)?", re.IGNORECASE
)


def sync_intervals(where: str, value: int | str) -> list[tuple[int, int]]:
    """Returns the first update and the interval of each part of `sync_every`; empty means off.

    Raises:
        ConfigError: The value is neither a number of updates nor a rising list of them.
    """
    if value == 0 or value == "0":
        return []
    parts = [part.strip() for part in str(value).split(",")]
    if not isinstance(value, bool) and re.fullmatch("[0-9]+", parts[0]):
        parts[0] = f"0:{parts[0]}"
    intervals = []
    for part in parts:
        if not re.fullmatch("[0-9]{1,9}:[1-9][0-9]{0,8}", part):
            raise ConfigError(
                f"{where} must be a number of updates, or a list such as 10,1000:50, which means 10, and 50 from update 1000 on. "
                f"Received: {format_value(value)}."
            )
        begin, interval = map(int, part.split(":"))
        intervals.append((begin, interval))
    begins = [begin for begin, _ in intervals]
    if begins != sorted(set(begins)) or begins[0] != 0:
        raise ConfigError(f"{where}: the updates before the colons must rise. Received: {format_value(value)}.")
    return intervals


@dataclasses.dataclass
class Outer:
    """The optimizer of the weights that workers share, with `sync_every`: SGD on the mean of the workers' moves (docs/local-steps.md).

    The defaults replace the shared weights by the mean of the workers' weights.

    Attributes:
        learning_rate: The factor of the workers' mean move. DiLoCo uses 0.7.
        momentum: The momentum of the workers' mean moves. DiLoCo uses 0.9.
        nesterov: Whether the momentum is Nesterov's.

    Examples:
        >>> import tfdist
        >>> tfdist.Outer(learning_rate=0.7, momentum=0.9).nesterov
        True
    """

    learning_rate: float = option(1.0, *between(0, 10))
    momentum: float = option(0.0, *between(0, 1))
    nesterov: bool = True


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
            `"mpi"` (CPUs, workers that mpirun or srun has started), `"shared_memory"` (CPUs, workers of one host), or `"tcp"` (CPUs,
            workers of any hosts). `"auto"` selects one (docs/transports.md). Under `mirrored`: `"nccl"`, or `"grpc"`, which sums on one device.
        bucket_bytes: Size of the buckets in which `multi_worker_mirrored` sums gradients while the backward pass computes further
            gradients; 0 means one sum of all gradients. `bf16`, `fp16` and `int8` split larger gradients; `powersgd` and `topk`
            need complete gradients, and count compressed bytes.
        shard_optimizer: Whether each worker of `multi_worker_mirrored` holds and updates a part of the optimizer's state, which then
            needs memory and time divided by the number of workers (docs/sharding.md). The replicas of a process share one part, those
            of `mirrored` the whole state.
        weights_dtype: With `shard_optimizer`, the type in which workers send updated weights: `"bfloat16"` halves these bytes. Each
            worker keeps the float32 values of its part; all workers compute with the rounded weights.
        row_updates: Which optimizers update only the rows of a table of at least 65,536 rows that a gradient has (docs/tables.md): `"auto"`,
            those that give Keras' result (`SGD` without momentum and `Adagrad`, without weight decay); `"lazy"`, all that update
            each element independently, as LazyAdam does, with other results than Keras'; `"off"`, none.
        sync_every: With a number H above 0, each worker of `multi_worker_mirrored` trains alone for H updates. Then the workers exchange
            how far their weights have moved (docs/local-steps.md). `"10,1000:50"` means 10, and 50 from update 1000 on. 0 means
            that every step sums the gradients.
        outer: With `sync_every`, the optimizer that applies the mean of these moves; the default, or None, takes the mean of the weights.
        batch_shares: How the workers of `multi_worker_mirrored` divide each batch: `"even"`, or `"by_speed"`, in proportion to their measured
            speed, so that none waits for a slower one (docs/batch-shares.md).
        gather_loss_bytes: A loss that returns one number per batch (a function's, Dice) gets the labels, predictions and weights
            of all replicas, so that it equals the loss of one process. If one example has more than this many bytes of
            these tensors, each replica computes the loss of its own examples; their mean is trained, with a warning. The
            default admits masks of 256 x 256 pixels: a batch of 32 is as large as the gradients of 4 million weights. It
            excludes the 60 MB that a language model predicts for a sentence. An unknown dimension counts as 1.
        placement: The server of `parameter_server` that gets the next variable: `"round_robin"`, the next server, or
            `"by_bytes"`, the server with the fewest bytes.
        max_staleness: The limit, under `parameter_server`, of the updates that other workers apply between a step's read of the
            weights and its own update: workers wait before they begin a step (docs/parameter-servers.md). None means no limit.
        features: Your own features, as `"package.module:Class"`, separated by commas, or a list of names (docs/extending.md).
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
    replicas: int = option(0, *_REPLICAS)
    transport: str = choice("auto", *TRANSPORTS)
    bucket_bytes: int = option(4_000_000, *_BYTES)
    shard_optimizer: bool = False
    weights_dtype: str = choice("float32", *WEIGHTS_DTYPES)
    row_updates: str = choice("auto", *ROW_UPDATES)
    sync_every: int | str = parsed(0, sync_intervals)
    outer: Outer = dataclasses.field(default_factory=Outer)
    batch_shares: str = choice("even", *BATCH_SHARES)
    gather_loss_bytes: int = option(1_000_000, *_BYTES)
    timeout_seconds: float | None = option(None, *between(0, MOST_SECONDS, off=True))
    placement: str = choice("round_robin", *PLACEMENTS)
    max_staleness: int | None = option(None, *between(0, MOST_TASKS))
    features: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.devices, (list, tuple)):
            self.devices = ",".join(map(str, self.devices))
        self.devices = "" if self.devices is None else str(self.devices)
        if isinstance(self.features, (list, tuple)):
            self.features = ",".join(map(str, self.features))
        if self.outer is None:
            self.outer = Outer()

    @property
    def traits(self) -> StrategyTraits:
        """The strategy's traits. Raises ConfigError as `find_traits`."""
        return find_traits(self.name)

    @property
    def virtual_cpus(self) -> int:
        """The requested number of virtual CPUs, or 0."""
        if not self.devices.isdecimal():
            return 0
        # Limit the digits, because Python raises an error for thousands of them.
        return min(int(self.devices[:9]), MAX_VIRTUAL_CPUS + 1)

    @property
    def device_names(self) -> list[str]:
        """The names of the devices to use; empty means TensorFlow's choice."""
        if self.virtual_cpus:
            return [f"CPU:{i}" for i in range(self.virtual_cpus)]
        return [name.strip() for name in self.devices.split(",") if name.strip()]

    @property
    def own_features(self) -> list[str]:
        """The names in `features`."""
        return [name.strip() for name in self.features.split(",") if name.strip()]

    @property
    def sync_intervals(self) -> list[tuple[int, int]]:
        """The first update and the interval of each part of `sync_every` (see the function); empty means off."""
        return sync_intervals("sync_every", self.sync_every)

    def on_workers(self, workers: int, gpus: int = 0) -> StrategyConfig:
        """Returns this configuration with `devices` in place of `replicas`, or of the environment variable `TFDIST_REPLICAS`.

        Args:
            workers: The number of workers. A strategy of one process has one.
            gpus: The number of GPUs of this process. With GPUs the environment variable has no effect.

        Raises:
            ConfigError: The workers do not divide the replicas, or a worker has too few GPUs.
        """
        if not self.traits.several_processes:
            workers = 1
        field = "strategy.replicas"
        replicas = self.replicas
        if not replicas and not self.devices and not gpus and self.traits.mirrors:
            field = progress.REPLICAS
            replicas = _replicas_of_environment()
        if not replicas:
            return self
        faults = list(_replicas_faults(field, replicas, workers, gpus))
        if faults:
            raise ConfigError(faults)
        own = replicas // workers
        devices = str(own)  # a number of virtual CPUs
        if gpus:
            devices = ",".join(f"GPU:{i}" for i in range(own))
        return dataclasses.replace(self, devices=devices, replicas=0)

    def replicas_faults(self, workers: int) -> Iterator[str]:
        """Yields the error of a number of `replicas` that a number of workers cannot share."""
        if not self.traits.several_processes:
            workers = 1
        if self.replicas > 0:
            yield from _replicas_faults("strategy.replicas", self.replicas, workers)

    def faults(self) -> Iterator[str]:
        """Yields the errors in the strategy's name and devices, and in options that are not for this strategy."""
        if self.name not in STRATEGIES and ":" not in self.name:
            yield unknown_name_message("strategy", self.name, STRATEGIES)
            return
        try:
            devices = self.traits.devices
        except ConfigError as e:
            yield from e.faults
            return
        for name in self.own_features:
            try:
                registry.check_findable("feature", name)
            except ConfigError as e:
                yield from e.faults
        yield from relations.faults(self.asked())
        if self.devices.isdecimal() and not 1 <= self.virtual_cpus <= MAX_VIRTUAL_CPUS:
            yield f"strategy.devices must be 1 to {MAX_VIRTUAL_CPUS} virtual CPUs, or device names. Received: {truncate(self.devices)}."
        elif self.devices and not self.virtual_cpus and devices != "own":
            names = [name.upper() for name in self.device_names]
            if not names:
                yield f"strategy.devices names no device; leave it empty for all GPUs, or the CPU. Received: {format_value(self.devices)}."
            invalid = [name for name in names if not _DEVICE.fullmatch(name)]
            if invalid:
                yield f"strategy.devices must be names such as GPU:0, or a number of virtual CPUs. Received: {format_value(invalid[0])}."
            elif len(set(names)) < len(names):
                yield f"strategy.devices names a device twice. Received: {format_value(self.devices)}."
        if devices == "one" and len(self.device_names) > 1:
            yield f"strategy {self.name} takes one device. Received: {format_value(self.devices)}; use strategy.name=mirrored for several."

    def asked(self) -> dict[str, str]:
        """Returns the features that the options ask for, by their keys in `relations.py`, with the names that an error has for them."""
        traits = self.traits
        devices = f"strategy.devices={format_value(self.devices)}"
        try:
            intervals = self.sync_intervals
            sums_each_step = not intervals
        except ConfigError:  # the field's own check reports it
            intervals, sums_each_step = [], False
        own_transport = self.transport in TRANSPORTS and self.transport not in TENSORFLOW_TRANSPORTS
        options = {
            "transport": (f"strategy.transport={self.transport}", own_transport and self.name in STRATEGIES),
            "devices": (devices, self.devices),
            "replicas": (f"strategy.replicas={self.replicas}", self.replicas > 0),
            "several_devices": (devices, len(self.device_names) > 1),
            "shard_optimizer": ("", self.shard_optimizer),
            "whole_optimizer": ("", not self.shard_optimizer),
            "weights_dtype": ("", self.weights_dtype == "bfloat16"),
            "sync_every": ("", intervals),
            "every_step": ("", sums_each_step),
            "outer": ("", self.outer != Outer()),
            "batch_shares": ("", self.batch_shares == "by_speed"),
            "features": ("", self.features),
            "max_staleness": ("", self.max_staleness is not None),
            "not_workers": (self.name, not (traits.several_processes and traits.mirrors)),
            "not_mirrors": (self.name, not traits.mirrors),
            "not_compressing": (self.name, not traits.compresses),
            "synchronous": (self.name, not traits.asynchronous),
            "all_devices": (self.name, traits.devices == "none"),
            "parameter_server": (self.name, traits.asynchronous),
        }
        return {self.name: "", **relations.present(options)}


def _replicas_of_environment() -> int:
    """Returns the number in the environment variable, or 0. Raises ConfigError if it is not a number of replicas."""
    text = os.environ.get(progress.REPLICAS, "").strip()
    if not text:
        return 0
    expected, holds = _REPLICAS
    if not re.fullmatch("[0-9]{1,9}", text) or not holds(int(text)):
        raise ConfigError(
            f"the environment variable {progress.REPLICAS} must be {expected}. Received: {format_value(text)}."
        )
    return int(text)


def _replicas_faults(field: str, replicas: int, workers: int, gpus: int = 0) -> Iterator[str]:
    """Yields the error of a number of replicas that the workers, each with a number of GPUs, cannot share."""
    devices = gpus or MAX_VIRTUAL_CPUS
    divisors = [number for number in range(1, min(replicas, MOST_TASKS) + 1) if replicas % number == 0]
    possible = [number for number in divisors if replicas // number <= devices]
    nearest = sorted(sorted(possible, key=lambda number: abs(number - workers))[:_MOST_SHOWN])
    choice = "fewer replicas"
    if nearest:
        listed = ", ".join(map(str, nearest))
        choice = f"{' or '.join(listed.rsplit(', ', 1))} workers"
    if replicas % workers:
        yield f"{field}={replicas} is not divisible by {workers} workers; use {choice}, or a multiple of {workers} replicas."
    elif replicas // workers > devices:
        kind = "virtual CPUs"
        has = f"more than {MAX_VIRTUAL_CPUS}"
        if gpus:
            kind = "GPUs"
            has = f"and this process has {gpus}"
        if workers > 1:
            kind += " of each worker"
        yield (
            f"{field}={replicas} needs {replicas // workers} {kind}, {has}; use {choice}, or at most {workers * devices} replicas."
        )
