"""Models train by their own methods under a Trainer as plain Keras trains them on one device."""

import functools

import pytest

from tests.helpers import fork_server, tiers
from tests.multiprocess import harness
from tests.multiprocess.roles import Roles

pytestmark = pytest.mark.timeout(900)

CASES = ["methods", "in_scope", "autoencoder", "evaluated_first", "adversaries", "critic_of_three_rounds"]
CASES += ["adversaries_by_batches", "shuffled", "second_trainer"]
# As these have it, and the servers' one worker, too, whose steps come one after the other.
SERVERS = [case for case in CASES if case not in ("shuffled", "second_trainer")]


QUICK = ["methods", "adversaries", "adversaries_by_batches"]


def alike(case, cases=CASES):
    """Returns the cases of the same tier, which run together."""
    return [each for each in cases if (each in QUICK) == (case in QUICK)]


@pytest.fixture(scope="module")
def plain(runs):
    """Returns a function: case -> what plain Keras trains."""
    return lambda case: runs("plain", "model_methods_program", *alike(case))[0][0]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Returns a function: case -> what a parameter server's one worker trains."""
    run = functools.cache(lambda *cases: run_with_servers(tmp_path_factory.mktemp("own_servers"), *cases))
    return lambda case: run(*alike(case, SERVERS))


def run_with_servers(folder, *cases):
    command = fork_server.command(
        "tests.multiprocess.model_methods_program", "parameter_server", str(folder / "out"), *cases
    )
    with Roles(command, folder / "roles", workers=1, ps=1) as roles:
        assert roles.wait("chief:0", 300) == 0, roles.log("chief:0")
        assert [roles.wait(task, 20) for task in roles.processes] == [0] * len(roles.processes)
    return harness.load(folder / "out", 0)


@pytest.mark.parametrize("case", tiers.cases(CASES, quick=QUICK))
@pytest.mark.parametrize("strategy", tiers.cases(["mirrored", "multi_worker_mirrored"], ["multi_worker_mirrored"]))
def test_replicas_train_what_plain_keras_does(runs, plain, strategy, case):
    ranks, expected = runs(strategy, "model_methods_program", *alike(case))[0], plain(case)
    for results in ranks:
        assert harness.difference(results[case], expected[case]) < 1e-5
        assert results["files"] == expected["files"], "whole files under their own names, and no others"
    if case not in ("adversaries_by_batches", "second_trainer"):
        assert ranks[0][f"backups of {case}"], "model.fit makes the trainer's backups"


@pytest.mark.parametrize("case", tiers.cases(SERVERS, quick=QUICK))
def test_parameter_servers_train_what_plain_keras_does(servers, plain, case):
    results = servers(case)
    assert harness.difference(results[case], plain(case)[case]) < 1e-5
    if "by_batches" not in case:
        assert results[f"backups of {case}"]


@pytest.mark.parametrize(
    "strategy",
    tiers.cases(
        ["mirrored", "multi_worker_mirrored", "parameter_server"], ["multi_worker_mirrored", "parameter_server"]
    ),
)
def test_the_first_training_of_a_model_without_a_scope_is_said_on_every_worker(runs, servers, strategy):
    ranks = (
        [servers(QUICK[0])] if strategy == "parameter_server" else runs(strategy, "model_methods_program", *QUICK)[0]
    )
    for results in ranks:
        before, others = results["said without scope"][:2], results["said without scope"][3:]
        assert [*before, *others] == [""] * 4
        assert results["said without scope"][2].startswith(
            "tfdist: model 'forgotten' was not built in the scope of this"
        )


def test_with_one_replica_a_model_without_a_scope_is_no_fault(plain, runs):
    assert plain(QUICK[0])["said without scope"] == [""] * 5
    results = runs("one_device", "model_methods_program", "adversaries_by_batches")[0][0]
    assert results["said without scope"] == [""] * 5


@pytest.mark.full
def test_shuffled_data_come_in_the_order_of_plain_keras_on_one_device(runs, plain):
    results = runs("one_device", "model_methods_program", "shuffled")[0][0]
    assert harness.difference(results["shuffled"], plain("shuffled")["shuffled"]) < 1e-6
