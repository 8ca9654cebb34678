"""The versions of TensorFlow and Keras that are tested."""

from __future__ import annotations

import functools
import warnings

import keras
import tensorflow as tf

from tfdist.version import __version__

# From, and up to but without; as in pyproject.toml. tools/versions.py runs the tests with both ends.
TESTED = {"tensorflow": ("2.18", "2.22"), "keras": ("3.13", "3.16")}


@functools.cache
def check_versions() -> None:
    """Warns, once, where TensorFlow or Keras is not of the tested range: tfdist leans on private names of both."""
    found = {"tensorflow": tf.__version__, "keras": keras.__version__}
    if untested := [name for name, version in found.items() if not _is_tested(name, version)]:
        ranges = " and ".join(f"{name} >={TESTED[name][0]},<{TESTED[name][1]}" for name in TESTED)
        received = " and ".join(f"{name} {found[name]}" for name in untested)
        warnings.warn(
            f"tfdist {__version__} is tested with {ranges}. Found: {received}; what it cures may have moved.",
            stacklevel=2,
        )


def _is_tested(name: str, version: str) -> bool:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(".")[:2])

    first, end = TESTED[name]
    return numbers(first) <= numbers(version) < numbers(end)
