"""Private names of TensorFlow for one process.

A release may move these names: tests/architecture/test_keras_internals.py says which. Only `tfdist/compat` and that test use
the constants that begin with `TF_`. For several processes see `tf_cluster.py`.
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
from tensorflow.python.distribute.distribute_utils import regroup
from tensorflow.python.distribute.values import DistributedVariable, SyncOnReadVariable
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.ops import nn_impl_distribute as average_losses
from tensorflow.python.ops import script_ops
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
    "is_op_determinism_enabled",
    "regroup",
]

EagerTensor = tf.__internal__.EagerTensor
CompositeTensor = tf.__internal__.CompositeTensor
FuncGraph = tf.__internal__.FuncGraph
CheckpointInitialValueCallable = tf.__internal__.tracking.CheckpointInitialValueCallable

PYTHON_FUNCTION_HOLDERS = (script_ops.EagerFunc, tf.data.Dataset._GeneratorState)  # of py_function and from_generator
GENERATOR_STATE = "StateVar"  # the name of a tf.random.Generator's variable


# Strategies and the context

TF_COLLECTIVE_KEYS = "_collective_key_base"


def num_replicas(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of replicas over all workers, also within a step that sees one (`as_one_replica`)."""
    return int(strategy.extended._num_replicas_in_sync)


def set_collective_keys(strategy: tf.distribute.Strategy, first: int) -> None:
    """Sets the first key of a strategy's collectives. Call it before TensorFlow's `__init__`."""
    setattr(strategy, TF_COLLECTIVE_KEYS, first)


def is_started() -> bool:
    """Returns whether TensorFlow has initialized its devices."""
    return eager_context.context()._context_handle is not None


def wait_for_asynchronous_steps() -> None:
    """Waits for asynchronous eager functions, if the user has made TensorFlow asynchronous; raises their errors."""
    eager_context.async_wait()


def is_server_running() -> bool:
    """Returns whether this process runs TensorFlow's server."""
    return eager_context.context()._collective_leader is not None


def global_seed() -> int | None:
    """Returns the seed that `tf.random.set_seed` has set, or None."""
    seed: int | None = eager_context.global_seed()
    return seed


class _ReadableAsNumber:
    """The conversions that every variable of TensorFlow has except those with a copy on each replica."""

    numpy: Callable[[], Any]

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)


_readable: dict[type, type] = {}  # by TensorFlow's class


def make_readable_as_number(variable: tf.Variable) -> tf.Variable:
    """Lets `float`, `int`, `complex` and NumPy read a variable with a copy on each replica. Returns the variable.

    Keras reads its own variables so, as in `float(optimizer.learning_rate)`. The class of this one variable changes to
    a subclass of the same name; TensorFlow's class stays as it is.
    """
    kind = type(variable)
    if isinstance(variable, DistributedVariable) and not isinstance(variable, _ReadableAsNumber):
        if kind not in _readable:
            _readable[kind] = type(kind.__name__, (_ReadableAsNumber, kind), {"__module__": kind.__module__})
        variable.__class__ = _readable[kind]
    return variable


# AutoGraph


def convert_as_caller(function: Function) -> Function:
    """Returns a function that AutoGraph converts if, and only if, it converts the caller."""
    autograph = tf.__internal__.autograph
    converted: Function = autograph.tf_convert(function, autograph.control_status_ctx(), convert_by_default=False)
    return converted


def autograph_as_outside_of_functions() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which AutoGraph behaves as outside of any `tf.function`."""
    context: contextlib.AbstractContextManager[Any] = ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED)
    return context


# Graphs and seeds

TF_GLOBAL_SEED = "_seed"
TF_GRAPH_SEED = "seed"
TF_OUTER_GRAPH = "outer_graph"
TF_TRACED = "_list_all_concrete_functions"


def seed_holder() -> Any:
    """Returns the object that holds the seed of `tf.random.*` here: the graph that is traced, or the eager context."""
    return eager_context.context() if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def get_seed(holder: Any) -> int | None:
    """Returns the seed of a `seed_holder`, or None."""
    seed: int | None = getattr(holder, _seed_name(holder))
    return seed


def set_seed(holder: Any, seed: int | None) -> None:
    """Sets the seed of a `seed_holder`."""
    setattr(holder, _seed_name(holder), seed)


def _seed_name(holder: Any) -> str:
    return TF_GRAPH_SEED if isinstance(holder, tf.Graph) else TF_GLOBAL_SEED


def graph_depth(graph: tf.Graph) -> int:
    """Returns how many traced graphs enclose `graph`, as those of a loop over several steps do."""
    depth = 0
    while (graph := getattr(graph, TF_OUTER_GRAPH, None)) is not None and hasattr(graph, TF_OUTER_GRAPH):
        depth += 1
    return depth


def traced_functions(function: StepFunction) -> Sequence[Any]:
    """Returns the concrete functions of a `tf.function`; of any other object, none."""
    functions: Sequence[Any] = getattr(function, TF_TRACED)() if hasattr(function, TF_TRACED) else ()
    return functions


def operation_definition(kind: str) -> Any:
    """Returns TensorFlow's definition of a type of operation, or None."""
    return op_def_registry.get(kind)


TF_PYTHON_OPS = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}
TF_PYTHON_TOKEN = "token"


def is_python_call(node: tf.compat.v1.NodeDef) -> bool:
    """Returns whether an operation calls Python, as those of `from_generator` and `py_function` do."""
    return node.op in TF_PYTHON_OPS


def python_function(node: tf.compat.v1.NodeDef) -> Function:
    """Returns the Python function that an operation calls, or None if it is gone."""
    return script_ops._py_funcs.get(node.attr[TF_PYTHON_TOKEN].s.decode())


# Datasets

TF_INPUTS = "_inputs"
TF_FUNCTIONS = "_functions"
TF_COUNT = "_count"
TF_BATCH_SIZE = "_batch_size"
TF_PARALLEL = "_num_parallel_calls"
TF_ORDERED = "_deterministic"
TF_NUMBER = "_{}"


def inputs(dataset: tf.data.Dataset) -> Sequence[tf.data.Dataset]:
    """Returns the datasets from which a dataset is made."""
    datasets: Sequence[tf.data.Dataset] = getattr(dataset, TF_INPUTS)()
    return datasets


def dataset_functions(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the concrete functions of a dataset itself, as that of `map`."""
    for wrapper in getattr(dataset, TF_FUNCTIONS)():
        yield wrapper.function


def repeat_count(dataset: RepeatDataset) -> int:
    """Returns how often a dataset repeats its input; -1 for endlessly."""
    return int(getattr(dataset, TF_COUNT))


def own_batch_size(dataset: tf.data.Dataset) -> Any:
    """Returns the batch size of a dataset that `batch` has made, a scalar tensor; None for any other dataset."""
    return getattr(dataset, TF_BATCH_SIZE, None)


def is_parallel(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset calls its function in several threads."""
    return getattr(dataset, TF_PARALLEL, None) is not None


def is_unordered(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset was made with `deterministic=False`."""
    return bool(getattr(dataset, TF_ORDERED, None) == "false")


def dataset_kind(dataset: tf.data.Dataset) -> str:
    """Returns which transformation has made a dataset, as `Shuffle`, or `Batch` also of several threads."""
    return type(dataset).__name__.strip("_").removeprefix("Parallel").removesuffix("Dataset")


def dataset_numbers(dataset: tf.data.Dataset, names: Sequence[str]) -> dict[str, int]:
    """Returns numbers with which a dataset was made, as `seed` and `buffer_size` of one that `shuffle` has made."""
    return {name: int(getattr(dataset, TF_NUMBER.format(name))) for name in names}


def dataset_leaves(structure: Structure) -> list[Structure]:
    """Returns the components of a dataset's input, as `from_tensor_slices` takes it: a list is one of them."""
    leaves: list[Structure] = dataset_nest.flatten(structure)
    return leaves


def dataset_structure(structure: Structure, leaves: Sequence[Structure]) -> Structure:
    """Returns a structure with other components."""
    return dataset_nest.pack_sequence_as(structure, leaves)


_SOURCES = threading.RLock()  # of those that replace them


@contextlib.contextmanager
def replacing_dataset_sources(slices: Function, tensors: Function) -> Iterator[None]:
    """Within it, `tf.data.Dataset.from_tensor_slices` and `from_tensors` are other functions, in all threads.

    Args:
        slices: Is called as `slices(from_tensor_slices, tensors, name=None)`, with TensorFlow's own.
        tensors: Likewise, of `from_tensors`.
    """
    with _SOURCES:
        before = {name: vars(tf.data.Dataset)[name] for name in ("from_tensor_slices", "from_tensors")}
        for (name, own), other in zip(before.items(), (slices, tensors), strict=True):
            replaced = functools.partial(other, getattr(tf.data.Dataset, name))
            setattr(
                tf.data.Dataset,
                name,
                staticmethod(tf.autograph.experimental.do_not_convert(functools.wraps(own)(replaced))),
            )
        try:
            yield
        finally:
            for name, own in before.items():
                setattr(tf.data.Dataset, name, own)


TF_DEVICE_DATASET = "_create_device_dataset"


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset whose parallelism and buffers TensorFlow does not tune while it is read.

    When TensorFlow deletes an iterator, it waits for the thread that tunes, and may fail to wake it: `CancellationManager` calls
    its callbacks before it marks the cancellation for which the thread, once awake, looks. The thread then sleeps on, for up to 60 s.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def stop_autotuning_on_devices() -> None:
    """Turns off autotuning of the datasets, one per device, through which iterators feed several devices. The first call is enough.

    They have nothing to tune. With 16 devices on two cores most epochs ended with a wait for one of their threads.
    """
    create = getattr(multi_device_iterator_ops, TF_DEVICE_DATASET)
    if hasattr(create, "tensorflow_own"):
        return

    @functools.wraps(create)
    def untuned(*args: Any) -> tf.data.Dataset:
        return without_autotuning(create(*args))

    untuned.tensorflow_own = create  # type: ignore[attr-defined]
    setattr(multi_device_iterator_ops, TF_DEVICE_DATASET, untuned)


# Average losses

TF_AVERAGE_ARITHMETIC = "math_ops"
TF_AVERAGE_DIVISION = "div_no_nan"
TF_AVERAGE_COUNTED = "num_replicas"  # a variable of `tf.nn.compute_average_loss` where it counts the examples itself

_averaging = threading.Lock()


class _AverageArithmetic:
    """The arithmetic of `tf.nn.compute_average_loss`, which reports the losses that it has divided by a given batch size.

    The function finds it by a name of its module, so that it is found however a program has imported the function.
    """

    def __init__(self, own: Any, correct: Callable[[Any], Any]):
        self._own = own
        self._correct = correct
        self.uses = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def div_no_nan(self, loss: tf.Tensor, size: Any) -> Any:
        """As TensorFlow's; of a batch size that the caller was given, the result goes through `correct`."""
        value = self._own.div_no_nan(loss, size)
        return value if TF_AVERAGE_COUNTED in sys._getframe(1).f_locals else self._correct(value)


@contextlib.contextmanager
def correcting_average_losses(correct: Callable[[Any], Any]) -> Iterator[None]:
    """Within it, a loss that `tf.nn.compute_average_loss` divides by the `global_batch_size` that it is given is corrected.

    Several threads may be within it at once; the first one's function holds for all, so give the same one.

    Args:
        correct: Returns the replacement of a loss. It is called in all threads.
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
                setattr(average_losses, TF_AVERAGE_ARITHMETIC, current._own)


# Checkpoints


TF_OBJECT_GRAPH = "_graph_view"
Writer = Callable[[Callable[[str], Any], str, Callable[[], Iterable[Any]]], Any]


def replace_checkpoint_writer(write: Writer, device: str | None) -> None:
    """Has `tf.train.Checkpoint`, `CheckpointManager` and SavedModels' variables written by another function.

    The last call holds. Within a graph, where nothing is written yet, TensorFlow goes on as before.

    Args:
        write: Is called as `write(save, prefix, objects)`, where `save(prefix)` is TensorFlow's own, and `objects()` returns the saved objects.
        device: Whose process writes and reads files, unless the user chooses another one; None means that of each variable.
    """
    own_save, own_restore = (getattr(f, "tensorflow_own", f) for f in (TrackableSaver.save, TrackableSaver.restore))

    def with_device(options: Any) -> Any:
        options = copy.copy(options) or tf.train.CheckpointOptions()
        options.experimental_io_device = options.experimental_io_device or device
        return options

    @functools.wraps(own_save)
    def save(self: Any, file_prefix: str | os.PathLike[str], *args: Any, options: Any = None, **kwargs: Any) -> Any:
        if not tf.executing_eagerly() or not isinstance(file_prefix, str) or args or kwargs:
            return own_save(self, file_prefix, *args, options=options, **kwargs)
        save_to = functools.partial(own_save, self, options=with_device(options))
        return write(
            save_to, file_prefix, lambda: tf.train.TrackableView(getattr(self, TF_OBJECT_GRAPH).root).descendants()
        )

    @functools.wraps(own_restore)
    def restore(self: Any, save_path: str | os.PathLike[str], options: Any = None) -> Any:
        return own_restore(self, save_path, with_device(options))

    save.tensorflow_own, restore.tensorflow_own = own_save, own_restore  # type: ignore[attr-defined]
    TrackableSaver.save, TrackableSaver.restore = save, restore


TF_WRITE_SAVED_MODEL = "save_and_return_nodes"


def replace_saved_model_writer(write: Writer) -> None:
    """Makes `tf.saved_model.save`, and its callers such as Keras' `ExportArchive`, write by another function.

    The last call holds.

    Args:
        write: Is called as `write(save, folder, objects)`, where `save(folder)` is TensorFlow's own, and `objects()` returns the saved objects.
    """
    own = getattr(saved_model_save, TF_WRITE_SAVED_MODEL)
    own = getattr(own, "tensorflow_own", own)

    @functools.wraps(own)
    def save(obj: Any, export_dir: str, *args: Any, **kwargs: Any) -> Any:
        return write(
            lambda folder: own(obj, folder, *args, **kwargs), export_dir, tf.train.TrackableView(obj).descendants
        )

    save.tensorflow_own = own  # type: ignore[attr-defined]
    setattr(saved_model_save, TF_WRITE_SAVED_MODEL, save)
