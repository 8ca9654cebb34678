"""Where a user sees the library's lines: a script of their own, which runs no command of tfdist, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Waits for a task whose port nobody listens at; 10 seconds pass at once.
WAITING = """
import itertools, logging, sys
{before}
from tfdist.cluster import ClusterSpec, TaskSpec, free_ports, preflight
from tfdist.errors import ClusterError
from tfdist.runtime import log
{after}
(port,) = free_ports(1)
try:
    preflight.wait_until_reachable(
        ClusterSpec({{"worker": ["127.0.0.1:1", f"127.0.0.1:{{port}}"]}}), [TaskSpec("worker", 1)], 11,
        clock=itertools.count(step=10).__next__, sleep=lambda seconds: None,
    )
except ClusterError:
    print("given up")
"""
TRAINING = """
import logging, sys
{before}
import keras, numpy as np, tfdist
trainer = tfdist.Trainer("mirrored", devices=2)
with trainer.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
trainer.fit(model, np.ones([8, 1]), np.ones([8, 1]), batch_size=8)
"""
BASIC = "logging.basicConfig(format='%(levelname)s %(name)s: %(message)s')"
ABSL = "from absl import logging as absl; absl.warning('of Keras')"  # gives the root logger a handler, if it has none
OWN = "logging.getLogger('tfdist').addHandler(logging.StreamHandler(sys.stdout))"
SILENT = "logging.getLogger('tfdist').setLevel('ERROR')"


def run(script: str, before: str = "", after: str = "") -> tuple[list[str], list[str]]:
    """Returns the lines of a script's stdout, and of its stderr."""
    program = script.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.parametrize(
    ("before", "after", "stdout", "stderr"),
    [
        ("", "", ["tfdist: waiting for worker:1"], []),
        (BASIC, "", [], ["INFO tfdist: waiting for worker:1"]),
        ("", BASIC, [], ["INFO tfdist: waiting for worker:1"]),
        (ABSL, "", ["tfdist: waiting for worker:1"], ["WARNING:absl:of Keras"]),
        ("", ABSL, ["tfdist: waiting for worker:1"], ["WARNING:absl:of Keras"]),
        ("logging.basicConfig(level='INFO')", ABSL, [], ["WARNING:absl:of Keras", "INFO:tfdist:waiting for worker:1"]),
        ("logging.basicConfig(stream=sys.stdout)", "", ["INFO:tfdist:waiting for worker:1"], []),
        (OWN, "", ["waiting for worker:1"], []),
        ("", f"{OWN}; logging.getLogger('tfdist').propagate = False; {BASIC}", ["waiting for worker:1"], []),
        ("", "logging.getLogger('tfdist').propagate = False; " + BASIC, ["tfdist: waiting for worker:1"], []),
        (SILENT, "", [], []),
        ("", SILENT, [], []),
        (f"{BASIC}; {SILENT}", "", [], []),
        (BASIC, "log.print_always()", ["tfdist: waiting for worker:1"], []),  # as the commands do
    ],
)
def test_a_line_goes_once_to_where_the_user_has_it_go(before, after, stdout, stderr):
    out, err = run(WAITING, before, after)
    assert out.pop() == "given up"
    assert [line.partition(" at ")[0] for line in out] == stdout
    assert [line.partition(" at ")[0] for line in err] == stderr


@pytest.mark.full
@pytest.mark.parametrize(("before", "begins"), [("", ""), (BASIC, "INFO tfdist: "), (SILENT, None)])
def test_so_does_a_line_of_a_training(before, begins):
    out, err = run(TRAINING, before)
    said = [line for line in out + err if "replicas, global batch" in line]
    assert said == ([] if begins is None else [f"{begins}mirrored: 2 replicas, global batch 8 = 2 x 4"])
    assert set(said) <= set(err if begins else out)
