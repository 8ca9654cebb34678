"""Untested versions, and strategies that come too late."""

import itertools
import os
import pathlib
import subprocess
import sys
import warnings

import keras
import pytest
import tensorflow as tf

from tests.helpers import tiers
from tfdist.cluster import local_cluster
from tfdist.strategies import startup

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def versions(monkeypatch):
    startup.check_versions.cache_clear()
    yield lambda module, version: monkeypatch.setattr(module, "__version__", version)
    startup.check_versions.cache_clear()


@pytest.mark.parametrize(
    ("module", "version"), [(keras, "3.12.9"), (keras, "3.17.0"), (keras, "4.0"), (tf, "2.17.1"), (tf, "2.23.0-rc1")]
)
def test_an_untested_version_gives_one_warning_with_the_tested_range(versions, module, version):
    versions(module, version)
    with pytest.warns(
        UserWarning, match=r"tested with tensorflow >=2\.18,<2\.23 and keras >=3\.13,<3\.17\. Found: "
    ) as seen:
        startup.check_versions()
        startup.check_versions()
    assert len(seen) == 1
    assert f"{module.__name__.rpartition('.')[2]} {version}" in str(seen[0].message)


@pytest.mark.parametrize("version", ["3.13.0", "3.16.0.dev2026102704"])
def test_tested_versions_give_none(versions, version):
    versions(keras, version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        startup.check_versions()


IMPORTS = """
import tensorflow as tf
from keras import layers
import tfdist
"""


@pytest.mark.parametrize(
    ("name", "before", "line"),
    [
        pytest.param(
            *("multi_worker_mirrored", "x = tf.constant(1)", "before line 6: x = tf.constant(1)"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *("mirrored", "layers.Dense(3).build((None, 2))", "before line 6: layers.Dense(3).build((None, 2))"),
            marks=pytest.mark.full,
        ),
        (
            "mirrored",
            "def unused():\n    tf.zeros(3)\ndef made():\n    return tf.ones(2)\ntf.get_logger()\nprint(made())",
            "before line 11: print(made())",
        ),
        pytest.param("mirrored", "exec('tf.zeros(2)')", "to right after the imports", marks=pytest.mark.full),
    ],
)
def test_a_strategy_that_comes_too_late_names_the_place_and_where_to_go(tmp_path, monkeypatch, name, before, line):
    script = tmp_path / "script.py"
    options = "" if name == "multi_worker_mirrored" else ", devices=2"
    script.write_text(f"{IMPORTS}\n{before}\ntfdist.Trainer('{name}'{options})\n")
    if name == "multi_worker_mirrored":
        cluster = local_cluster(2)
        monkeypatch.setenv("TF_CONFIG", cluster.to_tf_config(cluster.tasks()[0]))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert f"{script}:{len(script.read_text().splitlines())}: " in message
    assert "cannot be" in message and "after TensorFlow has started" in message
    assert line in message


@pytest.mark.full
@pytest.mark.parametrize(("environ", "threads"), [({}, 2), ({"TF_NUM_INTEROP_THREADS": "1"}, 0)])
def test_on_one_core_operations_run_beside_each_other(environ, threads):
    cluster = local_cluster(1)
    script = """
import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import tfdist, tensorflow as tf
tfdist.create_strategy("multi_worker_mirrored")
print(tf.config.threading.get_inter_op_parallelism_threads())
"""
    task = next(iter(cluster.tasks()))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environ, "TF_CONFIG": cluster.to_tf_config(task)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == [str(threads)], done.stderr


@pytest.mark.parametrize(
    ("program", "where"),
    tiers.cases(
        itertools.product(["tfdist.train", "trainer"], ["environment", "file"]),
        quick=[("tfdist.train", "file"), ("trainer", "environment")],
    ),
)
def test_another_framework_below_keras_is_said_before_keras_is_loaded(tmp_path, where, program):
    environ = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    environ |= {"PYTHONPATH": str(ROOT), "KERAS_HOME": str(tmp_path)}
    if where == "environment":
        environ["KERAS_BACKEND"] = "jax"
    else:
        (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    train = ["-m", "tfdist.train", "--config=digits", f"--workdir={tmp_path / 'run'}"]
    arguments = train if program == "tfdist.train" else ["-c", "import tfdist; tfdist.Trainer('one_device')"]
    done = subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if program == "tfdist.train" else 1)
    assert "tfdist trains Keras models on TensorFlow, and " in done.stderr
    assert done.stderr.rstrip().endswith("jax: set KERAS_BACKEND=tensorflow before Keras is imported.")


@pytest.mark.full
def test_a_pydataset_on_devices_logs_no_line_of_a_dataset_that_is_not_optimized():
    script = """
import keras, numpy as np, tfdist
class Data(keras.utils.PyDataset):
    def __len__(self): return 2
    def __getitem__(self, index): return np.ones((8, 4)), np.ones((8, 1))
with tfdist.Trainer("mirrored", devices=2).scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(Data(), verbose=2)
"""
    environ = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120)
    assert "loss" in done.stdout and "port.cc" in done.stderr, "TensorFlow logs"
    assert "will not be optimized" not in done.stderr
