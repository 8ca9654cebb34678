"""A task of the user's own gets its options, and its faults are named."""

from __future__ import annotations

import contextlib
import copy
import importlib

import pytest

from tests.config.checking import faults, make
from tfdist.config import (
    TrainConfig,
    flags,
    validation,
)
from tfdist.errors import ConfigError
from tfdist.tasks import digits
from tfdist.tasks.base import NoOptions

OWN = """
from __future__ import annotations
import dataclasses
import functools
from tfdist.tasks.base import Task

@dataclasses.dataclass
class Options:
    depth: int = 3
    name: str = "own"

    def faults(self):
        if self.depth > 9:
            yield f"task_options.depth must be 9 or less. Received: {self.depth}."

class Own(Task):
    Options = Options

class Plain(Task):
    pass
"""


@pytest.fixture
def own_tasks(tmp_path, monkeypatch):
    """Returns a function that writes a module of the user's own."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return name

    return write


@pytest.mark.parametrize("task", ["digits", "own_task_f:Own", "own_task_f:Plain", "digts"])
def test_a_configuration_is_left_as_it_is(own_tasks, task):
    own_tasks("own_task_f", OWN)
    checked = TrainConfig(global_batch_size=32, learning_rate=1, task=task)
    before = copy.deepcopy(checked)
    with contextlib.suppress(ConfigError):
        validation.check(checked)
    assert repr(checked) == repr(before), "a validator judges, and changes nothing"


def test_the_options_that_a_task_would_have_are_judged(own_tasks):
    own_tasks("own_task_g", OWN.replace("depth: int = 3", "depth: int = 10"))
    assert faults(make(task="own_task_g:Own")) == ("task_options.depth must be 9 or less. Received: 10.",)


def test_the_users_own_task_gets_its_options_and_their_faults(own_tasks):
    module = own_tasks("own_task_a", OWN)
    checked = make()
    checked.choose_task(f"{module}:Own")
    validation.check(checked)
    assert checked.task_options == importlib.import_module(module).Options(3, "own")
    checked.task_options.depth = 10
    assert faults(checked) == ("task_options.depth must be 9 or less. Received: 10.",)
    assert (
        "takes task_options of own_task_a.Options. Received: tfdist.tasks.digits.Options;"
        in faults(make(task=f"{module}:Own", task_options=digits.Options()))[0]
    )


def test_a_task_without_options_needs_none(own_tasks):
    checked = make()
    checked.choose_task(own_tasks("own_task_b", OWN) + ":Plain")
    validation.check(checked)
    assert checked.task_options == NoOptions()


def test_options_annotated_by_texts_work_as_flags(own_tasks, tmp_path):
    module = own_tasks("own_task_c", OWN)
    (tmp_path / "own_config.py").write_text(
        f"import tfdist, {module}\n"
        f"def get_config():\n"
        f"    return tfdist.TrainConfig(task='{module}:Own', task_options={module}.Options(), global_batch_size=8)\n"
    )
    argv = ["train", f"--config={tmp_path}/own_config.py", "--config.task_options.depth=5"]
    assert flags.parse(argv, "")[0].task_options.depth == 5
    with pytest.raises(ConfigError, match=r"depth: expected a whole number. Received: 'five'"):
        flags.parse([*argv[:2], "--config.task_options.depth=five"], "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import os\nos.no_such_function()",
            r"cannot be imported: AttributeError: .*no_such_function.*own_task_\w+.py:2\)",
        ),
        ("import sys\nsys.exit(0)", r"cannot be imported: SystemExit: 0 \(.*py:2\)"),
    ],
)
def test_a_module_that_raises_or_leaves_is_told_with_the_place(own_tasks, text, said):
    module = own_tasks("own_task_d" if "exit" in text else "own_task_e", text)
    with pytest.raises(ConfigError, match=said):
        validation.check(make(task=f"{module}:Own"))
