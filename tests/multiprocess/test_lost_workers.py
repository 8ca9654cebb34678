"""A worker that ends alone ends the others, soon and with a sentence, where no launcher does so."""

import re
import signal
import time

import pytest

from tests.helpers import fork_server, tiers
from tests.multiprocess import harness
from tests.multiprocess.roles import Roles
from tests.multiprocess.waiting import wait_until

by_grpc = pytest.fixture(scope="module", autouse=True)(harness.by_grpc)


# A transport's own loss is tested in tests/collectives/test_transports.py.
@pytest.mark.parametrize(
    ("lost", "how"),
    tiers.cases([(1, "error"), (1, "kill"), (0, "kill"), (1, "exit")], quick=[(1, "kill"), (0, "kill")]),
)
def test_the_others_end_and_name_it(tmp_path, lost, how):
    command = fork_server.command("tests.multiprocess.lost_worker_program", str(lost), how)
    with Roles(command, tmp_path / "roles", workers=2, ps=0) as roles:
        gone, left = (f"worker:{rank}" for rank in (lost, 1 - lost))
        roles.wait(gone, 120)
        ended = time.monotonic()
        assert "it happens" in roles.log(gone), roles.log(gone)
        assert roles.wait(left, 110) == 1
        assert time.monotonic() - ended < 90  # without looking it would wait for two minutes
        sentence = (
            f"tfdist.errors.ClusterError: {gone} at {roles.cluster.address(roles.cluster.training_tasks()[lost])}"
        )
        *_, last = roles.log(left).splitlines()
        assert last.startswith(sentence) and last.endswith("the last backup if there is one."), roles.log(left)
        assert roles.log(left).count("Traceback (most recent call last)") == 1, (
            "TensorFlow's traceback hides the sentence"
        )
        assert "trainer.fit(model, x, x[:, :1], batch_size=4," in roles.log(left), "the user needs his line"
        assert "contextlib.py" not in roles.log(left)


@pytest.mark.parametrize("finished", [0, pytest.param(1, marks=pytest.mark.full)])
def test_one_that_has_finished_is_named_with_the_call_that_waits_for_it(tmp_path, finished):
    command = fork_server.command("tests.multiprocess.lost_worker_program", str(finished), "finish")
    with Roles(command, tmp_path / "roles", workers=2, ps=0) as roles:
        gone, left = f"worker:{finished}", f"worker:{1 - finished}"
        assert [roles.wait(gone, 120), roles.wait(left, 120)] == [0, 1], roles.log(left)
        sentence = (
            rf"tfdist\.errors\.ClusterError: {gone} has finished its program \(exit code 0\), and {left} waits for it in "
            r"evaluate at \S*lost_worker_program\.py:\d+: call it on every worker"
        )
        assert re.fullmatch(sentence, roles.log(left).splitlines()[-1]), roles.log(left)


@pytest.mark.parametrize("lost", tiers.cases([0, 1], quick=[1]))
def test_the_others_say_for_whom_they_wait_and_go_on_with_it(tmp_path, lost):
    command = fork_server.command("tests.multiprocess.lost_worker_program", str(lost), "stop")
    with Roles(command, tmp_path / "roles", workers=2, ps=0) as roles:
        stopped, left = (f"worker:{rank}" for rank in (lost, 1 - lost))
        address = roles.cluster.address(roles.cluster.training_tasks()[lost])
        wait_until(lambda: "it happens" in roles.log(stopped), 120)
        wait_until(lambda: f"tfdist: {left} waits for {stopped} at {address}: no answer for " in roles.log(left), 60)
        roles.processes[stopped].send_signal(signal.SIGCONT)
        assert [roles.wait(task, 120) for task in (stopped, left)] == [0, 0], roles.log(left)


@pytest.mark.slow
def test_one_that_stays_stopped_is_given_up_by_all(tmp_path):
    command = fork_server.command("tests.multiprocess.lost_worker_program", "1", "stop")
    with Roles(command, tmp_path / "roles", workers=3, ps=0) as roles:
        address = roles.cluster.address(roles.cluster.training_tasks()[1])
        wait_until(lambda: "it happens" in roles.log("worker:1"), 120)
        began = time.monotonic()
        assert [roles.wait(task, 240) for task in ("worker:0", "worker:2")] == [1, 1]
        assert time.monotonic() - began > 50
        told = f"tfdist.errors.ClusterError: worker:0 waits for worker:1 at {address}: no answer for 6"
        assert told in roles.log("worker:0"), roles.log("worker:0")
        assert "tfdist.errors.ClusterError: worker:" in roles.log("worker:2"), roles.log("worker:2")
        roles.processes["worker:1"].send_signal(signal.SIGCONT)
        assert roles.wait("worker:1", 60) == 1
        assert "tfdist.errors.ClusterError: worker:0 at" in roles.log("worker:1"), roles.log("worker:1")


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1])
def test_one_that_is_started_again_alone_is_named(tmp_path, lost):
    command = fork_server.command("tests.multiprocess.lost_worker_program", str(lost), "again")
    with Roles(command, tmp_path / "roles", workers=2, ps=0) as roles:
        left = f"worker:{1 - lost}"
        assert roles.wait(left, 200) == 1, roles.log(left)
        address = roles.cluster.address(roles.cluster.training_tasks()[lost])
        told = f"ClusterError: worker:{lost} at {address} was restarted alone and cannot join the tasks that train"
        assert told in roles.log(left), roles.log(left)


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.full), 1])
def test_who_waits_for_a_task_that_is_killed_as_it_saves_saves_itself(tmp_path, lost):
    place = tmp_path / "exported"
    command = fork_server.command("tests.multiprocess.lost_worker_program", str(lost), "save", str(place))
    with Roles(command, tmp_path / "roles", workers=2, ps=0) as roles:
        gone, left = (f"worker:{rank}" for rank in (lost, 1 - lost))
        wait_until(lambda: "the export is there" in roles.log(left), 180)
        assert "it happens" in roles.log(gone)
        assert (place / "saved_model.pb").exists() and [path.name for path in tmp_path.glob("exported*")] == [
            "exported"
        ]
