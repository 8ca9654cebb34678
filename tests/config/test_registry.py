"""Names to objects."""

from __future__ import annotations

import collections
import pathlib

import pytest

from tfdist.config import files, registry
from tfdist.errors import ConfigError
from tfdist.tasks.base import Task

TABLE = {"counter": "collections:Counter", "broken": "tfdist.no_such_module:Thing"}


def fault(name):
    with pytest.raises(ConfigError) as raised:
        registry.resolve("thing", name, TABLE)
    return str(raised.value)


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_a_short_name_and_a_full_name_resolve():
    assert registry.resolve("thing", "counter", TABLE) is collections.Counter
    assert registry.resolve("thing", "collections:OrderedDict", TABLE) is collections.OrderedDict


def test_the_users_own_module_resolves(module):
    name = module("own_module_a", "class Mine: pass")
    assert registry.resolve("thing", f"{name}:Mine", {}).__name__ == "Mine"


def test_every_task_of_the_table_is_a_task_with_sound_options():
    for name in registry.TASKS:
        task = registry.resolve("task", name, registry.TASKS)
        assert issubclass(task, Task)
        assert list(task.Options().faults()) == []


def test_an_unknown_short_name_names_the_nearest_and_all():
    said = fault("conter")
    assert "Unknown thing 'conter'; did you mean 'counter'?" in said
    assert "one of broken, counter, or your own as 'package.module:Name'" in said


@pytest.mark.parametrize("name", ["", ":", "a:", ":b", ".a:b", "a..b:c", "a b:c", "a\0b:c", "a:b:c", "collections:a.b"])
def test_what_is_no_name_is_a_fault(name):
    assert fault(name).startswith(f"Unknown thing {name!r}")


def test_a_missing_module_or_package_is_a_fault():
    assert "The module of thing 'no_such_package.a:B' cannot be found" in fault("no_such_package.a:B")
    assert "PYTHONPATH" in fault("collections.no_such_module:B")
    assert "cannot be found" in fault("broken")


def test_a_missing_attribute_names_the_nearest():
    assert "Module 'collections' has no 'Countr'; did you mean 'Counter'?" in fault("collections:Countr")


@pytest.mark.parametrize(
    ("text", "error"),
    [("import no_such_module_inside", ModuleNotFoundError), ("1 / 0", ZeroDivisionError), ("x.y = 1", NameError)],
)
def test_an_error_inside_the_users_module_is_told_with_its_place(module, text, error):
    name = module(f"own_module_{error.__name__}", text)
    said = rf"The module of thing '{name}:Mine' cannot be imported: {error.__name__}: .*{name}\.py:1\)"
    with pytest.raises(ConfigError, match=said) as raised:
        registry.resolve("thing", f"{name}:Mine", TABLE)
    assert isinstance(raised.value.__cause__, error)


def test_the_file_that_is_to_be_copied_is_the_preset():
    configs = pathlib.Path(__file__).parents[2] / "configs"
    assert files.load(str(configs / "digits_multi_worker.py")) == files.load("digits_multi_worker")
