"""Each strategy's run of `program`, once for all tests of this folder, when first asked for."""

import pytest

from tests.multiprocess import harness

SYNCHRONOUS = ("central_storage", "mirrored", "multi_worker_mirrored")


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Returns a function: strategy -> (each rank's results, output folder)."""

    done = {}

    def run(strategy, module="program"):
        if (strategy, module) not in done:
            out = tmp_path_factory.mktemp(f"{module}-{strategy}")
            try:
                done[strategy, module] = harness.run(module, strategy, out), out
            except AssertionError as e:
                done[strategy, module] = e
        if isinstance(result := done[strategy, module], AssertionError):
            raise result  # once run is enough
        return result

    return run


@pytest.fixture(scope="session")
def single(runs):
    """The results of one process on one device."""
    return runs("one_device")[0][0]


@pytest.fixture(scope="session", params=SYNCHRONOUS)
def ranks(request, runs):
    """Each rank's results under a strategy with two replicas."""
    return runs(request.param)[0]
