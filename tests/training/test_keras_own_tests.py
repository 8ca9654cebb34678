"""Keras' own tests of its trainer, which its package carries, pass in the scope of a Trainer as they do without one.

The tests' models, each a Layer and a Trainer of Keras, become `keras.Model` subclasses, as users write them.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree

import pytest

from tests.helpers import tiers

# Tests that fail under a strategy alone, and why; a name stands for all names that begin with it.
BY_DESIGN = {
    "test_steps_per_execution_steps_per_epoch_match_multi_epoch": "steps that end within an execution are honored"
}
KINDS = ["one_device", "mirrored"]
LIMIT = 900  # seconds for the tests of one kind

MODEL = """class ExampleModel(models.Model):
    def __init__(self, units):
        models.Model.__init__(self)
        self.dense = layers.Dense(units, use_bias=False, kernel_initializer=initializers.Ones())

    def call(self, x):
        return self.dense(x)


"""
CONFTEST = """import unittest

import tfdist

trainer = tfdist.Trainer({kind!r}, **{options!r})
run = unittest.TestCase._callTestMethod


def in_scope(self, method):
    with trainer.scope():
        run(self, method)


unittest.TestCase._callTestMethod = in_scope
"""


def keras_tests(folder: pathlib.Path, kind: str) -> dict[str, str]:
    """Runs Keras' tests of its trainer in a process of their own; returns the outcome of each.

    Args:
        folder: Where to write the tests.
        kind: A strategy, or `plain` for none.
    """
    import keras

    source = (pathlib.Path(keras.__file__).parent / "src/trainers/trainer_test.py").read_text()
    source = re.sub(r"^import (jax|torch)$", r"\1 = None", source, flags=re.MULTILINE)
    begin, end = (
        source.index(f"class {name}:")
        for name in ("ExampleModel(Trainer, layers.Dense)", "CustomTrainTestStepModel(ExampleModel)")
    )
    source = source[:begin] + MODEL + source[end:]
    source = source.replace("(Trainer, layers.Layer)", "(models.Model)")
    source = source.replace("layers.Layer.__init__(self", "models.Model.__init__(self")
    source = re.sub(r"\n +Trainer\.__init__\(self\)", "", source)
    (folder / "keras_trainer_test.py").write_text(source)
    if kind != "plain":
        options = {"devices": 2} if kind == "mirrored" else {}
        (folder / "conftest.py").write_text(CONFTEST.format(kind=kind, options=options))
    report = folder / "report.xml"
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        f"--rootdir={folder}",
        f"--junitxml={report}",
    ]
    ended = subprocess.run(
        [sys.executable, *command, "keras_trainer_test.py"],
        cwd=folder,
        env={**os.environ, "KERAS_BACKEND": "tensorflow", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert report.exists(), ended.stdout[-3000:] + ended.stderr[-3000:]
    outcomes = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        tags = {child.tag: (child.get("message") or "").strip() for child in case}
        failed = tags.get("failure", tags.get("error"))
        outcomes[case.get("name", "")] = "skipped" if "skipped" in tags else "passed" if failed is None else failed
    return outcomes


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The tests that pass under Keras alone: others need packages that are not installed, or the models as Keras has them."""
    return {
        name for name, outcome in keras_tests(tmp_path_factory.mktemp("plain"), "plain").items() if outcome == "passed"
    }


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("kind", tiers.cases(KINDS, slow=KINDS))
def test_keras_own_tests_pass(kind, plain, tmp_path):
    outcomes = keras_tests(tmp_path, kind)
    failed = {name: outcomes[name] for name in plain if outcomes[name] != "passed"}
    known = tuple(BY_DESIGN)
    unknown = {name: text for name, text in failed.items() if not name.startswith(known)}
    assert not unknown
    passing = sorted(name for name in plain if name.startswith(known) and name not in failed)
    assert not passing, "these pass now: remove them from the table"
    assert len(plain) > 100
