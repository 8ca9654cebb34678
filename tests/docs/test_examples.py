"""Every public class and function has an example in its docstring, which does what it shows."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

from tests.architecture.test_public_api import NAMES

OPTIONS = doctest.ELLIPSIS


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_the_example_of_a_public_name_does_what_it_shows(package, name):
    value = getattr(importlib.import_module(package), name)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return  # a constant
    examples = doctest.DocTestParser().get_doctest(inspect.getdoc(value), {}, name, None, 0)
    assert examples.examples, f"{package}.{name} has no example"
    said = []
    assert not doctest.DocTestRunner(optionflags=OPTIONS).run(examples, out=said.append).failed, "".join(said)
