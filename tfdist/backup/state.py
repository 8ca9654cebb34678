"""The state of a training run between two steps: its variables, and the state and logs of its callbacks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Json, Logs
from tfdist.backup import pieces
from tfdist.compat import optimizer_search, piece_optimizer
from tfdist.compat.keras_internals import CALLBACK_STATE, SEED_STATE, STATELESS_ATTRIBUTES
from tfdist.compat.split_value import SplitValue, held, is_split, read_part
from tfdist.errors import ConfigError, format_value
from tfdist.layers.table import with_tables
from tfdist.replicas import random_seeds
from tfdist.replicas.moving_statistics import MovingStatistics
from tfdist.runtime.files import write_error_reason
from tfdist.runtime.log import logger
from tfdist.sharding.split import shape_of

REST = "rest"  # state that is not a tensor, as JSON
_GLOBAL_SEED = "global seed"  # of this thread's `keras.random`
_OF_REPLICA = re.compile(r"replica-(\d+)/(.*)", re.DOTALL)
_ARRAY, _PAIRS, _SCALAR = "array:", "pairs:", "scalar:"


class TrainingState:
    """Captures and restores the state of a built and compiled model and of its callbacks on this rank.

    Attributes:
        resizes: Whether the state to restore is of a run with another number of replicas; set by the caller.
    """

    def __init__(self, model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]):
        self._strategy = model.distribute_strategy
        self._statistics: MovingStatistics = self._strategy.statistics
        self._callbacks = dict(_stateful_callbacks(callbacks))
        self._unsaved_callbacks = [c for c in callbacks if c not in self._callbacks.values()]
        self._ignored: set[str] = set()
        self.resizes = False
        self._variables: dict[str, Any] = dict(named_variables(model))
        self._replicas = [0]
        if self._strategy.num_replicas_in_sync > 1 and not self._strategy.traits.asynchronous:
            self._replicas = self._strategy.local_replicas
        slots = {
            id(held(v))
            for optimizer in optimizer_search.optimizers(model)
            for v in piece_optimizer.state_variables(optimizer)
        }
        # The optimizer of a worker that trains alone has its own slots.
        own_slots = slots if self._strategy.trains_alone else set()
        self._per_replica = {
            name
            for name, variable in self._variables.items()
            if not is_split(variable)
            and (id(variable) in own_slots or _is_per_replica(variable, is_slot=id(variable) in slots))
        }

    def signature(self) -> dict[str, str]:
        """Returns each variable's shape and type, by name."""
        forms = {}
        for name, variable in self._variables.items():
            shape = variable.split.shape if is_split(variable) else variable.shape
            forms[name] = f"{tf.as_dtype(variable.dtype).name}{list(shape)}"
        return forms

    def capture(self, logs: Logs = None, to_host: bool = True) -> tuple[dict[str, Any], dict[str, tf.Tensor]]:
        """Returns the state that all ranks share and this rank's own state, which includes the last step's `logs`.

        `to_host` copies the values of other devices to the host. Values are not copied within a device: TensorFlow copies a variable
        at its next change if the old value is still in use. A large table on servers is not read here: the shared state has `ServerRows`,
        and no step may run until they are written.
        """
        self._statistics.show_shared()
        shared: dict[str, Any] = {}
        own: dict[str, tf.Tensor] = {}
        with tf.device("CPU:0"):
            for name, variable in self._variables.items():
                if is_split(variable):
                    shared[pieces.shape_key(name)] = tf.constant(variable.split.shape, tf.int64)
                    part = own if variable.is_divided else shared
                    part |= self._pieces(name, variable, to_host)
                    continue
                values = [component.read_value() for component in self._components(variable)]
                if to_host:
                    values = [tf.identity(value) for value in values]
                if name in self._per_replica:
                    own |= self._by_replica(name, values)
                else:
                    shared[name] = values[0]
            seed = random_seeds.global_seed(self._strategy)
            if seed is not None:
                seeds = [tf.identity(component) for component in self._components(seed)]
                # The map of a dataset may have made Keras create it, outside of the strategy: then the replicas share one.
                own |= self._by_replica(_GLOBAL_SEED, seeds * (len(self._replicas) // len(seeds)))
            arrays: dict[str, np.ndarray] = {}
            callback_states = {name: _to_json(_get_state(c), name, arrays) for name, c in self._callbacks.items()}
            rest = {
                "callbacks": callback_states,
                "synchronized": self._statistics.synchronized,
                "features": {feature.name: feature.state() for feature in self._strategy.features},
                "logs": _to_json(logs, "logs", arrays),
            }
            own |= {_ARRAY + name: tf.convert_to_tensor(array) for name, array in arrays.items()}
            own[REST] = tf.constant(json.dumps(rest))
        return shared, own

    def _pieces(self, name: str, value: SplitValue, to_host: bool) -> Iterator[tuple[str, Any]]:
        """Yields the keys and pieces of a split value that this process stores. The chief may not be able to hold a large table on servers."""
        on_servers = value.is_large and self._strategy.traits.asynchronous
        for index, variable in value.stored():
            key = pieces.piece_key(index, name)
            if on_servers:
                yield key, pieces.ServerRows(variable, shape_of(index))
                continue
            piece = read_part(index, variable)
            yield key, tf.identity(piece) if to_host else piece

    def check(self) -> None:
        """Raises ConfigError if the callbacks' present state cannot be backed up."""
        for name, callback in self._callbacks.items():
            _to_json(_get_state(callback), name, {})

    def restore(self, shared: Mapping[str, np.ndarray], own: Mapping[str, np.ndarray]) -> Logs:
        """Restores a state that `capture` has returned; the variables must have the same names and shapes. Returns the logs.

        If the number of replicas has changed, `own` is the state of all of them.
        """
        by_name: dict[str, dict[int, np.ndarray]] = {name: {0: value} for name, value in shared.items()}
        for key, value in own.items():
            match = _OF_REPLICA.fullmatch(key)
            if match:
                by_name.setdefault(match[2], {})[int(match[1])] = value
        for name, variable in self._variables.items():
            self._assign(name, variable, by_name[name])
        if _GLOBAL_SEED in by_name:
            seed = random_seeds.global_seed(self._strategy, makes=True)
            self._assign(_GLOBAL_SEED, seed, by_name[_GLOBAL_SEED])
        rest = json.loads(np.asarray(own[REST]).item())
        arrays = {name.removeprefix(_ARRAY): value for name, value in own.items() if name.startswith(_ARRAY)}
        for name, callback in self._callbacks.items():
            if name in rest["callbacks"]:
                self._ignored |= set_callback_state(callback, _from_json(rest["callbacks"][name], arrays))
        self._statistics.synchronized = rest["synchronized"]
        # Backups of earlier versions hold the state of the only feature with one under its name.
        states = rest.get("features", rest)
        for feature in self._strategy.features:
            feature.restore(states.get(feature.name))
        return _from_json(rest["logs"], arrays)

    def _by_replica(self, name: str, values: Iterable[tf.Tensor]) -> dict[str, tf.Tensor]:
        return {replica_key(replica, name): value for replica, value in zip(self._replicas, values, strict=True)}

    def _assign(self, name: str, variable: tf.Variable, values: Mapping[int, np.ndarray]) -> None:
        """Assigns saved values to a variable of this run. `values` has a value for each replica; a shared value has the key 0."""
        if is_split(variable):
            variable.assign(np.asarray(values[0]))
            return
        components = self._components(variable)
        if name not in self._per_replica and name != _GLOBAL_SEED:
            new = [_combined(variable, values)] * len(components)
        elif set(self._replicas) <= set(values) and not self.resizes:
            new = [values[replica] for replica in self._replicas]
        else:
            new = [_for_replica(name, variable, values, replica) for replica in self._replicas]
        for component, value in zip(components, new, strict=True):
            component.assign(value)

    def local_variables(self) -> list[tf.Variable]:
        """Returns this process's components of all variables that `capture` reads."""
        variables = list(self._variables.values())
        seed = random_seeds.global_seed(self._strategy)
        if seed is not None:
            variables.append(seed)
        return [component for variable in variables for component in self._components(variable)]

    def ignored_attributes(self) -> list[str]:
        """Returns the attributes of callbacks that a backup contains and that `restore` has not set."""
        return sorted(self._ignored)

    def unsaved_callbacks(self) -> list[str]:
        """Returns the classes of the user's callbacks that may have state that backups do not hold."""
        return sorted(
            {
                type(callback).__qualname__
                for callback in users_callbacks(self._unsaved_callbacks)
                if vars(callback).keys() - STATELESS_ATTRIBUTES
            }
        )

    def _components(self, variable: tf.Variable | SplitValue) -> Sequence[tf.Variable]:
        """Returns the variables on the devices of this process."""
        if is_split(variable):
            return variable.components()
        components: Sequence[tf.Variable] = self._strategy.experimental_local_results(variable)
        return components


def replica_key(replica: int, name: str) -> str:
    """Returns the key of a replica's value of a variable in a backup."""
    return f"replica-{replica}/{name}"


def is_of_replica(key: str) -> bool:
    """Returns whether a tensor in a backup is the state of one replica, rather than of a task."""
    return _OF_REPLICA.fullmatch(key) is not None


def replicas_of(own: Iterable[str]) -> dict[str, list[int]]:
    """Returns, for each variable, the replicas whose values are in a backup's part with the keys `own`."""
    replicas: dict[str, list[int]] = {}
    for match in filter(None, map(_OF_REPLICA.fullmatch, own)):
        replicas.setdefault(match[2], []).append(int(match[1]))
    return replicas


def _for_replica(name: str, variable: tf.Variable, values: Mapping[int, np.ndarray], replica: int) -> Any:
    """Returns the value for one replica from a backup of another number of replicas.

    The mean or sum over the replicas does not change. Each replica's seed is computed from the first replica's.
    """
    if SEED_STATE in name or name == _GLOBAL_SEED:
        first, counter = values[min(values)]
        return np.array([int(first) + replica * random_seeds.SEED_STRIDE, int(counter)]).astype(values[0].dtype)
    total = _combined(variable, values)
    # The first replica has the sum of all, so that it does not change.
    if replica and variable.aggregation == tf.VariableAggregation.SUM:
        return np.zeros_like(total)
    return total


def _combined(variable: tf.Variable, values: Mapping[int, np.ndarray]) -> np.ndarray:
    """Combines the replicas' values of a variable: returns their sum, their mean, or the first one."""
    stacked = np.stack([values[replica] for replica in sorted(values)])
    if variable.aggregation == tf.VariableAggregation.SUM:
        return stacked.sum(0, dtype=stacked.dtype)
    if variable.aggregation == tf.VariableAggregation.MEAN and variable.dtype.is_floating:
        return stacked.mean(0, dtype=np.float64).astype(stacked.dtype)
    return stacked[0]


def users_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Returns the callbacks whose class is neither Keras' nor tfdist's."""
    return [c for c in callbacks if not type(c).__module__.startswith(("keras.", "tfdist."))]


def named_variables(model: keras.Model) -> Iterator[tuple[str, tf.Variable | SplitValue]]:
    """Yields (name, variable) once for every variable; the next run of the same program yields the same names, with any number of shards."""
    optimizers = optimizer_search.optimizers(model)
    known = [
        *model.variables,
        *model.metrics_variables,
        *(v for o in optimizers for v in piece_optimizer.state_variables(o)),
    ]
    named: list[tuple[str, Any]] = []
    parts: set[int] = set()  # which TensorFlow finds, too
    for variable in with_tables(known, optimizers):
        named.append((variable.path, held(variable)))
        if is_split(variable):
            parts |= set(map(id, variable.variables()))
    # Keras does not know variables that the user or a compressor has created with TensorFlow.
    for root in (model, *optimizers):
        tracked = tf.train.TrackableView(root).descendants()
        named += [(v.name, v) for v in tracked if isinstance(v, tf.Variable) and id(v) not in parts]
    unique = {id(variable): (name, variable) for name, variable in reversed(named)}
    for number, (name, variable) in enumerate(reversed(unique.values())):
        yield f"{number}/{name}", variable


def _is_per_replica(variable: tf.Variable, is_slot: bool) -> bool:
    """Returns whether each replica has a separate value: statistics, metrics, seeds, and counters of a step."""
    if getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ:
        return True
    return not is_slot and not variable.trainable and variable.aggregation == tf.VariableAggregation.NONE


def _stateful_callbacks(
    callbacks: Sequence[keras.callbacks.Callback],
) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    """Yields (name, callback) for the callbacks whose state is saved; the name is the class and a number, from 1."""
    counts: dict[str, int] = {}
    for callback in callbacks:
        if hasattr(callback, "state_dict") or isinstance(callback, tuple(CALLBACK_STATE)):
            name = type(callback).__qualname__
            counts[name] = counts.get(name, 0) + 1
            yield f"{name}-{counts[name]}", callback


def _get_state(callback: keras.callbacks.Callback) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for kind, names in CALLBACK_STATE.items():
        if isinstance(callback, kind):
            # `_to_json` copies the lists, because training changes them while the backup is written.
            state |= {name: getattr(callback, name) for name in names if hasattr(callback, name)}
    if hasattr(callback, "state_dict"):
        state["state_dict"] = callback.state_dict()
    return state


def set_callback_state(callback: keras.callbacks.Callback, state: dict[str, Any]) -> set[str]:
    """Restores the attributes that `_get_state` saves; returns the names of others in `state`: a file must not choose attributes."""
    kinds = (names for kind, names in CALLBACK_STATE.items() if isinstance(callback, kind))
    known = {name for names in kinds for name in names}
    if "state_dict" in state and hasattr(callback, "state_dict"):
        callback.load_state_dict(state["state_dict"])
    for name in known & state.keys():
        setattr(callback, name, state[name])
    return {f"{type(callback).__name__}.{name}" for name in state.keys() - known - {"state_dict"}}


def _to_json(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Json:
    """Returns a value as plain JSON. Arrays are added to `arrays`, and the JSON has their names."""
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value) or value.keys() & {_ARRAY, _PAIRS, _SCALAR}:
            return {_PAIRS: _to_json(list(value.items()), name, arrays)}
        return {key: _to_json(item, f"{name}/{key}", arrays) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item, f"{name}/{number}", arrays) for number, item in enumerate(value)]
    if isinstance(value, (np.floating, np.integer, np.bool_)):
        # Keras sets a scalar weight only to a value with a shape.
        return {_SCALAR: [value.dtype.name, value.item()]}
    if isinstance(value, np.generic):
        return str(value)
    if isinstance(value, (np.ndarray, tf.Tensor, tf.Variable, keras.Variable)):
        try:
            arrays[name] = np.array(value)
            tf.convert_to_tensor(arrays[name])
        except (TypeError, ValueError, tf.errors.OpError) as e:
            raise _unstorable(name, value) from e
        return {_ARRAY: name}
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise _unstorable(name, value)


def _unstorable(name: str, value: Any) -> ConfigError:
    return ConfigError(
        f"The state of callbacks cannot be backed up: {name} is a {type(value).__name__}. Let state_dict() return numbers, texts, "
        f"None, arrays of numbers or texts, and lists and dicts of them. Received: {format_value(value)}."
    )


def _from_json(value: Any, arrays: Mapping[str, np.ndarray]) -> Json:
    if isinstance(value, dict):
        if set(value) == {_ARRAY}:
            return arrays[value[_ARRAY]]
        if set(value) == {_SCALAR}:
            dtype, number = value[_SCALAR]
            return np.dtype(dtype).type(number)
        if set(value) == {_PAIRS}:
            return dict(_from_json(value[_PAIRS], arrays))
        return {key: _from_json(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item, arrays) for item in value]
    return value


def csv_loggers(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.CSVLogger]:
    """Returns the callbacks that log to CSV files."""
    return [callback for callback in callbacks if isinstance(callback, keras.callbacks.CSVLogger)]


def cut_log(callback: keras.callbacks.CSVLogger, epoch: int) -> None:
    """Removes the rows of `epoch` and later, which will be trained again, from an open log.

    If that fails, a warning is logged and the log keeps all rows.
    """

    def is_before(line: str) -> bool:
        first = line.split(callback.sep)[0]
        return first.isdecimal() and int(first) < epoch

    callback.csv_file.flush()
    with tf.io.gfile.GFile(callback.filename) as file:
        lines = file.read().splitlines(keepends=True)
    remaining_lines = lines[:1] + list(filter(is_before, lines[1:]))
    if remaining_lines == lines:
        return
    partial = f"{callback.filename}.partial"
    try:
        with tf.io.gfile.GFile(partial, "w") as file:
            file.write("".join(remaining_lines))
        tf.io.gfile.rename(partial, callback.filename, overwrite=True)
    except (OSError, tf.errors.OpError) as e:
        logger.warning(
            f"cannot write {callback.filename}: {write_error_reason(e)}; the training continues, but the log has two rows for each repeated epoch. "
            "Free the disk."
        )
        try:
            tf.io.gfile.remove(partial)
        except (OSError, tf.errors.OpError):  # it was not created, or the disk fails
            pass
        return
    callback.on_train_begin()  # opens the file again
