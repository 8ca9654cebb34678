"""Judges a `TrainConfig` as a whole: every fault that shows before TensorFlow is loaded, all at once."""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Collection, Iterator
from typing import Any

from tfdist.config import registry
from tfdist.config.batch_size import divisibility_fault
from tfdist.config.strategy import MAX_VIRTUAL_CPUS, STRATEGIES, StrategyConfig
from tfdist.config.train import PRECISIONS, TrainConfig
from tfdist.errors import ConfigError, did_you_mean, format_value, unknown_name_message


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
    if typed("compression"):
        yield from config.compression.faults()
        if typed("strategy") and config.compression.name != "none":
            yield from _compression_faults(config)
    if typed("backup"):
        yield from config.backup.faults()
    if typed("task", "task_options"):
        yield from _task_faults(config)
    if typed("cluster", "strategy"):
        yield from _workers_faults(config, environment_workers is not None)
    if typed("global_batch_size", "per_replica_batch_size"):
        sizes = (config.global_batch_size, config.per_replica_batch_size)
        if min(sizes) != 0 or max(sizes) == 0:
            yield (
                "Exactly one of global_batch_size and per_replica_batch_size must be set, the other be 0. "
                f"Received: {sizes[0]} and {sizes[1]}."
            )
        elif typed("cluster", "strategy"):
            workers = config.cluster.workers if environment_workers is None else environment_workers
            if (replicas := _known_replicas(config.strategy, workers)) and (
                fault := divisibility_fault(sizes[0], replicas)
            ):
                yield fault
    if typed("precision") and config.precision not in PRECISIONS:
        yield unknown_name_message("precision", config.precision, PRECISIONS)
    if typed("jit_compile", "precision", "optimizer", "strategy") and config.strategy.name == "central_storage":
        yield from _central_storage_faults(config)
    if typed("jit_compile", "precision", "optimizer", "strategy") and config.strategy.name == "parameter_server":
        yield from _parameter_server_faults(config)
    least_values = {"epochs": 1, "steps_per_execution": 1, "steps_per_epoch": 0, "grace_seconds": 0, "learning_rate": 0}
    least_values |= {"max_restarts": 0, "start_timeout": 1}
    for name, least in least_values.items():
        if typed(name) and not least <= getattr(config, name) < float("inf"):  # NaN is a fault, too
            yield f"{name} must be {least} or more, and finite. Received: {getattr(config, name)}."
    if typed("seed") and not 0 <= config.seed < 2**31:
        yield f"seed must be 0 to {2**31 - 1}. Received: {config.seed}."


def _workers_faults(config: TrainConfig, in_cluster: bool) -> Iterator[str]:
    workers = config.cluster.workers
    if workers < 1:
        yield f"cluster.workers must be 1 or more. Received: {workers}."
    if config.cluster.ps < 0:
        yield f"cluster.ps must be 0 or more. Received: {config.cluster.ps}."
    if config.strategy.name == "parameter_server":
        if config.cluster.ps == 0 and not in_cluster:
            yield "strategy 'parameter_server' needs a parameter server: use --config.cluster.ps=1 or more. Received: 0."
    elif config.cluster.ps > 0 and config.strategy.name in STRATEGIES:
        yield (
            f"strategy {config.strategy.name!r} has no parameter servers, but cluster.ps is {config.cluster.ps}; use "
            "--config.strategy.name=parameter_server, or leave cluster.ps at 0."
        )
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


def _compression_faults(config: TrainConfig) -> Iterator[str]:
    if config.strategy.name in ("parameter_server", "central_storage", "tpu"):
        yield (
            f"compression {config.compression.name!r} is not possible under {config.strategy.name} (yet); use strategy "
            "multi_worker_mirrored or mirrored, or compression.name=none."
        )


def _parameter_server_faults(config: TrainConfig) -> Iterator[str]:
    remedy = "is not possible under parameter_server, whose workers do not wait for each other; use"
    if config.jit_compile:
        yield "jit_compile is not possible under parameter_server, whose variables are on other machines; leave it out."
    if config.precision == "mixed_float16":
        yield f"precision mixed_float16 {remedy} mixed_bfloat16."
    if config.optimizer.gradient_accumulation_steps:
        yield f"optimizer.gradient_accumulation_steps {remedy} a larger batch."


def _task_faults(config: TrainConfig) -> Iterator[str]:
    try:
        task = registry.resolve("task", config.task, registry.TASKS)
    except ConfigError as e:
        yield from e.faults
        return
    expected = getattr(task, "Options", None)
    lacking = [name for name in ("build_model", "compile_arguments", "train_data") if not hasattr(task, name)]
    if not isinstance(expected, type) or lacking:
        yield f"task {config.task!r} is no tfdist.Task: it has no {lacking[0] if lacking else 'Options'!r}."
        return
    if config.task_options is None:
        try:
            config.choose_task(config.task)
        except ConfigError as e:
            yield from e.faults
            return
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
    if strategy.name in ("one_device", "parameter_server"):  # of which each step is one worker's
        return 1
    if strategy.name in ("mirrored", "central_storage"):
        return len(strategy.device_names) if strategy.virtual_cpus <= MAX_VIRTUAL_CPUS else 0
    # Every worker has at least one replica, more where it has GPUs: only what no number of GPUs can cure is a fault.
    return max(workers, 0) if strategy.name == "multi_worker_mirrored" else 0


def unknown_field(path: str, name: str, known: Collection[str]) -> str:
    """Returns the sentence for a field that a group of fields (or what is no group) has not."""
    fields = f"Known: {', '.join(known)}." if known else "It has no fields."
    return f"{path}: unknown config field {format_value(name)}{did_you_mean(name, known)} {fields}"


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
            yield where, f"{where} must be {expected.__name__}. Received: {format_value(value)}."
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _type_faults(value, where)
