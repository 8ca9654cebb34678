"""The validation of a complete `TrainConfig`: all errors that can be detected before TensorFlow is loaded, reported at once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tfdist.config import callbacks, registry, relations, walk
from tfdist.config.cluster import WorkerRange, worker_range
from tfdist.config.optimizer import accumulation_fault
from tfdist.config.strategy import MAX_VIRTUAL_CPUS, StrategyConfig
from tfdist.config.strategy_traits import StrategyTraits
from tfdist.config.train import TrainConfig, default_options
from tfdist.errors import ConfigError, format_value

_GROUPS = ("strategy", "optimizer", "schedule", "compression")  # groups with rules between their fields
_BASE_OF_TASKS = "tfdist.tasks.base"  # a method inherited from there counts as missing


def check(config: TrainConfig, workers: int | None = None, known: Collection[str] = ()) -> None:
    """Raises a `ConfigError` with every error of the configuration that can be found before TensorFlow is loaded.

    Args:
        config: The configuration.
        workers: Number of training tasks of the environment's cluster; 0 means that the cluster is invalid, None that there is no
            such cluster, so that `cluster.workers` applies.
        known: Errors that the caller has found; they come first.
    """
    faults = [*known, *_faults(config, workers)]
    if faults:
        raise ConfigError(faults)


def has_wrong_types(config: TrainConfig, *fields: str) -> bool:
    """Returns whether any of the fields, or of the fields in these groups, does not have its declared type."""
    return _overlap([fault.path for fault in walk.faults(config) if fault.is_type], fields)


def group_faults(group: Any, path: str) -> Iterator[str]:
    """Yields the errors of a group of fields: of types, of values, and of fields that do not go together."""
    found = list(walk.faults(group, path))
    yield from (fault.text for fault in found)
    if hasattr(group, "faults") and not any(fault.is_type for fault in found):
        yield from group.faults()


def _overlap(paths: Collection[str], fields: Collection[str]) -> bool:
    """Returns whether one of the paths is that of a field, of a field in such a group, or of a group that has such a field."""
    return any(
        f"{path}.".startswith(f"{field}.") or f"{field}.".startswith(f"{path}.") for path in paths for field in fields
    )


def _faults(config: TrainConfig, workers: int | None) -> Iterator[str]:
    found = list(walk.faults(config))
    yield from (fault.text for fault in found)
    mistyped = [fault.path for fault in found if fault.is_type]
    wrong = [fault.path for fault in found]

    def typed(*fields: str) -> bool:
        """Returns whether the fields have their declared types, so that their values can be compared."""
        return not _overlap(mistyped, fields)

    def valid(*fields: str) -> bool:
        """Returns whether the values of the fields are valid by themselves."""
        return not _overlap(wrong, fields)

    for group in _GROUPS:
        if typed(group):
            yield from getattr(config, group).faults()
    asked: WorkerRange | None = None
    tasks = workers or 0
    if valid("cluster.workers"):
        asked = worker_range(config.cluster.workers)
        if workers is None:
            tasks = asked.most
    traits: StrategyTraits | None = None
    if typed("strategy"):
        try:
            traits = config.strategy.traits
        except ConfigError:  # the strategy is unknown, which is reported above
            pass
    replicas = 0
    if traits:
        replicas = _known_replicas(config.strategy, traits, tasks)
        if valid("strategy") and tasks:
            yield from config.strategy.replicas_faults(tasks)
        if typed("cluster"):
            yield from _workers_faults(config, traits, asked, workers is not None)
    yield from _run_faults(config, traits, bool(asked and asked.is_elastic and workers is None), typed, valid)
    if valid("global_batch_size", "per_replica_batch_size"):
        yield from _batch_faults(config, replicas)
    if typed("optimizer", "epochs", "steps_per_epoch"):
        steps = config.steps_per_epoch * config.epochs
        accumulated = config.optimizer.arguments().get("gradient_accumulation_steps", 0)
        if steps > 0 and isinstance(accumulated, int):
            fault = accumulation_fault(accumulated, steps)
            if fault:
                yield fault
    if typed("task", "task_options"):
        yield from _task_faults(config)
    if typed("cluster", "backup", "task"):
        yield from _evaluator_faults(config)
    if typed("task", "epochs", "validation_freq", "optimizer") and valid("callbacks"):
        yield from _callback_faults(config)


def _run_faults(
    config: TrainConfig,
    traits: StrategyTraits | None,
    is_elastic: bool,
    typed: Callable[..., bool],
    valid: Callable[..., bool],
) -> Iterator[str]:
    """Yields the errors of fields that exclude each other, or that the strategy, if it is known, does not support."""
    optimizer = config.optimizer.arguments() if typed("optimizer") else {}
    names = [name for name, _ in callbacks.parse(config.callbacks)] if valid("callbacks") else []
    scaling = config.learning_rate_scaling
    fields = {
        "learning_rate_scaling": (f"learning_rate_scaling {scaling!r}", scaling in ("linear", "sqrt")),
        "skip_steps": ("", config.nan_policy == "skip"),
        "deterministic": ("", typed("deterministic") and config.deterministic),
        "jit_compile": ("jit_compile", typed("jit_compile") and config.jit_compile),
        "mixed_float16": ("precision mixed_float16", config.precision == "mixed_float16"),
        "use_ema": ("optimizer.use_ema", optimizer.get("use_ema")),
        "gradient_accumulation_steps": (
            "optimizer.gradient_accumulation_steps",
            optimizer.get("gradient_accumulation_steps"),
        ),
        "SwapEMAWeights": ("", "SwapEMAWeights" in names),
    }
    if typed("compression"):
        fields["compression"] = (f"compression {config.compression.name!r}", config.compression.name != "none")
    if typed("cluster"):
        fields["evaluator"] = ("", config.cluster.evaluator > 0)
        fields["elastic"] = (f"cluster.workers={config.cluster.workers}", is_elastic)
        fields["ray"] = ("", config.cluster.ray)
        fields["ps"] = ("", config.cluster.ps > 0)
    if typed("backup"):
        fields["no_backups"] = ("", config.backup.save_freq == "never")
    asked = relations.present(fields)
    strategy = config.strategy.asked() if traits else {}
    known = {*relations.faults(strategy)}  # which the strategy's own check reports
    yield from (fault for fault in relations.faults(strategy | asked) if fault not in known)
    if traits:
        yield from relations.strategy_faults(asked, config.strategy.name, traits.refuses)


def _batch_faults(config: TrainConfig, replicas: int) -> Iterator[str]:
    sizes = (config.global_batch_size, config.per_replica_batch_size)
    if min(sizes) > 0 or max(sizes) == 0:
        yield (
            "Exactly one of global_batch_size and per_replica_batch_size must be set; the other must be 0. "
            f"Received: {sizes[0]} and {sizes[1]}."
        )
    elif replicas:
        yield from divisibility_faults(config.global_batch_size, replicas)


def _callback_faults(config: TrainConfig) -> Iterator[str]:
    for name, metric in dict.fromkeys(callbacks.monitored(config.callbacks)):
        yield from _metric_faults(config, f"callbacks: {name} monitors {format_value(metric)}", metric)
    names = [name for name, _ in callbacks.parse(config.callbacks)]
    if (
        "SwapEMAWeights" in names
        and ":" not in config.optimizer.name
        and not config.optimizer.arguments().get("use_ema")
    ):
        yield "callbacks: SwapEMAWeights needs optimizer.use_ema, but it is False; set it to True, or remove the callback."
    if "RemoteMonitor" in names and not importlib.util.find_spec("requests"):
        yield "callbacks: RemoteMonitor needs the package requests, which is not installed; install it, or remove the callback."


def _metric_faults(config: TrainConfig, monitored: str, metric: str) -> Iterator[str]:
    if not metric.startswith("val_"):
        return
    if not _has_eval_data(config):
        yield f"{monitored}, but task {config.task!r} has no method eval_data; add one, or use a metric of the training, such as loss."
    if config.validation_freq > config.epochs:
        yield f"{monitored}, but no epoch is validated: validation_freq is {config.validation_freq} and epochs {config.epochs}."


def _has_eval_data(config: TrainConfig) -> bool:
    try:
        method = getattr(registry.resolve("task", config.task, registry.TASKS), "eval_data", None)
    except ConfigError:  # the task is unknown, which is reported elsewhere
        return True
    return method is not None and method.__module__ != _BASE_OF_TASKS


def _task_faults(config: TrainConfig) -> Iterator[str]:
    try:
        task = registry.resolve("task", config.task, registry.TASKS)
    except ConfigError as e:
        yield from e.faults
        return
    expected = getattr(task, "Options", None)
    missing = [name for name in ("build_model", "compile_arguments", "train_data") if not hasattr(task, name)]
    if missing or not isinstance(expected, type):
        name = next(iter(missing), "Options")
        yield f"task {config.task!r} is not a tfdist.Task: it has no {name!r}."
        return
    options = config.task_options
    try:
        if options is None:
            options = default_options(config.task, expected)
    except ConfigError as e:
        yield from e.faults
        return
    faults = getattr(options, "faults", None)
    if not isinstance(options, expected):
        yield (
            f"task {config.task!r} takes task_options of {_full_name(expected)}. "
            f"Received: {_full_name(type(options))}; set task and task_options together, in the config file."
        )
    elif callable(faults):
        yield from faults()


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _workers_faults(
    config: TrainConfig, traits: StrategyTraits, workers: WorkerRange | None, in_cluster: bool
) -> Iterator[str]:
    if traits.asynchronous:
        if config.cluster.ps == 0 and not in_cluster:
            yield f"strategy {config.strategy.name!r} needs a parameter server: use --config.cluster.ps=1 or more. Received: 0."
    elif config.cluster.ps > 0:
        yield (
            f"strategy {config.strategy.name!r} has no parameter servers, but cluster.ps is {config.cluster.ps}; use "
            "--config.strategy.name=parameter_server, or leave cluster.ps at 0."
        )
    elif workers and workers.most > 1 and not traits.several_processes:
        yield (
            f"strategy {config.strategy.name!r} trains in one process, but cluster.workers is {config.cluster.workers}; "
            "use --config.strategy.name=multi_worker_mirrored, or leave cluster.workers at 1."
        )


def _evaluator_faults(config: TrainConfig) -> Iterator[str]:
    if config.cluster.evaluator < 1:
        return
    if not _has_eval_data(config):
        yield (
            f"cluster.evaluator needs validation data, but task {config.task!r} has no method eval_data; add one, or leave "
            "cluster.evaluator at 0."
        )


def _known_replicas(strategy: StrategyConfig, traits: StrategyTraits, workers: int) -> int:
    """Returns the number of replicas if it is known without TensorFlow, else 0."""
    if strategy.replicas and traits.mirrors:
        return max(strategy.replicas, 0)
    devices = 0
    if strategy.virtual_cpus <= MAX_VIRTUAL_CPUS:  # more are an error of their own
        devices = len(strategy.device_names)
    if traits.several_processes:
        # Without names, a worker has a replica for each GPU. The number of GPUs is unknown here, so the
        # batch must only be divisible by `workers`.
        return max(workers, 0) * max(devices, 1)
    if traits.asynchronous or traits.devices == "one":  # each step runs on one worker, or on one device
        return 1
    if traits.devices == "each":
        return devices
    return 0


def divisibility_faults(batch_size: int, replicas: int) -> Iterator[str]:
    """Yields the error for a global batch size that the replicas do not divide."""
    if batch_size % replicas == 0:
        return
    above = -(-batch_size // replicas) * replicas
    choice = f"{above}"
    if above > replicas:
        choice = f"{above - replicas} or {above}"
    yield f"global_batch_size {batch_size} is not divisible by {replicas} replicas; use {choice}."


def per_replica_batch_size(global_batch_size: int, num_replicas: int) -> int:
    """Returns the examples per step of each replica.

    Raises:
        ConfigError: The replicas do not divide the batch. An uneven split would weigh examples unequally.
    """
    faults = list(divisibility_faults(global_batch_size, num_replicas))
    if faults:
        raise ConfigError(faults)
    return global_batch_size // num_replicas
