"""The checks of Python, packages, and variables that change how Keras, TensorFlow and NCCL work. No TensorFlow here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import pathlib
import platform
import re
from collections.abc import Iterator, Mapping

from tfdist.cluster import task_versions
from tfdist.doctor.report import ERROR, NOTE, OK, WARNING, Finding, shorten
from tfdist.runtime.files import read_file
from tfdist.version import __version__

PACKAGES = {"tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
_COUNT = r"\d{1,9}"
_DETERMINISM = "unset it: --config.deterministic does this, or tf.config.experimental.enable_op_determinism()"
_ALLOCATOR = (
    "unset it, unless you need it: tfdist then does not configure the memory allocator, and steps may be slower"
)
_THREADS = "unset it to use all processors; all tasks must have the same"
_NO_COUNT = "give a whole number, the same in all tasks; or unset it"
_LESS_SURE = "unset it, unless all tasks need it and have the same"
_LEGACY = "unset it: tf.keras is then Keras 2, whose models tfdist does not train; or write import keras"
_OF_PROXIES = "nothing for tfdist, which goes around them; for your own servers: name them in no_proxy"
_HIDDEN = "export TF_CPP_MIN_LOG_LEVEL=2: TensorFlow's errors are not shown now"
# Regular expressions of a variable's name and value, the level of the finding, and the remedy. The first matching row applies.
_TABLE = [
    ("TF_USE_LEGACY_KERAS", "(?i:1|true)", WARNING, _LEGACY),
    ("TF_CPP_MIN_LOG_LEVEL", "2.+|[3-9].*", WARNING, _HIDDEN),
    ("TF_CPP_MIN_LOG_LEVEL", ".*", NOTE, "unset it: tfdist's commands set 2"),
    ("OMP_NUM_THREADS", rf" *\d+ *(, *\d+ *)+|{_COUNT}", NOTE, _THREADS),
    ("TF_NUM_INT(RA|ER)OP_THREADS", _COUNT, NOTE, _THREADS),
    ("OMP_NUM_THREADS|TF_NUM_INT(RA|ER)OP_THREADS", ".+", WARNING, _NO_COUNT),
    ("TF_DETERMINISTIC_OPS|TF_CUDNN_DETERMINISTIC", ".*", NOTE, _DETERMINISM),
    ("TF_GPU_THREAD_(MODE|COUNT)", ".*", NOTE, "unset it: not needed"),
    ("TF_FORCE_GPU_ALLOW_GROWTH", ".*", NOTE, "unset it, unless the GPU is shared with others"),
    ("TF_ENABLE_ONEDNN_OPTS", ".*", NOTE, "give all tasks the same: it changes results in the last digits"),
    ("(TF_)?XLA_FLAGS", ".*", NOTE, _LESS_SURE),
    ("LD_PRELOAD|GLIBC_TUNABLES|MALLOC_.*", ".*", NOTE, _ALLOCATOR),
    ("NCCL_.*", ".*", NOTE, "unset it, unless this network needs it; all tasks must have the same"),
]
_PROXIES = ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy")


def versions(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding for Python, tfdist and each package that it trains with."""
    from packaging import requirements, specifiers  # TensorFlow depends on it; without it only this check fails

    yield Finding(OK, "tfdist", __version__)
    try:
        pythons = importlib.metadata.metadata("tfdist")["Requires-Python"] or ""
        needed = map(requirements.Requirement, importlib.metadata.requires("tfdist") or [])
        ranges = {requirement.name: requirement.specifier for requirement in needed if not requirement.marker}
    except importlib.metadata.PackageNotFoundError:
        yield Finding(NOTE, "tfdist", "runs from a folder; the versions that it needs are unknown", "pip install it")
        ranges = {}
        pythons = ""
    python = platform.python_version()
    if specifiers.SpecifierSet(pythons).contains(python.rstrip("+"), prereleases=True):
        yield Finding(OK, "Python", python)
    else:
        yield Finding(ERROR, "Python", python, f"use Python {pythons}")
    if all(any(importlib.metadata.Distribution.discover(name=name)) for name in ("keras", "keras-nightly")):
        problem = "keras and keras-nightly are both installed, and each has written over files of the other"
        yield Finding(ERROR, "Keras", problem, "pip uninstall keras keras-nightly, and install one of them")
    for name, title in PACKAGES.items():
        declared = ranges.get(name, specifiers.SpecifierSet())
        wanted = f"pip install '{name}{declared}'"
        distribution = task_versions.distribution(name)
        spec = importlib.util.find_spec(name)
        if distribution is None and spec:
            yield Finding(NOTE, title, "from another distribution, whose version is unknown")
        elif distribution is None:
            yield Finding(ERROR, title, "not installed", wanted)
        elif declared.contains(distribution.version, prereleases=True):
            yield Finding(OK, title, distribution.version)
        else:
            value = f"{distribution.version}; tfdist {__version__} is tested with {declared}"
            yield Finding(WARNING, title, value, wanted)
        # Report if Python would import another file than the installed package's, such as `./keras.py`.
        if distribution and spec:
            origin = pathlib.Path(spec.origin or "")
            file = origin.parent if origin.name == "__init__.py" else origin
            is_elsewhere = file.parent.resolve() != pathlib.Path(str(distribution.locate_file(""))).resolve()
            if is_elsewhere and (file == origin or file.parent == pathlib.Path.cwd()):
                problem = f"hidden by {shorten(str(file))}, which Python imports in its place"
                yield Finding(ERROR, title, problem, f"rename {file.name}")


def settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings about the variables in the table that are set. Values of other variables are not shown."""
    yield keras_backend(environ)
    for name, value in sorted(environ.items()):
        for names, values, level, remedy in _TABLE:
            if re.fullmatch(names, name, re.ASCII | re.DOTALL) and re.fullmatch(values, value, re.ASCII | re.DOTALL):
                yield Finding(level, shorten(name), shorten(value), remedy)
                break
    # A proxy's user and password stand before the host.
    proxies = {name: value.rpartition("@")[2] for name, value in environ.items() if name.lower() in _PROXIES and value}
    if not proxies:
        yield Finding(OK, "proxies", "none")
        return
    shown = ", ".join(f"{name}={shorten(value)}" for name, value in sorted(proxies.items()))
    known = environ.get("no_proxy", environ.get("NO_PROXY", ""))
    if known:
        shown += f"; no_proxy: {shorten(known)}"
    yield Finding(NOTE, "proxies", shown, _OF_PROXIES)


def keras_backend(environ: Mapping[str, str]) -> Finding:
    """Returns a finding about Keras' backend, from KERAS_BACKEND, or else from `keras.json`."""
    what = "KERAS_BACKEND"
    chosen = environ.get(what)
    by = ""
    if chosen is None:
        home = environ.get("KERAS_HOME") or pathlib.Path(environ.get("HOME") or "~").expanduser() / ".keras"
        file = pathlib.Path(home, "keras.json")
        what = "Keras backend"
        by = f", by {shorten(str(file))}"
        try:
            chosen = str(json.loads(read_file(file)).get("backend", "tensorflow"))
        except FileNotFoundError:
            return Finding(OK, what, "tensorflow")
        except (OSError, ValueError, AttributeError, RecursionError):
            return Finding(WARNING, what, f"{shorten(str(file))} cannot be read", "correct or remove the file")
    if chosen == "tensorflow" or (not chosen and not by):
        return Finding(OK, what, chosen + by)
    remedy = "export KERAS_BACKEND=tensorflow: tfdist trains on TensorFlow alone"
    return Finding(ERROR, what, shorten(chosen) + by, remedy)
