"""The gradients that `tf.GradientTape` returns to a step."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe

from tfdist.aliases import Gradient, Structure
from tfdist.compat import tf_internals

TF_RECORDING = "_recording"

Hook = Callable[[Sequence[Any], Sequence[Gradient]], Sequence[Gradient]]

_thread = threading.local()  # under Mirrored each replica is traced in a thread of its own


@contextlib.contextmanager
def hooked(hook: Hook | None) -> Iterator[None]:
    """Lets `hook(sources, gradients)` replace what this thread's tapes return, within the context; None leaves them.

    It is not called for a tape within another one, whose result may be differentiated, and for jacobians.
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


def _replaced(own: Callable[..., Structure], replacement: Callable[..., Structure]) -> Callable[..., Structure]:
    @functools.wraps(own)
    def method(self: tf.GradientTape, *args: Any, **kwargs: Any) -> Structure:
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
    grads = own(self, target, sources, *args, **kwargs)
    hook = getattr(_thread, "hook", None)
    if hook is None or _is_nested(self):
        return grads
    return tf.nest.pack_sequence_as(sources, hook(tf.nest.flatten(sources), tf.nest.flatten(grads)))


def _untouched(self: tf.GradientTape, own: Callable[..., Structure], *args: Any, **kwargs: Any) -> Structure:
    with hooked(None):
        return own(self, *args, **kwargs)


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
            if id(outer) in wanted or (getattr(outer, "name", None) in found and not isinstance(outer, tf_internals.EagerTensor))
        }
    return found
