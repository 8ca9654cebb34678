"""`TrainConfig`: everything that `python -m tfdist.train` can be told. No TensorFlow here.

Dataclasses with a default for every field. They are not frozen because `ml_collections.config_flags` assigns to their
fields (`--config.optimizer.momentum=0.9`); `check` judges the whole before use and reports every fault at once.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tfdist import registry
from tfdist.errors import ConfigError, did_you_mean, shown, unknown

STRATEGIES = ("one_device", "mirrored", "multi_worker_mirrored", "central_storage", "tpu")
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
        bytes_per_pack: Split the gradients' reduction into packs of about this many bytes; 0 means one pack.
        timeout_seconds: End a collective that takes longer than this many seconds with an error; 0 means no limit.
    """

    name: str = "one_device"
    devices: str = ""
    implementation: str = "auto"
    bytes_per_pack: int = 0
    timeout_seconds: float = 0.0

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
        if not (self.bytes_per_pack >= 0 and self.timeout_seconds >= 0):  # so that NaN is a fault, too
            yield (
                "strategy.bytes_per_pack and strategy.timeout_seconds must be 0 (off) or more. "
                f"Received: {self.bytes_per_pack} and {self.timeout_seconds}."
            )
        if self.devices.isdecimal() and not 1 <= self.virtual_cpus <= MAX_VIRTUAL_CPUS:
            yield f"strategy.devices must be 1 to {MAX_VIRTUAL_CPUS} virtual CPUs, or device names. Received: {self.devices}."
        if self.name == "multi_worker_mirrored" and self.devices:
            yield (
                "strategy.devices does not apply to multi_worker_mirrored, which uses all GPUs it sees, or the CPU; "
                f"choose GPUs with CUDA_VISIBLE_DEVICES. Received: {self.devices!r}."
            )
        if self.name == "one_device" and len(self.device_names) > 1:
            yield f"strategy one_device takes one device. Received: {self.devices!r}; use strategy.name=mirrored for several."


@dataclasses.dataclass
class ClusterConfig:
    """The cluster to start on this machine, where the environment describes none.

    Attributes:
        workers: Training tasks, one process each.
    """

    workers: int = 1


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
        takes = OPTIMIZERS[self.name]
        for name in self.changed():
            if name not in takes and name not in _EVERY_OPTIMIZER:
                yield f"optimizer {self.name!r} takes no {name!r}. It takes: {', '.join((*takes, *_EVERY_OPTIMIZER))}."
        clips = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if getattr(self, name)]
        if len(clips) > 1:
            yield f"Only one of optimizer.clipnorm, clipvalue and global_clipnorm may be set. Received: {', '.join(clips)}."


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
        deterministic: Use only TensorFlow operations that give the same bits each time; slower on GPUs.
        optimizer: The optimizer and its arguments.
        learning_rate: Step size.
        precision: `"float32"`, `"mixed_bfloat16"` or `"mixed_float16"`, which compute in 16 bits and keep weights in 32.
        jit_compile: Compile each replica's computation with XLA.
        steps_per_execution: Steps to run for each call of Python; callbacks see every so many steps.
        grace_seconds: How long a task has to end after a signal before it is killed.
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
    learning_rate: float = 1e-3
    precision: str = "float32"
    jit_compile: bool = False
    steps_per_execution: int = 1
    grace_seconds: float = 25.0

    def __post_init__(self) -> None:
        # So that the task's options exist as fields that flags can set.
        if self.task_options is None and isinstance(self.task, str) and self.task in registry.TASKS:
            self.task_options = registry.resolve("task", self.task, registry.TASKS).Options()
        _resolve_types(self)


def _resolve_types(config: Any) -> None:
    """Makes the fields' types classes: under `from __future__ import annotations` they are texts, and flags need classes."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        field.type = hints[field.name]
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            _resolve_types(value)


def check(config: TrainConfig, workers: int | None = None) -> None:
    """Raises a `ConfigError` with every fault of the configuration that shows before TensorFlow is loaded.

    Args:
        config: The configuration.
        workers: Training tasks of the cluster that the environment describes; 0 means that it is faulty, None that it
            describes none, so that `cluster.workers` holds.
    """
    if faults := list(_faults(config, workers)):
        raise ConfigError(faults)


def _faults(config: TrainConfig, environment_workers: int | None) -> Iterator[str]:
    wrong = dict(_type_faults(config, "config"))
    yield from wrong.values()

    def typed(*fields: str) -> bool:
        """Whether these fields are of their declared types, so that their values can be judged."""
        return not any(f"{path}.".startswith(f"config.{field}.") for path in wrong for field in fields)

    if typed("strategy"):
        yield from config.strategy.faults()
    if typed("optimizer"):
        yield from config.optimizer.faults()
    if typed("task", "task_options"):
        yield from _task_faults(config)
    if typed("cluster", "strategy"):
        yield from _workers_faults(config)
    if typed("global_batch_size", "per_replica_batch_size"):
        sizes = (config.global_batch_size, config.per_replica_batch_size)
        if min(sizes) != 0 or max(sizes) == 0:
            yield (
                "Exactly one of global_batch_size and per_replica_batch_size must be set, the other be 0. "
                f"Received: {sizes[0]} and {sizes[1]}."
            )
        elif typed("cluster", "strategy"):
            workers = config.cluster.workers if environment_workers is None else environment_workers
            if (replicas := _known_replicas(config.strategy, workers)) and (fault := indivisible(sizes[0], replicas)):
                yield fault
    if typed("precision") and config.precision not in PRECISIONS:
        yield unknown("precision", config.precision, PRECISIONS)
    if typed("jit_compile", "precision", "optimizer", "strategy") and config.strategy.name == "central_storage":
        yield from _central_storage_faults(config)
    least_values = {"epochs": 1, "steps_per_execution": 1, "steps_per_epoch": 0, "grace_seconds": 0, "learning_rate": 0}
    for name, least in least_values.items():
        if typed(name) and not least <= getattr(config, name) < float("inf"):  # NaN is a fault, too
            yield f"{name} must be {least} or more, and finite. Received: {getattr(config, name)}."
    if typed("seed") and not 0 <= config.seed < 2**31:
        yield f"seed must be 0 to {2**31 - 1}. Received: {config.seed}."


def _workers_faults(config: TrainConfig) -> Iterator[str]:
    workers = config.cluster.workers
    if workers < 1:
        yield f"cluster.workers must be 1 or more. Received: {workers}."
    elif workers > 1 and config.strategy.name in STRATEGIES and config.strategy.name != "multi_worker_mirrored":
        yield (
            f"strategy {config.strategy.name!r} trains in one process, but cluster.workers is {workers}; "
            "use --config.strategy.name=multi_worker_mirrored, or leave cluster.workers at 1."
        )


def _central_storage_faults(config: TrainConfig) -> Iterator[str]:
    remedy = "is not possible under central_storage, whose replicas share their variables; use strategy mirrored."
    if config.jit_compile:
        yield f"jit_compile {remedy}"
    if config.precision == "mixed_float16":
        yield f"precision mixed_float16 {remedy}"
    if config.optimizer.use_ema:
        yield f"optimizer.use_ema {remedy}"


def _task_faults(config: TrainConfig) -> Iterator[str]:
    try:
        task = registry.resolve("task", config.task, registry.TASKS)
    except ConfigError as e:
        yield from e.faults
        return
    expected = getattr(task, "Options", None)
    if not isinstance(expected, type):
        yield f"task {config.task!r} is no tfdist.task.Task: it has no 'Options'."
        return
    if config.task_options is None:
        config.task_options = expected()
    if not isinstance(config.task_options, expected):
        yield (
            f"task {config.task!r} takes task_options of {_full_name(expected)}. "
            f"Received: {_full_name(type(config.task_options))}; set task and task_options together, in the config file."
        )
    elif callable(faults := getattr(config.task_options, "faults", None)):
        yield from faults()


def _full_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _known_replicas(strategy: StrategyConfig, workers: int) -> int:
    """Returns the number of replicas where it can be told without TensorFlow, else 0."""
    if strategy.name == "one_device":
        return 1
    if strategy.name in ("mirrored", "central_storage"):
        return len(strategy.device_names) if strategy.virtual_cpus <= MAX_VIRTUAL_CPUS else 0
    # Every worker has at least one replica, more where it has GPUs: only what no number of GPUs can cure is a fault.
    return max(workers, 0) if strategy.name == "multi_worker_mirrored" else 0


def indivisible(batch_size: int, replicas: int) -> str:
    """Returns the sentence for a global batch size that the replicas do not divide, or an empty text."""
    if batch_size % replicas == 0:
        return ""
    below = batch_size // replicas * replicas
    choice = f"{below} or {below + replicas}" if below else f"{replicas}"
    return f"global_batch_size {batch_size} is not divisible by {replicas} replicas; use {choice}."


def unknown_field(path: str, name: str, known: Collection[str]) -> str:
    """Returns the sentence for a field that a group of fields (or what is no group) has not."""
    fields = f"Known: {', '.join(known)}." if known else "It has no fields."
    return f"{path}: unknown config field {shown(name)}{did_you_mean(name, known)} {fields}"


def _type_faults(config: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields what is no field or not of its declared type, with its path (a config file may assign anything)."""
    hints = typing.get_type_hints(type(config))
    fields = {field.name: field for field in dataclasses.fields(config)}
    for name in getattr(config, "__dict__", ()):  # slots have none
        # What is the class's own (a cached property) or private is no misspelt field.
        if name not in fields and not name.startswith("_") and not hasattr(type(config), name):
            yield f"{path}.{name}", unknown_field(f"{path}.{name}", name, fields)
    for field in fields.values():
        value, expected = getattr(config, field.name), hints[field.name]
        where = f"{path}.{field.name}"
        number = isinstance(value, int) and not isinstance(value, bool)
        if expected is float and number and abs(value) <= sys.float_info.max:
            setattr(config, field.name, float(value))
        elif (
            isinstance(expected, type)
            and expected is not Any  # a class since Python 3.11
            and (not isinstance(value, expected) or (expected is int and isinstance(value, bool)))
        ):
            yield where, f"{where} must be {expected.__name__}. Received: {shown(value)}."
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _type_faults(value, where)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Returns the configuration as plain values, for `config.json`."""
    return dataclasses.asdict(config)
