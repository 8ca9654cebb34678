"""Versions of Python and packages, beside the range that tfdist declares; and files that hide a package. No TensorFlow here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import platform
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tfdist.cluster import task_versions
from tfdist.doctor.report import ERROR, NOTE, OK, WARNING, Finding, shorten
from tfdist.version import __version__

if TYPE_CHECKING:
    from packaging import specifiers

PACKAGES = {"tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding for Python, tfdist and each package that it trains with."""
    from packaging import requirements, specifiers, version  # TensorFlow brings it: without, this check alone fails

    yield Finding(OK, "tfdist", __version__)
    try:
        metadata = importlib.metadata.metadata("tfdist")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(NOTE, "tfdist", "runs from a folder; which versions it takes is not known", "pip install it")
        ranges, pythons = {}, ""
    else:
        needed = map(requirements.Requirement, importlib.metadata.requires("tfdist") or [])
        ranges = {each.name: each.specifier for each in needed if not each.marker}
        pythons = metadata["Requires-Python"] or ""
    python = platform.python_version()
    suits = specifiers.SpecifierSet(pythons).contains(version.Version(python.rstrip("+")), prereleases=True)
    yield Finding(OK if suits else ERROR, "Python", python, "" if suits else f"use Python {pythons}")
    if all(any(importlib.metadata.Distribution.discover(name=name)) for name in ("keras", "keras-nightly")):
        problem = "keras and keras-nightly are both installed, and each has written over files of the other"
        yield Finding(ERROR, "Keras", problem, "pip uninstall keras keras-nightly, and install one of them")
    for name, title in PACKAGES.items():
        yield _package(name, title, ranges.get(name, specifiers.SpecifierSet()))
        yield from _hidden(name, title)


def _package(name: str, title: str, declared: specifiers.SpecifierSet) -> Finding:
    wanted = f"pip install '{name}{declared}'"
    distribution = task_versions.distribution(name)
    if distribution is None:
        if importlib.util.find_spec(name):
            return Finding(NOTE, title, "of another distribution, whose version is not known")
        return Finding(ERROR, title, "not installed", wanted)
    found = distribution.version
    if declared.contains(found, prereleases=True):
        return Finding(OK, title, found)
    return Finding(WARNING, title, f"{found}; tfdist {__version__} is tested with {declared}", wanted)


def _hidden(name: str, title: str) -> Iterator[Finding]:
    """Yields a finding where Python would import another file than the installed package's, such as `./keras.py`."""
    distribution = task_versions.distribution(name)
    if distribution is None:
        return
    spec = importlib.util.find_spec(name)
    origin = pathlib.Path(spec.origin or "") if spec else pathlib.Path()
    home = pathlib.Path(str(distribution.locate_file(""))).resolve()
    in_place = origin.parent if origin.name == "__init__.py" else origin
    if home != in_place.parent.resolve() and (in_place == origin or in_place.parent == pathlib.Path.cwd()):
        yield Finding(
            ERROR,
            title,
            f"hidden by {shorten(str(in_place))}, which Python imports in its place",
            f"rename {in_place.name}",
        )
