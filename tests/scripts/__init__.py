"""Scripts of the kinds that users have, each of our own making and small: as plain Keras runs them, they run under a Trainer.

A script takes `scope`, within which it builds and compiles, as `with trainer.scope():` does; the rest is plain Keras. It returns the
numbers that a run under a strategy must have in common with a plain one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class Script:
    """A kind of script.

    Attributes:
        kind: What `docs/scripts.md` calls it.
        run: `run(scope) -> numbers`.
        differs: Why its numbers may differ from those of one device, or an empty text where they may not.
        lines: How many lines the Trainer adds or changes, besides indentation.
    """

    kind: str
    run: Callable[[Callable[[], contextlib.AbstractContextManager[Any]]], Any]
    differs: str = ""
    lines: int = 2


SCRIPTS: dict[str, Script] = {}


def script(kind: str, **attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a function to `SCRIPTS`."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        SCRIPTS[function.__name__] = Script(kind, function, **attributes)
        return function

    return add


def load() -> dict[str, Script]:
    """Returns all scripts; imports TensorFlow."""
    from tests.scripts import generative, images, metric, own_steps, sequences, tables, training  # noqa: F401

    return SCRIPTS
