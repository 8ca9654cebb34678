"""Each strategy's run of `program`, once for all tests of this folder, when first asked for."""

import functools
import os

import pytest

from tests.multiprocess import harness, models
from tfdist.collectives import hardware

SYNCHRONOUS = (
    pytest.param("central_storage", marks=pytest.mark.slow),  # tests/end_to_end/test_train.py trains with it, too
    "mirrored",
    "multi_worker_mirrored",
)


@pytest.fixture(scope="session")
def runs(once):
    """Returns a function: as `harness.run`, without a folder -> (each rank's results, output folder)."""

    def run(strategy, module="program", *args, **how):
        return find(strategy, module, *args, **how, **_environment(strategy))

    @functools.cache
    def find(strategy, module, *args, size=2, transport="", **environment):
        name = f"{module} {strategy} {args} {size} {transport} {environment}"
        out = once.folder(
            name, lambda folder: harness.run(module, strategy, folder, *args, size=size, transport=transport)
        )
        return harness.load_all(out), out

    return run


def _environment(strategy):
    """Returns what programs of workers take from the environment."""
    names = (harness.TRANSPORT, harness.HOSTS, hardware.STAND_IN) if strategy.startswith("multi_worker") else ()
    return {name: os.environ[name] for name in names if name in os.environ}


@pytest.fixture(scope="session")
def stock(runs, once):
    """Returns a function: cases of `fit_program` -> what plain Keras trains in each of them; each is trained once in a run."""

    @functools.cache
    def train(*cases):
        groups = once.groups("stock", cases)
        return {case: found for group in groups for case, found in runs("stock", "fit_program", *group)[0][0].items()}

    return train


@pytest.fixture(scope="session")
def found(runs):
    """Returns a function: strategy, scenario of `program` -> each rank's results in it."""

    def find(strategy, scenario):
        further = scenario in models.FURTHER[strategy]
        ranks = (further_run if further else runs)(strategy)[0]
        return [results[scenario] for results in ranks]

    def further_run(strategy):
        return runs(strategy, "program", *models.FURTHER[strategy])

    return find
