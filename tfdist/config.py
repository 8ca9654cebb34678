"""`TrainConfig`: everything that `python -m tfdist.train` can be told. No TensorFlow here.

Dataclasses with a default for every field. They are not frozen because `ml_collections.config_flags` assigns to their
fields (`--config.optimizer.momentum=0.9`); `tfdist.check` judges the whole before use.
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist import registry
from tfdist.errors import ConfigError, did_you_mean, shown, told, unknown

STRATEGIES = ("one_device", "mirrored", "multi_worker_mirrored", "parameter_server", "central_storage", "tpu")
PLACEMENTS = ("round_robin", "by_bytes")
IMPLEMENTATIONS = ("auto", "ring", "nccl")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
MAX_VIRTUAL_CPUS = 256

# Optimizer name to the arguments it takes besides the learning rate and those of every optimizer.
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum", "nesterov"),
    "rmsprop": ("rho", "momentum", "epsilon", "centered"),
    "adagrad": ("epsilon",),
    "adam": ("beta_1", "beta_2", "epsilon", "amsgrad"),
    "adamw": ("beta_1", "beta_2", "epsilon", "amsgrad"),
    "nadam": ("beta_1", "beta_2", "epsilon"),
    "lion": ("beta_1", "beta_2"),
}
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
# Least, what it is below, and the most that is allowed beside, of optimizers' arguments.
_RANGES: Mapping[str, tuple[float, float, float | None]] = {
    "momentum": (0, 1, 1),
    "rho": (0, 1, 1),
    "beta_1": (0, 1, None),
    "beta_2": (0, 1, None),
    "ema_momentum": (0, 1, 1),
    "epsilon": (0, float("inf"), None),
    "weight_decay": (0, float("inf"), None),
    "clipnorm": (0, float("inf"), None),
    "clipvalue": (0, float("inf"), None),
    "global_clipnorm": (0, float("inf"), None),
}
_DEVICE = re.compile(r"(/\w+:[\w:/]+/device:|/device:|/)?(CPU|GPU|TPU)(:[0-9]+)?", re.IGNORECASE)
_MOST_DIGITS = 15
_EVERY_OPTIMIZER = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "gradient_accumulation_steps",
)


@dataclasses.dataclass
class StrategyConfig:
    """Which `tf.distribute` strategy, on which devices.

    Attributes:
        name: One of `STRATEGIES`.
        devices: Device names, as `"GPU:0,GPU:1"` or a list of them, or a number of virtual CPUs of this process.
            Empty means all GPUs, or the CPU. For `tpu` it is the TPU's name or address.
        implementation: How collectives of `multi_worker_mirrored` travel: `"auto"`, `"ring"` or `"nccl"`.
        bucket_bytes: `multi_worker_mirrored` sums gradients in buckets of so many bytes, which travel while backward computes
            the others; 0 means one sum of all. `bf16`, `fp16` and `int8` cut larger gradients; `powersgd` and `topk`, which
            need a gradient whole, count its bytes as they send them.
        placement: Which server of `parameter_server` gets the next variable: `"round_robin"`, the next one, or
            `"by_bytes"`, the one with the fewest bytes.
        timeout_seconds: End a collective that takes longer than this many seconds with an error; 0 means no limit.
    """

    name: str = "one_device"
    devices: str = ""
    implementation: str = "auto"
    bucket_bytes: int = 4_000_000
    timeout_seconds: float = 0.0
    placement: str = "round_robin"

    def __post_init__(self) -> None:
        if isinstance(self.devices, (list, tuple)):
            self.devices = ",".join(map(str, self.devices))
        self.devices = "" if self.devices is None else str(self.devices)

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
        """Yields what is wrong with the strategy and its options."""
        if self.name not in STRATEGIES:
            yield unknown("strategy", self.name, STRATEGIES)
            return
        if self.implementation not in IMPLEMENTATIONS:
            yield unknown("strategy.implementation", self.implementation, IMPLEMENTATIONS)
        if self.placement not in PLACEMENTS:
            yield unknown("strategy.placement", self.placement, PLACEMENTS)
        if not (self.bucket_bytes >= 0 and self.timeout_seconds >= 0):  # so that NaN is a fault, too
            yield (
                "strategy.bucket_bytes and strategy.timeout_seconds must be 0 (off) or more. "
                f"Received: {self.bucket_bytes} and {self.timeout_seconds}."
            )
        if self.devices.isdecimal() and not 1 <= self.virtual_cpus <= MAX_VIRTUAL_CPUS:
            yield f"strategy.devices must be 1 to {MAX_VIRTUAL_CPUS} virtual CPUs, or device names. Received: {self.devices}."
        elif self.devices and not self.virtual_cpus and self.name != "tpu":
            names = [name.upper() for name in self.device_names]
            if strange := [name for name in names if not _DEVICE.fullmatch(name)]:
                yield f"strategy.devices must be names such as GPU:0, or a number of virtual CPUs. Received: {shown(strange[0])}."
            elif len(set(names)) < len(names):
                yield f"strategy.devices names a device twice. Received: {shown(self.devices)}."
        if self.name in ("multi_worker_mirrored", "parameter_server") and self.devices:
            yield (
                f"strategy.devices does not apply to {self.name}, which uses all GPUs it sees, or the CPU; "
                f"choose GPUs with CUDA_VISIBLE_DEVICES. Received: {self.devices!r}."
            )
        if self.name == "one_device" and len(self.device_names) > 1:
            yield f"strategy one_device takes one device. Received: {self.devices!r}; use strategy.name=mirrored for several."


@dataclasses.dataclass
class ClusterConfig:
    """The cluster: what the environment or `hosts` describe, or else one that is started on this machine.

    Attributes:
        workers: Training tasks to start on this machine, one process each, where there is no cluster.
        ps: Parameter servers: so many more processes, and a chief on top; or so many of the ranks that a scheduler has started.
        source: Who is asked for the cluster: one of `tfdist.resolvers.RESOLVERS`, `"auto"` for all in turn, or `"none"`.
        hosts: Or the training tasks' addresses, as `host1:2222,host2:2222`; likewise `ps_hosts`, the parameter servers', or
            `hostfile`, a file with a line `host slots=2` for each host.
        task: Which of them this process is, as `worker:1`; empty means the one that is on this host.
    """

    workers: int = 1
    ps: int = 0
    source: str = "auto"
    hosts: str = ""
    ps_hosts: str = ""
    hostfile: str = ""
    task: str = ""

    def asked(self) -> dict[str, Any]:
        """Returns the arguments of `resolvers.find`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "workers"}


@dataclasses.dataclass
class OptimizerConfig:
    """A Keras optimizer's name and arguments, by Keras' names; what the optimizer does not take must stay as it is.

    Attributes:
        name: One of `OPTIMIZERS`, or your own optimizer class as `package.module:Class`, which gets the learning rate
            and every argument that differs from its default here.
        weight_decay: 0 means none; likewise `clipnorm`, `clipvalue` and `global_clipnorm`, of which one may be set.
        use_ema: Keep and, after training, use an exponential moving average of the weights.
        gradient_accumulation_steps: Steps whose mean gradient makes one update; 0 means each step's own does.
    """

    name: str = "adam"
    momentum: float = 0.0
    nesterov: bool = False
    rho: float = 0.9
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    amsgrad: bool = False
    centered: bool = False
    weight_decay: float = 0.0
    clipnorm: float = 0.0
    clipvalue: float = 0.0
    global_clipnorm: float = 0.0
    use_ema: bool = False
    ema_momentum: float = 0.99
    gradient_accumulation_steps: int = 0

    def changed(self) -> dict[str, Any]:
        """Returns the arguments that differ from their defaults: those to give to the optimizer."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if field.name != "name" and (value := getattr(self, field.name)) != field.default
        }

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the optimizer's name and arguments."""
        if ":" in self.name:
            return
        if self.name not in OPTIMIZERS:
            yield (
                f"Unknown optimizer {self.name!r}{did_you_mean(self.name, OPTIMIZERS)} "
                f"Expected one of {', '.join(sorted(OPTIMIZERS))}, or your own as 'package.module:Class'."
            )
            return
        if self.gradient_accumulation_steps < 0 or self.gradient_accumulation_steps == 1:
            yield (
                "optimizer.gradient_accumulation_steps must be 0 (off) or 2 or more. "
                f"Received: {self.gradient_accumulation_steps}."
            )
        for name, (least, below, most) in _RANGES.items():
            value = getattr(self, name)
            if not (least <= value < below or value == most):
                limit = f"{least:g} to {most:g}" if most is not None else f"{least:g} or more, and less than {below:g}"
                yield f"optimizer.{name} must be {limit}. Received: {value}."
        takes = OPTIMIZERS[self.name]
        for name in self.changed():
            if name not in takes and name not in _EVERY_OPTIMIZER:
                yield f"optimizer {self.name!r} takes no {name!r}. It takes: {', '.join((*takes, *_EVERY_OPTIMIZER))}."
        clips = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(self, name)]
        if len(clips) > 1:
            yield f"Only one of optimizer.clipnorm, clipvalue and global_clipnorm may be set. Received: {', '.join(clips)}."


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
            yield unknown("compression", self.name, tuple(COMPRESSORS))
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


@dataclasses.dataclass
class BackupConfig:
    """When and where to back the training up; see `tfdist.BackupAndRestore`.

    Attributes:
        save_freq: `"epoch"`, a number of steps, or `"never"`.
        save_every_seconds: Save also when so much time has passed; 0 means never.
        dir: The folder, which all tasks share. Empty means `backup` in the work directory.
        keep: How many backups to keep.
        delete_checkpoint: Whether to remove them once all results are written.
        save_before_preemption: On SIGTERM to any task, save on all and end with exit code 75.
    """

    save_freq: str = "epoch"
    save_every_seconds: float = 0.0
    dir: str = ""
    keep: int = 2
    delete_checkpoint: bool = True
    save_before_preemption: bool = True

    def faults(self) -> Iterator[str]:
        """Yields what is wrong with the values."""
        if self.save_freq not in ("epoch", "never") and not (
            self.save_freq.isascii()
            and self.save_freq.isdecimal()
            and 0 < len(self.save_freq.strip("0")) <= _MOST_DIGITS
        ):
            yield f"backup.save_freq must be 'epoch', 'never' or a number of steps, 1 or more. Received: {shown(self.save_freq)}."
        if not 0 <= self.save_every_seconds < float("inf"):
            yield f"backup.save_every_seconds must be 0 (off) or more, and finite. Received: {self.save_every_seconds}."
        if self.keep < 1:
            yield f"backup.keep must be 1 or more. Received: {self.keep}."
        if os.path.exists(self.dir) and not os.path.isdir(self.dir):
            yield f"backup.dir must be a folder, and {self.dir!r} is a file."


@dataclasses.dataclass
class TrainConfig:
    """One training run.

    Attributes:
        task: What to train: a name of `registry.TASKS`, or your own `package.module:Class` (see `tfdist.task.Task`).
        task_options: A dataclass of the task's own, its `Options`.
        strategy: Which `tf.distribute` strategy.
        cluster: The tasks to start on this machine, where the environment describes no cluster.
        global_batch_size: Examples per step over all replicas. Either this or `per_replica_batch_size` is set.
        per_replica_batch_size: Examples per step for each replica.
        epochs: Passes over the training data.
        steps_per_epoch: Steps that count as an epoch; 0 means as many as the task's data has.
        seed: Fixes initial weights, order of the data and dropout masks.
        compression: How gradients are compressed.
        deterministic: Use only TensorFlow operations that give the same bits each time; slower on GPUs.
        optimizer: The optimizer and its arguments.
        learning_rate: Step size.
        precision: `"float32"`, `"mixed_bfloat16"` or `"mixed_float16"`, which compute in 16 bits and keep weights in 32.
        jit_compile: Compile each replica's computation with XLA.
        steps_per_execution: Steps to run for each call of Python; callbacks see every so many steps.
        start_timeout: How long a task waits for the others, in seconds.
        grace_seconds: How long a task has to end after a signal before it is killed, and to save before that.
        check_weights: Whether workers compare all their weights after each epoch; else only before and after the training.
        backup: When and where to back the training up.
        max_restarts: Restarts that failures of tasks may cost, where this command starts them.
    """

    task: str = "digits"
    task_options: Any = None
    strategy: StrategyConfig = dataclasses.field(default_factory=StrategyConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    global_batch_size: int = 0
    per_replica_batch_size: int = 0
    epochs: int = 1
    steps_per_epoch: int = 0
    seed: int = 0
    deterministic: bool = False
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    compression: CompressionConfig = dataclasses.field(default_factory=CompressionConfig)
    learning_rate: float = 1e-3
    precision: str = "float32"
    jit_compile: bool = False
    steps_per_execution: int = 1
    start_timeout: float = 300.0
    grace_seconds: float = 25.0
    check_weights: bool = True
    backup: BackupConfig = dataclasses.field(default_factory=BackupConfig)
    max_restarts: int = 0

    def __post_init__(self) -> None:
        # So that the task's options exist as fields that flags can set.
        if self.task_options is None and isinstance(self.task, str) and self.task in registry.TASKS:
            self.task_options = registry.resolve("task", self.task, registry.TASKS).Options()
        resolve_types(self)

    def choose_task(self, task: str) -> None:
        """Makes a task this configuration's, with the options that it has by default where those here are another one's.

        Raises:
            ConfigError: There is no such task, or its options cannot be made.
        """
        options = getattr(registry.resolve("task", task, registry.TASKS), "Options", None)
        self.task = task
        if not isinstance(options, type) or isinstance(self.task_options, options):
            return
        self.task_options = None  # another task's
        try:
            self.task_options = options()
        except Exception as e:
            raise ConfigError(
                f"{options.__qualname__}() of task {task!r} raises {told(e)}; give all its fields defaults."
            ) from e
        if dataclasses.is_dataclass(self.task_options):
            resolve_types(self.task_options)


def resolve_types(config: Any) -> None:
    """Makes the fields' types classes: under `from __future__ import annotations` they are texts, and flags need classes."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        field.type = hints[field.name]
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            resolve_types(value)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Returns the configuration as plain values, for `config.json`."""
    return dataclasses.asdict(config)


# What must be the same in a run that goes on, and on all tasks: what decides which numbers are trained.
_SAME = (
    *("task", "task_options", "global_batch_size", "per_replica_batch_size", "steps_per_epoch", "steps_per_execution"),
    *("seed", "deterministic", "precision", "jit_compile"),
    *("strategy", "optimizer", "compression", "learning_rate"),
)


def fixed(config: TrainConfig) -> dict[str, Any]:
    """Returns what of the configuration must be the same in a run that goes on, and on all tasks."""
    same = {name: value for name, value in to_dict(config).items() if name in _SAME}
    del same["strategy"]["timeout_seconds"]
    return same


def backup_arguments(config: TrainConfig, workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the arguments of the `BackupAndRestore` that `config` asks for."""
    backup = dataclasses.asdict(config.backup)
    return {
        "backup_dir": backup.pop("dir") or os.path.join(workdir, "backup"),
        **backup,
        "save_freq": "epoch" if config.backup.save_freq == "epoch" else int(config.backup.save_freq),
        "save_every_seconds": config.backup.save_every_seconds or None,
        "grace_seconds": config.grace_seconds,
        "config": {"config": fixed(config)},
        "defaults": {"config": fixed(TrainConfig(config.task, type(config.task_options)()))},
    }
