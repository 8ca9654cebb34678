"""Errors for uses that Keras 3 or TensorFlow do not support with several replicas, raised before a crash or a wrong result."""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import types
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdist.aliases import Data
from tfdist.compat import keras_internals, keras_loops, model_features
from tfdist.compat.optimizer_search import optimizers
from tfdist.config import relations
from tfdist.errors import ConfigError
from tfdist.runtime.log import logger

_OUTSIDE = "A {} was created outside of this trainer's scope (it has {}): create it in `with trainer.scope():`."
NO_LABELS = (
    "The data have no labels, which the compiled loss needs: give y, or a dataset of pairs (x, y); for a model that computes its loss itself "
    "(add_loss), compile without a loss."
)
UNBUILT = "The optimizer {} must be built before fit: optimizer.build(variables) in `with trainer.scope():`."
_BUILT_OUTSIDE = "An optimizer was built outside of the scope in which it was created: call optimizer.build(variables) in `with trainer.scope():`."
_UNKNOWN_OPTIMIZER = (
    "The training step applies an optimizer{} that the model does not hold, so its gradients cannot be averaged over the "
    "replicas: create it in `with trainer.scope():`, build it, and keep it in an attribute of the model, or in `uses` of "
    "trainer.step."
)
_NEWEST_COMPILED = (9, 0)  # compute capability of the newest GPUs for which TensorFlow is built: Hopper
_NO_DEVICES = "destinations can not be empty"  # from the sum of gradients, if no replica runs
_NO_SCOPE = 'Need to be inside "with strategy.scope()"'
_NESTED_GRAPH = "called while defining a new graph"
_NO_REPLICA = ("is not available outside the replica context", "'NoneType' object has no attribute 'merge_call'")


def check_own_loop(error: Exception) -> None:
    """Explains the errors of TensorFlow and Keras for a step that runs outside of replicas.

    Raises:
        ConfigError: `error` is such an error.
    """
    if any(words in str(error) for words in _NO_REPLICA):
        raise ConfigError(
            "A custom loop takes gradients, or applies an optimizer, outside of the replicas: put the step into a function, "
            "create step = trainer.step(function, uses=[model, optimizer]), and call step(batch)."
        ) from error


def check_applied(optimizer: keras.optimizers.Optimizer) -> None:
    """Rejects an optimizer that a step of the Trainer applies, but that the model does not hold.

    Such an optimizer would sum the replicas' gradients without averaging: N times the gradients of one device.

    Raises:
        ConfigError: `gradients/optimizer.py` does not reduce this optimizer's gradients.
    """
    if not keras_internals.has_replaced_reduction(optimizer):
        raise ConfigError(_UNKNOWN_OPTIMIZER.format(f", {type(optimizer).__name__},"))


def check_traced(error: Exception) -> None:
    """Explains the error for a traced step in which an optimizer that the model does not hold reduces gradients.

    Raises:
        ConfigError: `error` is this error.
    """
    if str(error) == _NO_DEVICES:
        raise ConfigError(_UNKNOWN_OPTIMIZER.format("")) from error


@contextlib.contextmanager
def explaining_branches() -> Iterator[None]:
    """Raises an error with a remedy if an optimizer is applied in a nested graph, where replicas cannot reduce.

    Raises:
        ConfigError: The code in the context reduces gradients within `tf.cond`, `tf.while_loop` or a nested `tf.function`.
    """
    try:
        yield
    except RuntimeError as e:
        if _NESTED_GRAPH not in str(e):
            raise
        raise ConfigError(
            "The training step applies an optimizer within tf.cond, tf.while_loop, an `if` on a tensor or a nested tf.function, where "
            "replicas cannot sum gradients: apply it in each step, outside of them. To update every n steps, give the optimizer "
            "gradient_accumulation_steps=n; to skip an update, multiply the gradients by 0."
        ) from e


def explain_builds(extended: tf.distribute.StrategyExtended) -> None:
    """Makes the creation of an optimizer's variables outside of a strategy's scope raise a ConfigError with the remedy."""
    colocate = extended.colocate_vars_with

    @functools.wraps(colocate)
    def colocate_vars_with(variable: tf.Variable) -> contextlib.AbstractContextManager[None]:
        try:
            context: contextlib.AbstractContextManager[None] = colocate(variable)
        except RuntimeError as e:
            if _NO_SCOPE not in str(e):
                raise
            raise ConfigError(_BUILT_OUTSIDE) from e
        return context

    extended.colocate_vars_with = colocate_vars_with


def check_model(model: keras.Model) -> None:
    """Raises an error for uses of a model that the Trainer does not support.

    Raises:
        ConfigError: The model has such uses; the error names all.
    """
    faults = list(_model_faults(model))
    if faults:
        raise ConfigError(faults)


def warn_of_new_gpus(model: keras.Model) -> None:
    """Warns, once, if XLA is to compile a model for a GPU that is newer than TensorFlow's XLA (tensorflow#111958)."""
    if not model.jit_compile:
        return
    for gpu in tf.config.get_visible_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        if details.get("compute_capability", (0, 0)) > _NEWEST_COMPILED:
            _warn_of_gpu(details.get("device_name", gpu.name), details["compute_capability"])


@functools.cache
def _warn_of_gpu(name: str, capability: tuple[int, int]) -> None:
    logger.warning(
        f"jit_compile=True on {name} (compute capability {capability[0]}.{capability[1]}): XLA of TensorFlow {tf.__version__} may fail to "
        "compile for so new a GPU, which ends the process (tensorflow#111958). In that case compile the model with jit_compile=False."
    )


def _model_faults(model: keras.Model) -> Iterator[str]:
    strategy = model.distribute_strategy
    for optimizer in optimizers(model):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if not keras_internals.is_created_in_scope(inner, strategy):
            yield (
                f"The optimizer {type(inner).__name__} was created outside of this trainer's scope: create it in "
                "`with trainer.scope():`, or give its name."
            )
    asked = {strategy.config.name: "", **model_features.of_model(model)}
    if strategy.traits.asynchronous:
        yield from _parameter_server_faults(model)
        yield from relations.faults({"parameter_server": strategy.config.name, **asked}, "parameter_server")
    # What follows concerns only sums over replicas.
    if strategy.num_replicas_in_sync == 1:
        return
    metric_variables = [variable for metric in model.metrics for variable in metric.variables]
    for kind, variables in (("metric", metric_variables), ("layer", model.weights)):
        outside = [
            v.path
            for v in variables
            if getattr(keras_internals.raw_value(v), "distribute_strategy", None) is not strategy
        ]
        if outside:
            yield _OUTSIDE.format(kind, outside[0])
    yield from relations.faults({"several_replicas": "", **asked})
    yield from relations.strategy_faults(asked, strategy.config.name, strategy.traits.refuses)


def _parameter_server_faults(model: keras.Model) -> Iterator[str]:
    outside = [
        v.path for v in model.weights if "/job:ps" not in v.value.device and v.name != keras_internals.SEED_STATE
    ]
    if outside:
        yield _OUTSIDE.format("layer", outside[0])


def check_data(strategy: tf.distribute.Strategy, data: Data) -> None:
    """Rejects data that are not batches, or that each worker would draw independently. `data` may be Keras' data adapter for them.

    Raises:
        ConfigError: `data` is a dataset of single examples, or comes from Python under several workers.
    """
    if isinstance(data, tf.data.Dataset):
        specs = [spec for spec in tf.nest.flatten(data.element_spec) if isinstance(spec, tf.TensorSpec)]
        if any(spec.shape.rank == 0 for spec in specs):
            raise ConfigError(
                f"The dataset must hold batches: call its batch(). Received elements {data.element_spec}."
            )
    kind = type(data).__name__
    is_iterator = isinstance(data, collections.abc.Iterator) and not isinstance(data, types.GeneratorType)
    draws = is_iterator or kind == "DataLoader" or keras_loops.reads_python(data)
    if draws and strategy.traits.several_processes and strategy.num_workers > 1:
        raise ConfigError(
            f"Data from Python ({kind.removesuffix('Adapter')}) cannot be split among workers: each would draw batches of "
            "its own. Give arrays, a tf.data.Dataset that is the same on all workers, or give tfdist.Trainer a function "
            "(tf.distribute.InputContext) -> tf.data.Dataset that returns one worker's batches."
        )
