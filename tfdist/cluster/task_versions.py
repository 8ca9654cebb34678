"""The versions and checksums of a task, which tasks compare before they train together. No TensorFlow here.

Tasks with different versions of TensorFlow or Keras may train for days before anybody notices that their weights differ.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import pathlib
import platform
import sys
from collections.abc import Iterator, Mapping

from tfdist.errors import difference_message
from tfdist.runtime.files import read_file

_PACKAGES = ("tensorflow", "keras", "numpy", "tfdist")
_DISTRIBUTIONS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"),
    "keras": ("keras", "keras-nightly"),
}
_TITLES = {
    "tensorflow": "The version of TensorFlow",
    "keras": "The version of Keras",
    "numpy": "The version of NumPy",
    "python": "The version of Python",
    "tfdist": "The version of tfdist",
    "script": "The script",
    "configuration": "The configuration",
    "devices": "The number of devices with a replica (strategy.devices)",
}
_MOST = 4096  # bytes of a task's line that are read

# A difference in these is a warning; in the others it is an error.
_MAY_DIFFER = ("python", "numpy", "script")

devices = ""  # the number of this task's devices that have a replica; empty if the task trains no replica
configuration = ""  # checksum of the task's configuration; empty if it has none
script = ""  # path of the task's script; empty means the main module


def distribution(package: str) -> importlib.metadata.Distribution | None:
    """Returns the distribution of a package, such as `keras` or `keras-nightly`; None if unknown."""
    names = _DISTRIBUTIONS.get(package, (package,))
    return next(
        (candidate for name in names for candidate in importlib.metadata.Distribution.discover(name=name)), None
    )


@functools.cache
def _packages() -> dict[str, str]:
    packages = {name: distribution(name) for name in _PACKAGES}
    return {"python": platform.python_version()} | {
        name: package.version if package else "" for name, package in packages.items()
    }


def own() -> dict[str, str]:
    """Returns the versions of this task, and checksums of its script and its configuration."""
    path = pathlib.Path(script or getattr(sys.modules.get("__main__"), "__file__", None) or "")
    of_script = checksum(read_file(path)) if path.is_file() else ""
    return {**_packages(), "script": of_script, "configuration": configuration, "devices": devices}


def checksum(content: bytes) -> str:
    """Returns a short checksum."""
    return hashlib.sha256(content).hexdigest()[:12]


def encode() -> bytes:
    """Returns the result of `own` as one line of JSON."""
    return json.dumps(own()).encode()


def decode(line: bytes) -> dict[str, str]:
    """Returns the versions and checksums of another task; empty if they cannot be read."""
    try:
        versions = json.loads(line[:_MOST])
    except (ValueError, RecursionError):
        return {}
    if not isinstance(versions, dict):
        return {}
    return {str(name): str(value) for name, value in versions.items()}


def differences(others: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[bool, str]]:
    """Yields, for each version or checksum of another task that differs from this one's, whether that is an error, and a sentence.

    `others` are the versions and checksums of the other tasks, by task name.
    """
    mine = own()
    for name, title in _TITLES.items():
        unlike = {
            task: versions[name] for task, versions in others.items() if versions.get(name, "") not in ("", mine[name])
        }
        if mine[name] and unlike:
            yield name not in _MAY_DIFFER, difference_message(title, {"this task": mine[name], **unlike})
