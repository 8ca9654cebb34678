"""Private names of Keras' models, layers, optimizers, variables and callbacks.

A release may move these names: tests/architecture/test_keras_internals.py then fails and names them. Only `tfdist/compat` and that test use
the constants that begin with `KERAS_`. For losses see `keras_losses.py`, for Keras' loop over data `keras_loops.py`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state, masking, symbolic_scope
from keras.src.backend.common.variables import AutocastScope
from keras.src.legacy.saving import legacy_h5_format
from keras.src.models.functional import Functional
from keras.src.saving import saving_lib

from tfdist.aliases import Function, Gradient, Variables

# Names of variables.
SEED_STATE = "seed_generator_state"
GRADIENT_ACCUMULATOR = "gradient_accumulator"
OPTIMIZER_SCALARS = ("iteration", "learning_rate")

Method = Function


# Models and layers

KERAS_MAKE_FUNCTION = "_make_function"
KERAS_MOMENTS = "_moments"
_MAKE_PREDICTION = "_tfdist_make_prediction"
KERAS_DECORATED = "fn"  # in Keras' decorator `filter_traceback`


def layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """Yields a model and its layers, the nested ones included."""
    layers_of_model: Iterator[keras.layers.Layer] = model._flatten_layers()
    return layers_of_model


def graph_calls(model: keras.layers.Layer) -> list[tuple[Any, list[Any], list[Any]]]:
    """Returns the calls of a functional or sequential model, in their order: (operation, its input tensors, its output tensors).

    Empty for other layers, and for models with a `call` of their own.
    """
    graph = getattr(model, "_functional", model)
    if not isinstance(graph, Functional) or type(model).call not in (Functional.call, keras.Sequential.call):
        return []
    depths = sorted(graph._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in graph._nodes_by_depth[depth]]
    return [(node.operation, node.input_tensors, node.output_tensors) for node in nodes]


def attention_parts(layer: keras.layers.Layer) -> tuple[list[Any], Any, Any]:
    """Returns the layers of a MultiHeadAttention or GroupedQueryAttention: the projections to heads, the dropout, and the output's."""
    projections = [layer._query_dense, layer._key_dense, layer._value_dense]
    gate = getattr(layer, "_gate_dense", None)
    return projections + ([gate] if gate else []), layer._dropout_layer, layer._output_dense


def copy_mask(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Gives a tensor the mask of another one. Returns it."""
    mask = masking.get_keras_mask(source)
    if mask is not None:
        masking.set_keras_mask(target, mask)
    return target


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Returns the arguments of a model's last `compile`, each time the same dict; empty if the model was not compiled."""
    arguments: dict[str, Any] = getattr(getattr(model, "_compile_config", None), "config", {})
    return arguments


def is_keras_method(model: keras.Model, name: str) -> bool:
    """Returns whether a model has Keras' own method of this name: no class and no assignment to the object overrides it."""
    return getattr(getattr(model, name), "__func__", None) is getattr(keras.Model, name)


def has_replaced_make_function(model: keras.Model) -> bool:
    """Returns whether `replace_make_function` was called for a model."""
    return KERAS_MAKE_FUNCTION in vars(model)


def make_function(model: keras.Model) -> Method:
    """Returns the method with which a model creates its training and test functions from a step."""
    method: Method = getattr(model, KERAS_MAKE_FUNCTION)
    return method


def replace_make_function(model: keras.Model, new: Method) -> None:
    """Replaces the method with which a model creates its training and test functions from a step."""
    setattr(model, KERAS_MAKE_FUNCTION, new)


def replace_make_prediction(model: keras.Model, new: Method) -> None:
    """Sets the function with which `make_predict_function` of a model makes its prediction function (see `strategies/model_methods.py`)."""
    setattr(model, _MAKE_PREDICTION, new)


def make_prediction(model: keras.Model) -> Method | None:
    """Returns the function that `replace_make_prediction` has set for a model, or None."""
    return getattr(model, _MAKE_PREDICTION, None)


def moments(layer: keras.layers.Layer) -> Method:
    """Returns the method with which a BatchNormalization layer computes mean and variance."""
    method: Method = getattr(layer, KERAS_MOMENTS)
    return method


def has_replaced_moments(layer: keras.layers.Layer) -> bool:
    """Returns whether `replace_moments` was called for a layer."""
    return KERAS_MOMENTS in vars(layer)


def replace_moments(layer: keras.layers.Layer, new: Method) -> None:
    """Replaces the method with which a BatchNormalization layer computes mean and variance."""
    setattr(layer, KERAS_MOMENTS, new)


def inherited_method(name: str) -> Function | None:
    """Returns the method that `keras.Model` inherits; None if it defines the method itself."""
    return next((vars(base)[name] for base in keras.Model.__mro__[1:] if name in vars(base)), None)


def decorated_function_cell(method: Function) -> types.CellType | None:
    """Returns the cell that holds the function that Keras' filter of tracebacks calls; None for a method without this decorator."""
    cells = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=True))
    return cells.get(KERAS_DECORATED)


# Files

# The writers behind `Model.save`, `save_weights`, `keras.saving.*` and `keras.models.save_model`, which look the writers up in these modules.
KERAS_WRITERS = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
)


def replace_writers(make: Callable[[Method], Method]) -> None:
    """Replaces the functions with which Keras writes models and weights. Further calls do nothing.

    `make` takes one of Keras' writers and returns its replacement; both are called as `writer(saveable, filepath, ...)`.
    """
    for module, name in KERAS_WRITERS:
        original = getattr(module, name)
        if not hasattr(original, "keras_own"):
            writer = make(original)
            writer.keras_own = original  # type: ignore[attr-defined]
            setattr(module, name, writer)


# Optimizers

KERAS_REDUCTION = "_all_reduce_sum_gradients"
KERAS_UPDATE = "_backend_apply_gradients"
KERAS_CLIP = "_clip_gradients"
KERAS_UPDATE_SCALED = "_stateful_handle_finite_grads"
KERAS_SKIP_SCALED = "_stateful_handle_non_finite_grads"
KERAS_WEIGHT_DECAY = "_apply_weight_decay"
KERAS_DECAYS = "_use_weight_decay"
KERAS_UPDATE_VARIABLES = "_backend_update_step"
KERAS_UPDATE_STEP = "update_step"
KERAS_MOVE_AVERAGES = "_update_model_variables_moving_average"
KERAS_OVERWRITE = "_overwrite_model_variables_with_average_value"
KERAS_TRAINABLE = "_trainable_variables"
KERAS_VARIABLES = "_variables"
KERAS_RATE = "_learning_rate"


def is_created_in_scope(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether an optimizer was created in the scope of a strategy."""
    return bool(strategy.extended.variable_created_in_scope(step_counter(optimizer).value))


def trainable_variables(optimizer: keras.optimizers.Optimizer) -> Variables:
    """Returns the variables that an optimizer was built with."""
    variables: Sequence[Any] = getattr(optimizer, KERAS_TRAINABLE)
    return variables


def slots(optimizer: keras.optimizers.Optimizer) -> Iterator[tuple[keras.Variable, str, keras.Variable]]:
    """Yields (variable, kind, slot) for each slot of an optimizer that has the shape of its variable; gradient accumulators and averages included."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    variables = trainable_variables(optimizer)
    known = {id(variable) for variable in optimizer.variables}
    for kind, held in vars(optimizer).items():
        if kind == KERAS_VARIABLES or not isinstance(held, list) or len(held) != len(variables):
            continue
        for variable, slot in zip(variables, held, strict=True):
            if id(slot) in known and slot.shape == variable.shape:
                yield variable, kind, slot


def variable_index(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> int:
    """Returns the index of a variable in `trainable_variables`. Raises KeyError if the optimizer was built without it."""
    for index, candidate in enumerate(trainable_variables(optimizer)):
        if candidate is variable:
            return index
    raise KeyError(variable)


def variable_key(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> str:
    """Returns the key by which an optimizer knows a variable."""
    key: str = optimizer._var_key(variable)
    return key


def step_counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Returns the variable that counts an optimizer's steps. The optimizer's property `iterations` counts updates: fewer, if it accumulates."""
    return next(v for v in optimizer.variables if v.name == OPTIMIZER_SCALARS[0])


def learning_rate(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the variable or schedule of an optimizer's learning rate. Keras' property `learning_rate` returns the current value."""
    return getattr(getattr(optimizer, "inner_optimizer", optimizer), KERAS_RATE)


def accumulators(optimizer: keras.optimizers.Optimizer) -> Variables:
    """Returns the variables in which an optimizer adds up gradients, one for each of `trainable_variables`."""
    return [v for v in optimizer.variables if v.name.endswith(GRADIENT_ACCUMULATOR)]


def clip_method(optimizer: keras.optimizers.Optimizer) -> Method:
    """Returns the method that clips a list of gradients."""
    method: Method = getattr(optimizer, KERAS_CLIP)
    return method


def replace_clip(optimizer: keras.optimizers.Optimizer, new: Method) -> None:
    """Replaces the method that clips a list of gradients."""
    setattr(optimizer, KERAS_CLIP, new)


def clip_unless(optimizer: keras.optimizers.Optimizer, is_clipped: Callable[[], bool]) -> None:
    """Makes an optimizer clip gradients as Keras does only while `is_clipped` is false: its arguments may change."""
    own = functools.partial(getattr(type(optimizer), KERAS_CLIP), optimizer)
    replace_clip(optimizer, lambda grads: list(grads) if is_clipped() else own(grads))


def update_method(optimizer: keras.optimizers.Optimizer) -> Method:
    """Returns the method that updates variables with gradients: accumulation, clipping, weight decay and averages included."""
    method: Method = getattr(optimizer, KERAS_UPDATE)
    return method


def replace_update(optimizer: keras.optimizers.Optimizer, new: Method) -> None:
    """Replaces the method that `update_method` returns."""
    setattr(optimizer, KERAS_UPDATE, new)


def update_variables(optimizer: keras.optimizers.Optimizer, grads: Sequence[Gradient], variables: Variables) -> None:
    """Applies one update as Keras does: clips the gradients, decays the weights, and updates the variables."""
    grads = clip_method(optimizer)(grads)
    getattr(optimizer, KERAS_WEIGHT_DECAY)(variables)
    getattr(optimizer, KERAS_UPDATE_VARIABLES)(grads, variables, optimizer.learning_rate)


def before_variable_update(optimizer: keras.optimizers.Optimizer, call: Callable[[list[Gradient]], object]) -> None:
    """Makes an optimizer call a function with the gradients of each update, in place."""
    update = getattr(optimizer, KERAS_UPDATE_VARIABLES)

    def calling(grads: Sequence[Gradient], variables: Variables, learning_rate: Any) -> None:
        call(list(grads))
        update(grads, variables, learning_rate)

    setattr(optimizer, KERAS_UPDATE_VARIABLES, calling)


def moving_average_method(optimizer: keras.optimizers.Optimizer) -> Method:
    """Returns the method that updates the moving averages of a list of variables."""
    method: Method = getattr(optimizer, KERAS_MOVE_AVERAGES)
    return method


def overwrite_method(optimizer: keras.optimizers.Optimizer) -> Method:
    """Returns the method that overwrites a list of variables with their moving averages."""
    method: Method = getattr(optimizer, KERAS_OVERWRITE)
    return method


def replace_overwrite(optimizer: keras.optimizers.Optimizer, new: Method) -> None:
    """Replaces the method that `overwrite_method` returns; `finalize_variable_values` calls it, too."""
    setattr(optimizer, KERAS_OVERWRITE, new)


def has_replaced_reduction(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether `replace_reduction` was called for an optimizer."""
    return KERAS_REDUCTION in vars(optimizer)


def replace_reduction(optimizer: keras.optimizers.Optimizer, new: Method) -> None:
    """Replaces the method that sums a list of (gradient, variable) pairs over the replicas."""
    setattr(optimizer, KERAS_REDUCTION, new)


def apply_scaled(
    optimizer: keras.optimizers.LossScaleOptimizer,
    grads: Sequence[Gradient],
    variables: Variables | None,
    finite: tf.Tensor,
    cond: Callable[..., None],
) -> None:
    """Updates with scaled gradients if all of them are `finite`, as `LossScaleOptimizer.apply` does. In replica context.

    `cond` replaces `tf.cond`, which does not order the collectives of an update among those around it.
    """

    def apply(strategy: tf.distribute.Strategy, grads: Sequence[Gradient], variables: Variables | None) -> None:
        call = strategy.extended.call_for_each_replica
        update = functools.partial(call, getattr(optimizer, KERAS_UPDATE_SCALED), args=(grads, variables))
        cond(finite, update, getattr(optimizer, KERAS_SKIP_SCALED))

    tf.distribute.get_replica_context().merge_call(apply, args=(grads, variables))


def restore_optimizer_methods(optimizer: keras.optimizers.Optimizer) -> None:
    """Undoes `replace_reduction`, `replace_update` and `replace_clip`."""
    for name in (KERAS_REDUCTION, KERAS_UPDATE, KERAS_CLIP):
        vars(optimizer).pop(name, None)


def has_replaced_variable_update(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether `replace_variable_update` was called for an optimizer."""
    return KERAS_UPDATE_STEP in vars(optimizer)


def variable_update_methods(optimizer: keras.optimizers.Optimizer) -> tuple[Method, Method]:
    """Returns the method that updates one variable, and the method that decays the weights of a list of variables."""
    return getattr(optimizer, KERAS_UPDATE_STEP), getattr(optimizer, KERAS_WEIGHT_DECAY)


def decays_weight(optimizer: keras.optimizers.Optimizer, variable: tf.Variable) -> bool:
    """Returns whether an optimizer decays the elements of a variable in each update."""
    return optimizer.weight_decay is not None and bool(getattr(optimizer, KERAS_DECAYS)(variable))


def replace_variable_update(optimizer: keras.optimizers.Optimizer, update_step: Method, weight_decay: Method) -> None:
    """Replaces the methods that `variable_update_methods` returns."""
    setattr(optimizer, KERAS_UPDATE_STEP, update_step)
    setattr(optimizer, KERAS_WEIGHT_DECAY, weight_decay)


# Variables and random numbers

KERAS_VALUE = "_value"
KERAS_GLOBAL_GENERATOR = "global_seed_generator"


def raw_value(variable: keras.Variable) -> tf.Variable:
    """Returns the TensorFlow variable of a Keras variable, also inside a StatelessScope."""
    return getattr(variable, KERAS_VALUE)


def replace_value(variable: keras.Variable, new: tf.Variable) -> None:
    """Replaces the TensorFlow variable of a Keras variable."""
    setattr(variable, KERAS_VALUE, new)
    variable._shape = tuple(new.shape)


def uncast_value(variable: keras.Variable) -> tf.Variable | tf.Tensor:
    """Returns a variable's value, which a layer of mixed precision would cast as a whole; a tensor if a StatelessScope holds the value."""
    with AutocastScope(None):
        return variable.value


def in_symbolic_scope() -> bool:
    """Returns whether Keras is computing the shapes of a layer's outputs, not the outputs."""
    return bool(symbolic_scope.in_symbolic_scope())


def global_generator() -> keras.random.SeedGenerator:
    """Returns the seed generator from which `keras.random.*` draws in this thread without a seed, or None."""
    return global_state.get_global_attribute(KERAS_GLOBAL_GENERATOR)


def set_global_generator(generator: keras.random.SeedGenerator) -> None:
    """Sets the result of `global_generator`."""
    global_state.set_global_attribute(KERAS_GLOBAL_GENERATOR, generator)


# Callbacks

# Attributes in which a callback keeps its state of a training.
CALLBACK_STATE: Mapping[type, Sequence[str]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations"),
    keras.callbacks.History: ("epoch", "history"),
}
# Attributes of a callback without state.
STATELESS_ATTRIBUTES = vars(keras.callbacks.Callback()).keys() | {"_supports_tf_logs"}
