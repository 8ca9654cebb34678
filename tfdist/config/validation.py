"""The validation of a complete `TrainConfig`: all errors that can be detected before TensorFlow is loaded, reported at once."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
import types
import typing
from collections.abc import Collection, Iterator
from typing import Any

from tfdist.config import callbacks, registry
from tfdist.config.cluster import worker_range
from tfdist.config.optimizer import accumulation_fault
from tfdist.config.options import unknown_field
from tfdist.config.ranges import MOST_SECONDS, MOST_STEPS, MOST_TASKS, Range
from tfdist.config.schedule import SCALINGS
from tfdist.config.strategy import MAX_VIRTUAL_CPUS, StrategyConfig
from tfdist.config.strategy_traits import StrategyTraits
from tfdist.config.train import PRECISIONS, TrainConfig, default_options
from tfdist.errors import ConfigError, format_value, unknown_name_message
from tfdist.runtime import storage

NAN_POLICIES = ("ignore", "stop", "skip")  # for a step whose loss or gradient is not finite
_COUNT = Range(1, MOST_STEPS)
_RANGES = {
    **dict.fromkeys(("epochs", "steps_per_execution", "validation_freq"), _COUNT),
    **dict.fromkeys(("steps_per_epoch", "max_restarts"), Range(0, MOST_STEPS)),
    "learning_rate": Range(0, 1e6),
    "start_timeout": Range(1, MOST_SECONDS),
    "grace_seconds": Range(0, MOST_SECONDS),
    "seed": Range(0, MOST_STEPS),
}
_BASE_OF_TASKS = "tfdist.tasks.base"  # a method inherited from there counts as missing


def check(config: TrainConfig, workers: int | None = None, known: Collection[str] = ()) -> None:
    """Raises a `ConfigError` with every error of the configuration that can be found before TensorFlow is loaded.

    Args:
        config: The configuration.
        workers: Number of training tasks of the environment's cluster; 0 means that the cluster is invalid, None that there is no
            such cluster, so that `cluster.workers` applies.
        known: Errors that the caller has found; they come first.
    """
    if faults := [*known, *_faults(config, workers)]:
        raise ConfigError(faults)


def has_wrong_types(config: TrainConfig, *fields: str) -> bool:
    """Returns whether any of the fields, or of the fields in these groups, does not have its declared type.

    Args:
        config: The configuration.
        *fields: The names.
    """
    return _any_is_in(type_faults(config, "config"), fields)


def type_faults(config: Any, path: str) -> dict[str, str]:
    """Returns an error for each field that does not have its declared type, or does not exist, by the field's path.

    Args:
        config: A configuration, or a group of fields.
        path: The path of `config`, such as `"config"`.
    """
    return dict(_type_faults(config, path))


def _any_is_in(paths: Collection[str], fields: Collection[str]) -> bool:
    return any(f"{path}.".startswith(f"config.{field}.") for path in paths for field in fields)


def _faults(config: TrainConfig, workers: int | None) -> Iterator[str]:
    wrong = type_faults(config, "config")
    yield from wrong.values()

    def typed(*fields: str) -> bool:
        """Returns whether the fields have their declared types, so that their values can be checked."""
        return not _any_is_in(wrong, fields)

    traits = None
    if typed("strategy"):
        faults = list(config.strategy.faults())
        yield from faults
        with contextlib.suppress(ConfigError):  # the strategy is unknown, which is reported above
            traits = config.strategy.traits
        tasks = (_most_workers(config) if typed("cluster") else 0) if workers is None else workers
        if not faults and tasks > 0:
            yield from config.strategy.replicas_faults(tasks)
    if typed("optimizer"):
        yield from config.optimizer.faults()
        steps = config.steps_per_epoch * config.epochs if typed("epochs", "steps_per_epoch") else 0
        accumulated = config.optimizer.arguments().get("gradient_accumulation_steps", 0)
        if steps > 0 and isinstance(accumulated, int) and (fault := accumulation_fault(accumulated, steps)):
            yield fault
    if typed("schedule"):
        yield from config.schedule.faults()
    if typed("learning_rate_scaling"):
        if config.learning_rate_scaling not in SCALINGS:
            yield unknown_name_message("learning_rate_scaling", config.learning_rate_scaling, SCALINGS)
        elif config.learning_rate_scaling != "none" and traits and traits.asynchronous:
            yield (
                f"learning_rate_scaling {config.learning_rate_scaling!r} is not possible under {config.strategy.name}, where "
                "each step runs on one worker; use none."
            )
    if typed("compression"):
        yield from config.compression.faults()
        if traits and not traits.compresses and config.compression.name != "none":
            yield (
                f"compression {config.compression.name!r} is not possible under {config.strategy.name} (yet); use strategy "
                "multi_worker_mirrored or mirrored, or compression.name=none."
            )
    if typed("backup"):
        yield from config.backup.faults()
    if typed("export"):
        yield from config.export.faults()
        if typed("task", "epochs", "validation_freq"):
            best = config.export.best
            yield from _metric_faults(config, f"export.best is {format_value(best)}", best)
    if typed("monitoring"):
        yield from config.monitoring.faults()
    if typed("task", "task_options"):
        yield from _task_faults(config)
    if typed("cluster", "strategy"):
        yield from _workers_faults(config, traits, workers is not None)
    if typed("cluster", "backup", "task"):
        yield from _evaluator_faults(config)
    if typed("global_batch_size", "per_replica_batch_size"):
        sizes = (config.global_batch_size, config.per_replica_batch_size)
        if min(sizes) < 0:
            for field in ("global_batch_size", "per_replica_batch_size"):
                yield from Range(0, MOST_STEPS).faults(field, getattr(config, field))
        elif min(sizes) != 0 or max(sizes) == 0:
            yield (
                "Exactly one of global_batch_size and per_replica_batch_size must be set; the other must be 0. "
                f"Received: {sizes[0]} and {sizes[1]}."
            )
        elif max(sizes) not in _COUNT:
            field = "global_batch_size" if sizes[0] else "per_replica_batch_size"
            yield from _COUNT.faults(field, max(sizes))
        elif typed("cluster") and traits:
            tasks = _most_workers(config) if workers is None else workers
            if (replicas := _known_replicas(config.strategy, traits, tasks)) and (
                fault := divisibility_fault(sizes[0], replicas)
            ):
                yield fault
    if typed("precision") and config.precision not in PRECISIONS:
        yield unknown_name_message("precision", config.precision, PRECISIONS)
    if typed("initial_weights") and (path := config.initial_weights):
        url_faults = list(storage.faults("initial_weights", path))
        yield from url_faults
        if not url_faults and not path.endswith((".weights.h5", ".keras")):
            yield f"initial_weights must be a file .weights.h5 or .keras. Received: {format_value(path)}."
    if typed("callbacks"):
        yield from (callback_faults := list(callbacks.faults(config.callbacks)))
        if not callback_faults and typed("task", "epochs", "validation_freq", "optimizer"):
            yield from _callback_faults(config)
    if typed("nan_policy", "strategy"):
        yield from nan_policy_faults(config.nan_policy, config.strategy.name, traits)
    if typed("jit_compile", "precision", "optimizer") and traits:
        yield from _refused_option_faults(config, traits)
    for name, allowed in _RANGES.items():
        if typed(name):
            yield from allowed.faults(name, getattr(config, name))


def _type_faults(config: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields (path, message) for unknown attributes and values of the wrong type: a config file may assign anything."""
    hints = typing.get_type_hints(type(config))
    fields = {field.name: field for field in dataclasses.fields(config)}
    for name in getattr(config, "__dict__", ()):  # a class with slots has no `__dict__`
        # Private attributes, and attributes of the class (a cached property), are not misspelled fields.
        if name not in fields and not name.startswith("_") and not hasattr(type(config), name):
            yield f"{path}.{name}", unknown_field(f"{path}.{name}", config, name)
    for field in fields.values():
        value, expected = getattr(config, field.name), hints[field.name]
        if typing.get_origin(expected) is dict:
            expected = dict
        if typing.get_origin(expected) in (typing.Union, types.UnionType) and type(None) in typing.get_args(expected):
            if value is None:
                continue
            expected = next(kind for kind in typing.get_args(expected) if kind is not type(None))
        where = f"{path}.{field.name}"
        number = isinstance(value, int) and not isinstance(value, bool)
        if expected is float and number and abs(value) <= sys.float_info.max:
            continue
        if (
            isinstance(expected, (type, types.UnionType))
            and expected is not Any  # `Any` is a class since Python 3.11
            and (not isinstance(value, expected) or (expected is int and isinstance(value, bool)))
        ):
            yield where, f"{where} must be {getattr(expected, '__name__', expected)}. Received: {format_value(value)}."
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _type_faults(value, where)


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
    with contextlib.suppress(ConfigError):  # the task is unknown, which is reported elsewhere
        method = getattr(registry.resolve("task", config.task, registry.TASKS), "eval_data", None)
        return method is not None and method.__module__ != _BASE_OF_TASKS
    return True


def _task_faults(config: TrainConfig) -> Iterator[str]:
    try:
        task = registry.resolve("task", config.task, registry.TASKS)
    except ConfigError as e:
        yield from e.faults
        return
    expected = getattr(task, "Options", None)
    missing = [name for name in ("build_model", "compile_arguments", "train_data") if not hasattr(task, name)]
    if not isinstance(expected, type) or missing:
        yield f"task {config.task!r} is not a tfdist.Task: it has no {missing[0] if missing else 'Options'!r}."
        return
    try:
        options = default_options(config.task, expected) if config.task_options is None else config.task_options
    except ConfigError as e:
        yield from e.faults
        return
    if not isinstance(options, expected):
        yield (
            f"task {config.task!r} takes task_options of {_full_name(expected)}. "
            f"Received: {_full_name(type(options))}; set task and task_options together, in the config file."
        )
    elif callable(faults := getattr(options, "faults", None)):
        yield from faults()


def _full_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _workers_faults(config: TrainConfig, traits: StrategyTraits | None, in_cluster: bool) -> Iterator[str]:
    workers = None
    try:
        workers = worker_range(config.cluster.workers)
    except ConfigError as e:
        yield from e.faults
    yield from Range(0, MOST_SECONDS).faults("cluster.join_seconds", config.cluster.join_seconds)
    yield from Range(0, MOST_TASKS).faults("cluster.ps", config.cluster.ps)
    if traits is None:
        return
    if workers and workers.is_elastic and not in_cluster:
        yield from _elastic_faults(config, traits)
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


def _most_workers(config: TrainConfig) -> int:
    try:
        return worker_range(config.cluster.workers).most
    except ConfigError:  # reported elsewhere
        return 0


def _elastic_faults(config: TrainConfig, traits: StrategyTraits) -> Iterator[str]:
    asked = f"cluster.workers={config.cluster.workers}"
    if traits.asynchronous:
        yield (
            f"{asked} is for synchronous workers; under {config.strategy.name!r} a lost worker starts again alone, and the others train on: "
            "give one number, and max_restarts."
        )
        return
    if config.backup.save_freq == "never":
        yield (
            f"{asked} continues from backups, but backup.save_freq is 'never'; use --config.backup.save_freq=epoch or a number of steps."
        )
    if config.strategy.devices:
        yield (
            f"{asked} changes each worker's number of replicas, which strategy.devices fixes; use --config.strategy.replicas=N, the number "
            "of replicas of all workers, instead."
        )


def _evaluator_faults(config: TrainConfig) -> Iterator[str]:
    number = config.cluster.evaluator
    for name in ("evaluator", "warm"):
        if (value := getattr(config.cluster, name)) not in (0, 1):
            yield f"cluster.{name} must be 0 or 1. Received: {format_value(value)}."
    if number < 1:
        return
    if config.backup.save_freq == "never":
        yield (
            "cluster.evaluator evaluates backups, but backup.save_freq is 'never'; use --config.backup.save_freq=epoch or a "
            "number of steps, or leave cluster.evaluator at 0."
        )
    if not _has_eval_data(config):
        yield (
            f"cluster.evaluator needs validation data, but task {config.task!r} has no method eval_data; add one, or leave "
            "cluster.evaluator at 0."
        )


def _known_replicas(strategy: StrategyConfig, traits: StrategyTraits, workers: int) -> int:
    """Returns the number of replicas if it is known without TensorFlow, else 0."""
    if strategy.replicas and traits.mirrors:
        return max(strategy.replicas, 0)
    if traits.several_processes:
        # Without names, a worker has a replica for each GPU. The number of GPUs is unknown here, so the
        # batch must only be divisible by `workers`.
        return max(workers, 0) * (len(strategy.device_names) or 1 if strategy.virtual_cpus <= MAX_VIRTUAL_CPUS else 1)
    if traits.asynchronous or traits.devices == "one":  # each step runs on one worker, or on one device
        return 1
    return len(strategy.device_names) if traits.devices == "each" and strategy.virtual_cpus <= MAX_VIRTUAL_CPUS else 0


def divisibility_fault(batch_size: int, replicas: int) -> str:
    """Returns the error for a global batch size that the replicas do not divide, or an empty text."""
    if batch_size % replicas == 0:
        return ""
    below = batch_size // replicas * replicas
    choice = f"{below} or {below + replicas}" if below else f"{replicas}"
    return f"global_batch_size {batch_size} is not divisible by {replicas} replicas; use {choice}."


def per_replica_batch_size(global_batch_size: int, num_replicas: int) -> int:
    """Returns the examples per step of each replica.

    Raises:
        ConfigError: The replicas do not divide the batch. An uneven split would weigh examples unequally.
    """
    if fault := divisibility_fault(global_batch_size, num_replicas):
        raise ConfigError(fault)
    return global_batch_size // num_replicas


def nan_policy_faults(policy: str, strategy: str, traits: StrategyTraits | None) -> Iterator[str]:
    """Yields an error for a NaN policy that is unknown, or impossible under the strategy.

    Args:
        policy: The policy.
        strategy: The strategy's name.
        traits: The strategy's traits, or None if they are unknown.
    """
    if policy not in NAN_POLICIES:
        yield unknown_name_message("nan_policy", policy, NAN_POLICIES)
    elif policy == "skip" and traits and traits.asynchronous:
        yield (
            f"nan_policy 'skip' is not possible under {strategy}, whose workers update variables that are on other machines; use "
            "'stop', which looks at the loss, or 'ignore'."
        )


def _refused_option_faults(config: TrainConfig, traits: StrategyTraits) -> Iterator[str]:
    optimizer = config.optimizer.arguments()
    asked = {
        "jit_compile": ("jit_compile", config.jit_compile),
        "mixed_float16": ("precision mixed_float16", config.precision == "mixed_float16"),
        "use_ema": ("optimizer.use_ema", optimizer.get("use_ema")),
        "gradient_accumulation_steps": (
            "optimizer.gradient_accumulation_steps",
            optimizer.get("gradient_accumulation_steps"),
        ),
    }
    for option, (field, is_set) in asked.items():
        if is_set and option in traits.refuses:
            yield f"{field} is not possible under {config.strategy.name}, {traits.refuses[option]}."
