"""Versions of Python and packages, beside the range that tfdist declares; and files that hide a package. No TensorFlow here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import platform
from collections.abc import Iterator, Mapping

from tfdist.cluster import task_versions
from tfdist.doctor.report import ERROR, NOTE, OK, WARNING, Finding, shorten
from tfdist.version import __version__

PACKAGES = {"tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding for Python, tfdist and each package that it trains with."""
    from packaging import requirements, specifiers  # TensorFlow brings it: without, this check alone fails

    yield Finding(OK, "tfdist", __version__)
    try:
        pythons = importlib.metadata.metadata("tfdist")["Requires-Python"] or ""
        needed = map(requirements.Requirement, importlib.metadata.requires("tfdist") or [])
        ranges = {each.name: each.specifier for each in needed if not each.marker}
    except importlib.metadata.PackageNotFoundError:
        yield Finding(NOTE, "tfdist", "runs from a folder; which versions it takes is not known", "pip install it")
        ranges, pythons = {}, ""
    python = platform.python_version()
    suits = specifiers.SpecifierSet(pythons).contains(python.rstrip("+"), prereleases=True)
    yield Finding(OK if suits else ERROR, "Python", python, "" if suits else f"use Python {pythons}")
    if all(any(importlib.metadata.Distribution.discover(name=name)) for name in ("keras", "keras-nightly")):
        problem = "keras and keras-nightly are both installed, and each has written over files of the other"
        yield Finding(ERROR, "Keras", problem, "pip uninstall keras keras-nightly, and install one of them")
    for name, title in PACKAGES.items():
        declared = ranges.get(name, specifiers.SpecifierSet())
        wanted = f"pip install '{name}{declared}'"
        distribution, spec = task_versions.distribution(name), importlib.util.find_spec(name)
        if distribution is None and spec:
            yield Finding(NOTE, title, "of another distribution, whose version is not known")
        elif distribution is None:
            yield Finding(ERROR, title, "not installed", wanted)
        elif declared.contains(distribution.version, prereleases=True):
            yield Finding(OK, title, distribution.version)
        else:
            value = f"{distribution.version}; tfdist {__version__} is tested with {declared}"
            yield Finding(WARNING, title, value, wanted)
        # Whether Python would import another file than the installed package's, such as `./keras.py`.
        if distribution and spec:
            origin = pathlib.Path(spec.origin or "")
            file = origin.parent if origin.name == "__init__.py" else origin
            is_elsewhere = file.parent.resolve() != pathlib.Path(str(distribution.locate_file(""))).resolve()
            if is_elsewhere and (file == origin or file.parent == pathlib.Path.cwd()):
                problem = f"hidden by {shorten(str(file))}, which Python imports in its place"
                yield Finding(ERROR, title, problem, f"rename {file.name}")
