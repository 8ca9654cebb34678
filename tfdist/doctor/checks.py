"""The checks of versions, devices, shared memory, and the cluster that a run on this host would use. No TensorFlow in this process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tfdist import errors
from tfdist.cluster import greeting, task_versions
from tfdist.cluster.resolvers import discovery
from tfdist.errors import ClusterError, ConfigError, truncate
from tfdist.runtime import tensorflow_log
from tfdist.version import __version__

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
_PACKAGES = {"tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
_LEAST_SHARED = 128 * 2**20  # bytes
LIMIT = 60.0  # seconds for TensorFlow to load and look
_RESOLVE_WITHIN = 5.0  # seconds for resolvers that wait for other tasks
_PASSWORD = re.compile(r"[^\s'\"/=,]+:[^\s'\"/=,]*@")
_MARK = "tfdist-devices "
_LOOK = f"""
import json
import tensorflow as tf
names = [device.name.removeprefix("/physical_device:") for device in tf.config.list_physical_devices()]
print("\\n{_MARK}" + json.dumps(names), flush=True)
"""


class Finding(NamedTuple):
    """The result of a check.

    Attributes:
        level: `"ok"`; `"note"`, worth knowing; `"warning"`, a run may suffer; `"error"`, a run would fail.
        what: The subject.
        value: The observed value.
        remedy: The remedy; empty if none is needed.
    """

    level: str
    what: str
    value: str
    remedy: str = ""


def versions(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding for Python, tfdist and each package that it trains with, and for another backend of Keras."""
    from packaging import requirements, specifiers  # TensorFlow depends on it

    yield Finding(OK, "tfdist", __version__)
    pythons = ""
    ranges = {}
    try:
        pythons = importlib.metadata.metadata("tfdist")["Requires-Python"] or ""
        needed = map(requirements.Requirement, importlib.metadata.requires("tfdist") or [])
        ranges = {requirement.name: requirement.specifier for requirement in needed if not requirement.marker}
    except importlib.metadata.PackageNotFoundError:
        yield Finding(NOTE, "tfdist", "runs from a folder; the versions that it needs are unknown", "pip install it")
    python = platform.python_version()
    if specifiers.SpecifierSet(pythons).contains(python.rstrip("+"), prereleases=True):
        yield Finding(OK, "Python", python)
    else:
        yield Finding(ERROR, "Python", python, f"use Python {pythons}")
    for name, title in _PACKAGES.items():
        declared = ranges.get(name, specifiers.SpecifierSet())
        wanted = f"pip install '{name}{declared}'"
        distribution = task_versions.distribution(name)
        if distribution is None and importlib.util.find_spec(name):
            yield Finding(NOTE, title, "from another distribution, whose version is unknown", wanted)
        elif distribution is None:
            yield Finding(ERROR, title, "not installed", wanted)
        elif declared.contains(distribution.version, prereleases=True):
            yield Finding(OK, title, distribution.version)
        else:
            value = f"{distribution.version}; tfdist {__version__} is tested with {declared}"
            yield Finding(WARNING, title, value, wanted)
    backend = environ.get("KERAS_BACKEND") or "tensorflow"
    if backend != "tensorflow":
        remedy = "export KERAS_BACKEND=tensorflow: tfdist trains on TensorFlow alone"
        yield Finding(ERROR, "KERAS_BACKEND", _printable(truncate(backend)), remedy)


def devices(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding with TensorFlow's devices, from a process of its own, because a broken driver can block or kill it."""
    quiet = {tensorflow_log.LEVEL: tensorflow_log.ERRORS_ONLY, **environ}
    why = f"gave no answer within {LIMIT:.0f} s"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOOK],
            env=quiet,
            timeout=LIMIT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        _, mark, answer = done.stdout.rpartition(_MARK)
        if mark:
            yield Finding(OK, "devices", _printable(", ".join(json.loads(answer))))
            return
        last_line = ["no message", *filter(None, map(str.strip, done.stderr.splitlines()))][-1]
        why = f"ended with exit code {done.returncode}: {truncate(_printable(last_line))}"
    except subprocess.TimeoutExpired:
        pass
    remedy = "look at the driver, or set CUDA_VISIBLE_DEVICES= to train without GPUs"
    yield Finding(ERROR, "devices", f"TensorFlow {why}", f"run python -c 'import tensorflow'; {remedy}")


def shared_memory(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding about the folder through which the workers of a host exchange gradients."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as e:
        yield Finding(
            WARNING, "/dev/shm", str(e.strerror), "mount a tmpfs there: workers of one host exchange gradients there"
        )
        return
    value = f"{free / 2**20:.0f} MiB free"
    if free < _LEAST_SHARED:
        yield Finding(
            WARNING, "/dev/shm", value, "docker run --shm-size=1g: workers of one host exchange gradients there"
        )
    else:
        yield Finding(OK, "/dev/shm", value)


def cluster(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields the cluster that a run would use, or its errors, and whether this task's port is free."""
    try:
        resolved = discovery.resolve(environ, timeout=_RESOLVE_WITHIN)
    except ConfigError as e:
        remedy = (
            "correct it, or unset TF_CONFIG to train on this machine alone" if "TF_CONFIG" in environ else "correct it"
        )
        yield from (Finding(ERROR, "cluster", _printable(fault), remedy) for fault in e.faults)
        return
    except ClusterError as e:
        yield Finding(WARNING, "cluster", _printable(str(e)), "run this in all tasks at once")
        return
    hint = discovery.misconfiguration_hint(environ)
    if resolved is None and hint:
        yield Finding(WARNING, "cluster", "none", hint)
    elif resolved is None:
        yield Finding(OK, "cluster", "none: one process on this machine")
    else:
        yield Finding(OK, "cluster", f"{resolved.task} of {len(resolved.cluster.tasks())} tasks, by {resolved.source}")
        if resolved.task in resolved.cluster.tasks():
            try:
                with greeting.listening_for_peers(resolved.cluster, resolved.task):
                    yield Finding(OK, "own port", f"{resolved.cluster.address(resolved.task)} is free")
            except ClusterError as e:
                remedy = "end that process, give the task another port, or unset TF_CONFIG if another run has left it"
                yield Finding(ERROR, "own port", _printable(str(e)), remedy)


def _printable(text: str) -> str:
    """Returns a text without `user:password@`, and with control characters escaped: a variable must not steer a terminal."""
    return errors.printable(_PASSWORD.sub("", text)) or "(empty)"
