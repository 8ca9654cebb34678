"""Private names of TensorFlow for one process.

A TensorFlow release may move these names: tests/architecture/test_keras_internals.py then fails and names them. The constants
that begin with `TF_` are private names; only `tfdist/compat` and that test use them. For several processes see `tf_cluster.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.checkpoint.checkpoint import TrackableSaver
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.data.ops.cache_op import CacheDataset
from tensorflow.python.data.ops.random_op import _RandomDataset as RandomDataset
from tensorflow.python.data.ops.repeat_op import _RepeatDataset as RepeatDataset
from tensorflow.python.data.ops.shuffle_op import _ShuffleDataset as ShuffleDataset
from tensorflow.python.data.util import nest as dataset_nest
from tensorflow.python.distribute.distribute_lib import get_update_replica_id
from tensorflow.python.distribute.distribute_utils import regroup
from tensorflow.python.distribute.values import DistributedVariable, SyncOnReadVariable
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import op_def_registry, random_seed
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.ops import nn_impl_distribute as average_losses
from tensorflow.python.ops import script_ops
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph
from tensorflow.python.saved_model import save as saved_model_save

from tfdist.aliases import Function, StepFunction, Structure

__all__ = [
    "CacheDataset",
    "RandomDataset",
    "RepeatDataset",
    "ShuffleDataset",
    "SyncOnReadVariable",
    "average_losses",
    "eager_context",
    "get_update_replica_id",
    "is_op_determinism_enabled",
    "regroup",
]

EagerTensor = tf.__internal__.EagerTensor
CompositeTensor = tf.__internal__.CompositeTensor
FuncGraph = tf.__internal__.FuncGraph
CheckpointInitialValueCallable = tf.__internal__.tracking.CheckpointInitialValueCallable

PYTHON_FUNCTION_HOLDERS = (script_ops.EagerFunc, tf.data.Dataset._GeneratorState)  # for py_function and from_generator
GENERATOR_STATE = "StateVar"  # the name of a tf.random.Generator's variable


# Strategies and the context

TF_COLLECTIVE_KEYS = "_collective_key_base"


def num_replicas(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of replicas over all workers, even within `as_one_replica`, where the step sees only one."""
    return int(strategy.extended._num_replicas_in_sync)


def all_reduce(op: tf.distribute.ReduceOp, values: Structure) -> Structure:
    """Returns values reduced over all replicas, as `ReplicaContext.all_reduce` does, but without a gradient.

    TensorFlow's registry of gradients would keep the caller's graph, and the variables that it captures, until the process ends.
    """
    extended = tf.distribute.get_strategy().extended
    if extended._use_merge_call():
        return tf.distribute.StrategyExtended._replica_ctx_all_reduce(extended, op, values)
    return extended._replica_ctx_all_reduce(op, values)


def set_collective_keys(strategy: tf.distribute.Strategy, first: int) -> None:
    """Sets the key from which a strategy numbers its collectives. Call it before TensorFlow's `__init__`."""
    setattr(strategy, TF_COLLECTIVE_KEYS, first)


def is_started() -> bool:
    """Returns whether TensorFlow has initialized its devices."""
    return eager_context.context()._context_handle is not None


def wait_for_asynchronous_steps() -> None:
    """Waits until all asynchronous eager operations have run (if the user has enabled them), and raises their errors."""
    eager_context.async_wait()


def is_server_running() -> bool:
    """Returns whether this process runs TensorFlow's server."""
    return eager_context.context()._collective_leader is not None


def global_seed() -> int | None:
    """Returns the seed that `tf.random.set_seed` has set, or None."""
    seed: int | None = eager_context.global_seed()
    return seed


class _ReadableAsNumber:
    """The number conversions of `tf.Variable`, which distributed variables (one copy per replica) lack."""

    numpy: Callable[[], Any]

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)


_readable: dict[type, type] = {}  # TensorFlow's class -> its readable subclass


def make_readable_as_number(variable: tf.Variable) -> tf.Variable:
    """Makes a distributed variable convertible by `float`, `int`, `complex` and NumPy, in place. Returns the variable.

    Keras needs it, as in `float(optimizer.learning_rate)`. Only this variable's class changes, to a subclass of the same name;
    TensorFlow's class stays unchanged.
    """
    cls = type(variable)
    if isinstance(variable, DistributedVariable) and not isinstance(variable, _ReadableAsNumber):
        if cls not in _readable:
            _readable[cls] = type(cls.__name__, (_ReadableAsNumber, cls), {"__module__": cls.__module__})
        variable.__class__ = _readable[cls]
    return variable


# AutoGraph


def convert_as_caller(function: Function) -> Function:
    """Wraps a function so that AutoGraph converts it if and only if it converts the caller."""
    autograph = tf.__internal__.autograph
    converted: Function = autograph.tf_convert(function, autograph.control_status_ctx(), convert_by_default=False)
    return converted


def autograph_as_outside_of_functions() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which AutoGraph behaves as if called outside of any `tf.function`."""
    context: contextlib.AbstractContextManager[Any] = ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED)
    return context


def is_within(graph: tf.Graph) -> bool:
    """Returns whether code is traced in a graph, or in a loop or branch of it, and not in a `tf.function` within."""
    inner = tf.compat.v1.get_default_graph()
    while inner is not graph and isinstance(inner, ControlFlowFuncGraph):
        inner = getattr(inner, TF_OUTER_GRAPH)
    return inner is graph


# Graphs and seeds

TF_GLOBAL_SEED = "_seed"
TF_GRAPH_SEED = "seed"
TF_OUTER_GRAPH = "outer_graph"
TF_TRACED = "_list_all_concrete_functions"


def seed_holder() -> Any:
    """Returns the object that holds the current seed of `tf.random.*`: the graph being traced, or the eager context."""
    if tf.executing_eagerly():
        return eager_context.context()
    return tf.compat.v1.get_default_graph()


def get_seed(holder: Any) -> int | None:
    """Returns the seed of a `seed_holder`, or None."""
    seed: int | None = getattr(holder, _seed_name(holder))
    return seed


def set_seed(holder: Any, seed: int | None) -> None:
    """Sets the seed of a `seed_holder`."""
    setattr(holder, _seed_name(holder), seed)


def get_draws(holder: Any) -> int:
    """Returns the number of random operations of a traced graph so far, which TensorFlow makes part of the seed of the next one."""
    if not isinstance(holder, tf.Graph):
        return 0
    return int(random_seed._graph_to_seed_dict.get(holder, 0))


def set_draws(holder: Any, count: int) -> None:
    """Sets the number of random operations of a traced graph. The eager context keeps its own."""
    if isinstance(holder, tf.Graph):
        random_seed._graph_to_seed_dict[holder] = count


def _seed_name(holder: Any) -> str:
    return TF_GRAPH_SEED if isinstance(holder, tf.Graph) else TF_GLOBAL_SEED


def written_handles(graph: tf.Graph) -> set[int]:
    """Returns the ids of the handles of outer variables that a function's graph writes, also within its own functions."""
    written = {id(handle) for op in graph.get_operations() for handle in get_read_write_resource_inputs(op)[1]}
    return {id(outer) for outer, inner in graph.captures if id(inner) in written}


def graph_depth(graph: tf.Graph) -> int:
    """Returns how many function graphs enclose `graph`: 1 in the body of a `tf.while_loop` of a function."""
    depth = 0
    outer = getattr(graph, TF_OUTER_GRAPH, None)
    while hasattr(outer, TF_OUTER_GRAPH):  # the graph around all functions has no such attribute
        depth += 1
        outer = getattr(outer, TF_OUTER_GRAPH)
    return depth


def traced_functions(function: StepFunction) -> Sequence[Any]:
    """Returns the concrete functions of a `tf.function`, or an empty sequence for any other object."""
    list_functions: Callable[[], Sequence[Any]] = getattr(function, TF_TRACED, tuple)
    return list_functions()


def operation_definition(op_type: str) -> Any:
    """Returns TensorFlow's definition of an operation type such as `MatMul`, or None."""
    return op_def_registry.get(op_type)


TF_PYTHON_OPS = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}
TF_PYTHON_TOKEN = "token"


def is_python_call(node: tf.compat.v1.NodeDef) -> bool:
    """Returns whether an operation calls Python, like those of `from_generator` and `py_function`."""
    return node.op in TF_PYTHON_OPS


def python_function(node: tf.compat.v1.NodeDef) -> Function:
    """Returns the Python function that an operation calls, or None if it was garbage-collected."""
    return script_ops._py_funcs.get(node.attr[TF_PYTHON_TOKEN].s.decode())


# Datasets

TF_INPUTS = "_inputs"
TF_FUNCTIONS = "_functions"
TF_COUNT = "_count"
TF_BATCH_SIZE = "_batch_size"
TF_PARALLEL = "_num_parallel_calls"
TF_ORDERED = "_deterministic"
TF_NUMBER = "_{}"
TF_TENSORS = "_tensors"


def inputs(dataset: tf.data.Dataset) -> Sequence[tf.data.Dataset]:
    """Returns the input datasets of a dataset."""
    datasets: Sequence[tf.data.Dataset] = getattr(dataset, TF_INPUTS)()
    return datasets


def dataset_functions(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the concrete functions of a dataset, such as the one of `map`, without those of its inputs."""
    for wrapper in getattr(dataset, TF_FUNCTIONS)():
        yield wrapper.function


def dataset_tensors(dataset: tf.data.Dataset) -> Sequence[tf.Tensor]:
    """Returns the tensors of a `from_tensor_slices` or `from_tensors` dataset; those of another dataset are none."""
    tensors: Sequence[tf.Tensor] = getattr(dataset, TF_TENSORS, ())
    return tensors


def repeat_count(dataset: RepeatDataset) -> int:
    """Returns the count of a `repeat` dataset; -1 means endless."""
    return int(getattr(dataset, TF_COUNT))


def own_batch_size(dataset: tf.data.Dataset) -> Any:
    """Returns the batch size, a scalar tensor, of a `batch` dataset; None for any other dataset."""
    return getattr(dataset, TF_BATCH_SIZE, None)


def is_parallel(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset calls its function in parallel (`num_parallel_calls`)."""
    return getattr(dataset, TF_PARALLEL, None) is not None


def is_unordered(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset was made with `deterministic=False`."""
    return bool(getattr(dataset, TF_ORDERED, None) == "false")


def dataset_kind(dataset: tf.data.Dataset) -> str:
    """Returns the name of the transformation that made a dataset: `Shuffle`, or `Batch` for a `ParallelBatchDataset`, too."""
    return type(dataset).__name__.strip("_").removeprefix("Parallel").removesuffix("Dataset")


def dataset_numbers(dataset: tf.data.Dataset, names: Sequence[str]) -> dict[str, int]:
    """Returns integer arguments of a dataset, such as `seed` and `buffer_size` of `shuffle`, by name."""
    return {name: int(getattr(dataset, TF_NUMBER.format(name))) for name in names}


def dataset_leaves(structure: Structure) -> list[Structure]:
    """Flattens a structure as `from_tensor_slices` does: a list is one component, not a structure."""
    leaves: list[Structure] = dataset_nest.flatten(structure)
    return leaves


def dataset_structure(structure: Structure, leaves: Sequence[Structure]) -> Structure:
    """Packs components into a structure: the inverse of `dataset_leaves`."""
    return dataset_nest.pack_sequence_as(structure, leaves)


_SOURCES = threading.RLock()  # held while `from_tensor_slices` and `from_tensors` are replaced


@contextlib.contextmanager
def replacing_dataset_sources(slices: Function, tensors: Function) -> Iterator[None]:
    """Replaces `tf.data.Dataset.from_tensor_slices` and `from_tensors` in all threads, within the context.

    Both replacements are called as `slices(original, tensors, name=None)`.
    """
    with _SOURCES:
        originals = {name: vars(tf.data.Dataset)[name] for name in ("from_tensor_slices", "from_tensors")}
        for (name, original), replacement in zip(originals.items(), (slices, tensors), strict=True):
            bound = functools.wraps(original)(functools.partial(replacement, getattr(tf.data.Dataset, name)))
            setattr(tf.data.Dataset, name, staticmethod(tf.autograph.experimental.do_not_convert(bound)))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(tf.data.Dataset, name, original)


TF_DEVICE_DATASET = "_create_device_dataset"


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without autotuning of parallelism and buffers.

    With autotuning, deleting an iterator may block for up to 60 s. TensorFlow joins the tuning thread, but `CancellationManager`
    calls the callback that wakes the thread before it sets the cancelled flag, so the thread may go back to sleep.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def stop_autotuning_on_devices() -> None:
    """Turns off autotuning of the per-device datasets inside iterators that feed several devices. Further calls do nothing.

    These datasets have no parameters to tune. With 16 devices on two cores, most epochs ended with a wait for a tuning thread.
    """
    create = getattr(multi_device_iterator_ops, TF_DEVICE_DATASET)
    if hasattr(create, "tensorflow_own"):
        return

    @functools.wraps(create)
    def untuned(*args: Any) -> tf.data.Dataset:
        # TensorFlow cannot optimize them either, and would log so.
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False
        return without_autotuning(create(*args)).with_options(options)

    untuned.tensorflow_own = create  # type: ignore[attr-defined]
    setattr(multi_device_iterator_ops, TF_DEVICE_DATASET, untuned)


# Average losses

TF_AVERAGE_ARITHMETIC = "math_ops"
TF_AVERAGE_DIVISION = "div_no_nan"
TF_AVERAGE_COUNTED = "num_replicas"  # a local of `tf.nn.compute_average_loss` if it computes the batch size itself

_averaging = threading.Lock()


class _AverageArithmetic:
    """Replaces the module `math_ops` as seen by `tf.nn.compute_average_loss`, to correct its division.

    The function looks the module up in its globals, so this works however a program has imported the function.
    """

    def __init__(self, math_ops: Any, correct: Callable[[Any], Any]):
        self.math_ops = math_ops
        self._correct = correct
        self.uses = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.math_ops, name)

    def div_no_nan(self, loss: tf.Tensor, size: Any) -> Any:
        """Divides as `math_ops` does; corrects the quotient if `compute_average_loss` was called with a `global_batch_size`."""
        value = self.math_ops.div_no_nan(loss, size)
        if TF_AVERAGE_COUNTED in sys._getframe(1).f_locals:
            return value
        return self._correct(value)


@contextlib.contextmanager
def correcting_average_losses(correct: Callable[[Any], Any]) -> Iterator[None]:
    """Corrects losses that `tf.nn.compute_average_loss` divides by an explicit `global_batch_size`, within the context.

    `correct` takes a divided loss and returns its replacement. Several threads may enter the context at once. The `correct` of the first thread
    applies to all threads, so pass the same function in each.
    """
    with _averaging:
        current = getattr(average_losses, TF_AVERAGE_ARITHMETIC)
        if not isinstance(current, _AverageArithmetic):
            current = _AverageArithmetic(current, correct)
            setattr(average_losses, TF_AVERAGE_ARITHMETIC, current)
        current.uses += 1
    try:
        yield
    finally:
        with _averaging:
            current.uses -= 1
            if not current.uses:
                setattr(average_losses, TF_AVERAGE_ARITHMETIC, current.math_ops)


# Checkpoints


TF_OBJECT_GRAPH = "_graph_view"
Writer = Callable[[Callable[[str], Any], str, Callable[[], Iterable[Any]]], Any]


def replace_checkpoint_writer(write: Writer, device: str | None) -> None:
    """Makes `tf.train.Checkpoint`, `CheckpointManager` and `tf.saved_model.save` write variables through `write`.

    A later call replaces `write`. In graph mode, where saving only adds operations, TensorFlow's own function is called.

    It calls `write(save, prefix, objects)`: `save(prefix)` is TensorFlow's function, `objects()` returns the saved objects. The process of
    `device` reads and writes files, unless the user sets a device; None means each variable's device.
    """
    own_save = _tensorflow_own(TrackableSaver.save)
    own_restore = _tensorflow_own(TrackableSaver.restore)

    def with_device(options: Any) -> Any:
        options = copy.copy(options) or tf.train.CheckpointOptions()
        options.experimental_io_device = options.experimental_io_device or device
        return options

    @functools.wraps(own_save)
    def save(self: Any, file_prefix: str | os.PathLike[str], *args: Any, options: Any = None, **kwargs: Any) -> Any:
        if not tf.executing_eagerly() or not isinstance(file_prefix, str) or args or kwargs:
            return own_save(self, file_prefix, *args, options=options, **kwargs)
        save_to = functools.partial(own_save, self, options=with_device(options))
        root = getattr(self, TF_OBJECT_GRAPH).root
        return write(save_to, file_prefix, tf.train.TrackableView(root).descendants)

    @functools.wraps(own_restore)
    def restore(self: Any, save_path: str | os.PathLike[str], options: Any = None) -> Any:
        return own_restore(self, save_path, with_device(options))

    save.tensorflow_own = own_save  # type: ignore[attr-defined]
    restore.tensorflow_own = own_restore  # type: ignore[attr-defined]
    TrackableSaver.save = save
    TrackableSaver.restore = restore


def _tensorflow_own(function: Function) -> Function:
    """Returns TensorFlow's own function in place of a replacement of it."""
    own: Function = getattr(function, "tensorflow_own", function)
    return own


TF_WRITE_SAVED_MODEL = "save_and_return_nodes"


def replace_saved_model_writer(write: Writer) -> None:
    """Makes `tf.saved_model.save`, and its callers such as Keras' `ExportArchive`, write through `write`.

    A later call replaces `write`, which is called as in `replace_checkpoint_writer`, with a folder in place of the prefix.
    """
    own_save = _tensorflow_own(getattr(saved_model_save, TF_WRITE_SAVED_MODEL))

    @functools.wraps(own_save)
    def save(obj: Any, export_dir: str, *args: Any, **kwargs: Any) -> Any:
        def save_to(folder: str) -> Any:
            return own_save(obj, folder, *args, **kwargs)

        return write(save_to, export_dir, tf.train.TrackableView(obj).descendants)

    save.tensorflow_own = own_save  # type: ignore[attr-defined]
    setattr(saved_model_save, TF_WRITE_SAVED_MODEL, save)
