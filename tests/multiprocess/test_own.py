"""Models train by their own methods under a Trainer as plain Keras trains them on one device."""

import sys

import pytest

from tests.multiprocess import harness
from tests.multiprocess.roles import Roles

pytestmark = pytest.mark.timeout(900)

CASES = ["methods", "in_scope", "autoencoder", "evaluated_first", "adversaries", "critic_of_three_rounds"]
CASES += ["adversaries_by_batches", "shuffled", "second_trainer"]
# As these have it, and the servers' one worker, too, whose steps come one after the other.
SERVERS = [case for case in CASES if case not in ("shuffled", "second_trainer")]


@pytest.fixture(scope="module")
def plain(runs):
    return runs("plain", "own_program", *CASES)[0][0]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own_servers")
    command = [
        sys.executable,
        "-m",
        "tests.multiprocess.own_program",
        "parameter_server",
        str(folder / "out"),
        *SERVERS,
    ]
    with Roles(command, folder / "roles", workers=1, ps=1) as roles:
        assert roles.wait("chief:0", 300) == 0, roles.log("chief:0")
        assert [roles.wait(task, 20) for task in roles.processes] == [0] * len(roles.processes)
    return harness.load(folder / "out", 0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker_mirrored"])
def test_replicas_train_what_plain_keras_does(runs, plain, strategy, case):
    ranks = runs(strategy, "own_program", *CASES)[0]
    for results in ranks:
        assert harness.difference(results[case], plain[case]) < 1e-5
        assert results["files"] == plain["files"], "whole files under their own names, and no others"
    if case not in ("adversaries_by_batches", "second_trainer"):
        assert ranks[0][f"backups of {case}"], "model.fit makes the trainer's backups"


@pytest.mark.parametrize("case", SERVERS)
def test_parameter_servers_train_what_plain_keras_does(servers, plain, case):
    assert harness.difference(servers[case], plain[case]) < 1e-5
    if "by_batches" not in case:
        assert servers[f"backups of {case}"]


def test_shuffled_data_come_in_the_order_of_plain_keras_on_one_device(runs, plain):
    results = runs("one_device", "own_program", "shuffled")[0][0]
    assert harness.difference(results["shuffled"], plain["shuffled"]) < 1e-6
