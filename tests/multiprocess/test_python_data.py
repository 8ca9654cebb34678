"""PyDatasets and generators on one, two and three workers train what a plain loop trains; a fault on one is the same error on all."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.python_data_cases import CASES

pytestmark = pytest.mark.timeout(600)

ITEM = "DataError: The data of worker:1 cannot be read: "
FAULTS = {
    "an item raises": f"{ITEM}item 2 of Missing: FileNotFoundError: no such file: photos/2.png",
    "an item raises in evaluate": f"{ITEM}item 2 of Missing: FileNotFoundError: no such file: photos/2.png",
    "an item raises in predict": f"{ITEM}item 2 of Missing: FileNotFoundError: no such file: photos/2.png",
    "a worker's item raises": "no error",  # item 2 is worker:0's
    "a worker's process raises": f"{ITEM}item 2 of Missing: FileNotFoundError: no such file: photos/2.png",
    "an item has another shape": f"{ITEM}batch 3: an array has the shape (4, 3), and those of the first batches (None, 2)",
    "the length is wrong": "DataError: The data of worker:0 cannot be read: item 4 of Items: IndexError: list index out of range",
    "the lengths differ": "ConfigError: The Items must have the same length and shard on all workers. Received: length 4 and shard='batches' on worker:0, length 3 and shard='batches' on worker:1.",
    "noise differs": "DataError: Batch 0 of the PyDataset Drawn differs between worker:0 and worker:1",
    "a generator differs": "DataError: Batch 1 of the generator differs between worker:0 and worker:1",
    "a generator differs later": "DataError: Batch 200 of the generator differs between worker:0 and worker:1",
    "a generator ends early": "DataError: The generator must yield the same batches on all workers, but it goes on on worker:0, ends after 3 on worker:1.",
    "a generator raises": "DataError: The data of worker:0 cannot be read: batch 2: ValueError: the tape is torn",
}


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    return harness.run("python_data_program", "multi_worker_mirrored", tmp_path_factory.mktemp("two"))


def check(found, workers):
    for rank, results in enumerate(found):
        for case in CASES:
            trained, expected = results["trained"][case.name], case.trained(workers)
            for key in {*trained} & {*expected}:
                assert harness.difference(trained[key], expected[key]) < 1e-5, (case.name, key)
            if case.form == "py_dataset":
                assert trained["ended"] == 3, case.name  # before the first epoch, as Keras does, and after each
            if case.form == "py_dataset" and not case.processes:
                every = range(len(case.sizes))
                own = every[rank::workers] if case.shard == "items" else every
                assert {*own} <= {*trained["computed"]} <= {*own, 0, 1}, "the first two tell the form of the data"


def test_two_workers_train_what_a_plain_loop_trains(two_workers):
    check(two_workers, 2)


def test_so_does_one_process(tmp_path):
    check(harness.run("python_data_program", "mirrored", tmp_path), 1)


def test_the_first_line_says_that_each_worker_has_items_of_its_own(two_workers):
    assert (
        two_workers[0]["said"]
        == "multi_worker_mirrored: 2 replicas; a step trains on 2 items of the data, one from each worker (shard='items')"
    )


@pytest.mark.full
def test_so_do_three_workers(tmp_path):
    check(harness.run("python_data_program", "multi_worker_mirrored", tmp_path, size=3), 3)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_worker_is_an_error_on_all(two_workers, fault):
    for results in two_workers:
        assert results["faults"][fault].startswith(FAULTS[fault])
