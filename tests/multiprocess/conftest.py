"""Each strategy's run of `program`, once for all tests of this folder, when first asked for."""

import concurrent.futures

import pytest

from tests.multiprocess import harness

SYNCHRONOUS = (
    pytest.param("central_storage", marks=pytest.mark.slow),  # tests/end_to_end/test_train.py trains with it, too
    "mirrored",
    "multi_worker_mirrored",
)


# What one process runs runs beside the others of its row: it is mostly tracing, on one core.
TOGETHER = {"program": ("one_device", "mirrored")}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Returns a function: strategy, program and its further arguments -> (each rank's results, output folder)."""

    done = {}

    def run(strategy, module="program", *args):
        if (strategy, module, args) not in done:
            row = () if args else TOGETHER.get(module, ())
            row = row if strategy in row else (strategy,)
            folders = {each: tmp_path_factory.mktemp(f"{module}-{each}") for each in row}
            if len(row) == 1:  # a cluster, whose launcher wants the main thread
                done[strategy, module, args] = attempt(module, strategy, folders[strategy], *args)
            else:
                with concurrent.futures.ThreadPoolExecutor(2) as pool:
                    results = pool.map(attempt, [module] * len(row), folders, folders.values())
                    done.update({(each, module, args): result for each, result in zip(row, results, strict=True)})
        if isinstance(result := done[strategy, module, args], AssertionError):
            raise result  # once run is enough
        return result

    return run


def attempt(module, strategy, out, *args):
    try:
        return harness.run(module, strategy, out, *args), out
    except AssertionError as e:
        return e


@pytest.fixture(scope="session")
def single(runs):
    """The results of one process on one device."""
    return runs("one_device")[0][0]


@pytest.fixture(scope="session", params=SYNCHRONOUS)
def ranks(request, runs):
    """Each rank's results under a strategy with two replicas."""
    return runs(request.param)[0]
