"""The gradients that `tf.GradientTape` returns to a step."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python import pywrap_tfe

from tfdist.aliases import Gradient, Structure
from tfdist.compat import tf_internals

TF_RECORDING = "_recording"


class Hook(Protocol):
    """Replacement of the gradients that tapes return."""

    def asked(self, sources: Sequence[Any]) -> None:
        """Called before a tape computes gradients with respect to `sources`."""

    def returned(self, sources: Sequence[Any], grads: Sequence[Gradient]) -> Sequence[Gradient]:
        """Returns the values that a tape returns in place of `grads`."""

    def keeps_local(self, sources: Sequence[Any]) -> None:
        """Called where a tape within another one, or a jacobian, returns its result."""

    def reduced_by_hand(
        self, op: Any, values: Sequence[Any], reduce: Callable[[list[Any]], Sequence[Any]]
    ) -> Sequence[Any]:
        """Returns the reduced values where code calls `ReplicaContext.all_reduce`."""


_thread = threading.local()  # under Mirrored each replica is traced in a thread of its own


@contextlib.contextmanager
def hooked(hook: Hook | None) -> Iterator[None]:
    """Lets a hook replace the gradients of this thread's tapes, within the context; None leaves them.

    The results of a tape within another one, which may be differentiated, and jacobians are not replaced.
    """
    _install()
    before = getattr(_thread, "hook", None)
    _thread.hook = hook
    try:
        yield
    finally:
        _thread.hook = before


def _install() -> None:
    for name, replacement in (("gradient", _gradient), ("jacobian", _untouched), ("batch_jacobian", _untouched)):
        own = getattr(tf.GradientTape, name)
        if not hasattr(own, "tensorflow_own"):
            setattr(tf.GradientTape, name, _replaced(own, replacement))
    reduce = tf.distribute.ReplicaContext.all_reduce
    if not hasattr(reduce, "tensorflow_own"):
        tf.distribute.ReplicaContext.all_reduce = _replaced(reduce, _all_reduce)


def _replaced(own: Callable[..., Structure], replacement: Callable[..., Structure]) -> Callable[..., Structure]:
    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Structure:
        return replacement(self, own, *args, **kwargs)

    method.tensorflow_own = own  # type: ignore[attr-defined]
    return tf.autograph.experimental.do_not_convert(method)


def _gradient(
    self: tf.GradientTape,
    own: Callable[..., Structure],
    target: Structure,
    sources: Structure,
    *args: Any,
    **kwargs: Any,
) -> Structure:
    hook = getattr(_thread, "hook", None)
    if hook is None:
        return own(self, target, sources, *args, **kwargs)
    hook.asked(tf.nest.flatten(sources))
    grads = own(self, target, sources, *args, **kwargs)
    if _is_nested(self):
        hook.keeps_local(tf.nest.flatten(sources))
        return grads
    return tf.nest.pack_sequence_as(sources, hook.returned(tf.nest.flatten(sources), tf.nest.flatten(grads)))


def _untouched(
    self: tf.GradientTape,
    own: Callable[..., Structure],
    target: Structure,
    sources: Structure | None = None,
    *args: Any,
    **kwargs: Any,
) -> Structure:
    hook = getattr(_thread, "hook", None)
    sources = kwargs.pop("source", sources)  # so `batch_jacobian` calls them
    if hook is not None:
        hook.keeps_local(tf.nest.flatten(sources))
    with hooked(None):
        return own(self, target, sources, *args, **kwargs)


def _all_reduce(
    self: tf.distribute.ReplicaContext,
    own: Callable[..., Structure],
    reduce_op: Any,
    value: Structure,
    *args: Any,
    **kwargs: Any,
) -> Structure:
    hook = getattr(_thread, "hook", None)
    if hook is None:
        return own(self, reduce_op, value, *args, **kwargs)

    def reduce(values: list[Any]) -> list[Any]:
        return tf.nest.flatten(own(self, reduce_op, tf.nest.pack_sequence_as(value, values), *args, **kwargs))

    return tf.nest.pack_sequence_as(value, hook.reduced_by_hand(reduce_op, tf.nest.flatten(value), reduce))


def _is_nested(tape: tf.GradientTape) -> bool:
    """Returns whether another tape records."""
    if not getattr(tape, TF_RECORDING):
        return not pywrap_tfe.TFE_Py_TapeSetIsEmpty()
    with tape.stop_recording():  # a persistent tape within its own context
        return not pywrap_tfe.TFE_Py_TapeSetIsEmpty()


def captured_handles(graph: tf.Graph, variables: Iterable[Any]) -> set[str]:
    """Returns the names of the handles of variables in a graph of a function, or of a loop or branch in it."""
    wanted = set()
    for variable in variables:
        value = getattr(variable, "value", variable)
        wanted |= {id(each.handle) for each in getattr(value, "values", (value,))}
    graphs = [graph]
    while hasattr(getattr(graphs[-1], tf_internals.TF_OUTER_GRAPH, None), tf_internals.TF_OUTER_GRAPH):
        graphs.append(getattr(graphs[-1], tf_internals.TF_OUTER_GRAPH))
    found: set[str] = set()
    for each in reversed(graphs):
        pairs = getattr(each, "captures", ())
        found = {
            inner.name
            for outer, inner in pairs
            if id(outer) in wanted
            or (getattr(outer, "name", None) in found and not isinstance(outer, tf_internals.EagerTensor))
        }
    return found
