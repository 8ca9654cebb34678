"""Scripts of the kinds that users have, each of our own making and small: as plain Keras runs them, they run under a Trainer.

A script takes `scope`, within which it builds and compiles, as `with trainer.scope():` does; the rest is plain Keras. It returns the
numbers that its user looks at.
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
        differs: Why its training differs from that of one device, or is not compared; an empty text where it must be equal.
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
