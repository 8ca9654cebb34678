"""Gives TensorFlow its two virtual CPUs before any test uses it; makes hypothesis try the same examples each time."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.pop("TF_CONFIG", None)

import gc
import signal

import hypothesis
import pytest

from tests.helpers import coverage_contexts, fork_server
from tests.helpers.once import Once
from tfdist.runtime import log

pytest_plugins = ["tests.helpers.order", "tests.helpers.second_chance", "tests.helpers.tiers"]

log.print_always()  # as commands do: pytest has handlers of its own, which would take the lines
# On a busy machine examples are made slowly, which is no fault of theirs.
too_slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "tfdist", derandomize=True, deadline=None, max_examples=200, suppress_health_check=too_slow
)
hypothesis.settings.load_profile("tfdist")

# Who starts the tests in the background of a shell has them ignore Ctrl-C, and all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Begins the run, and makes two devices. The process that gives tests to others runs none, and goes without TensorFlow."""
    fork_server.begin()  # before those others start: they are of the same run
    if config.getoption("dist", "no") == "no" or config.option.collectonly:
        with fork_server.quiet():
            import tensorflow as tf

            tf.config.set_logical_device_configuration(
                tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
            )


def pytest_runtest_protocol(item):
    coverage_contexts.switch(item.nodeid)


@pytest.fixture(scope="session")
def mirrored():
    """The strategy with two replicas of this process; the collectives of a second one would meet those of the first."""
    import tfdist

    return tfdist.create_strategy("mirrored", devices=2)


@pytest.fixture(scope="session")
def once(request, tmp_path_factory):
    """Folders that are filled once in a run, for all its processes."""
    folder = tmp_path_factory.getbasetemp()
    return Once((folder.parent if hasattr(request.config, "workerinput") else folder) / "once")


def pytest_collection_finish():
    """Spares the garbage collector what lives until the end: TensorFlow's modules, which it would walk over again and again."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
