"""Which failures and preemptions the supervisor answers with a restart, with small scripts in place of training runs."""

from __future__ import annotations

import io
import json
import os
import pathlib
import signal
import sys

import pytest

from tests.helpers.launched_job import until
from tfdist.cluster import TaskSpec, local_cluster
from tfdist.launch.launcher import Launcher

LIFE = "LIFE = int(pathlib.Path(os.environ['TFDIST_PROGRESS'], 'restarts').read_text())\n"
# As a training does.
TELL = """
from tfdist.runtime.progress import Progress
tell = Progress(f"{TASK['type']}-{TASK['index']}").write
"""


@pytest.mark.parametrize(
    ("saved", "again"), [(0, "No backup was made"), (400, "Run the command again to continue from step 400")]
)
def test_a_killed_task_is_followed_by_what_to_do(job, saved, again):
    assert job.run(f"{TELL}\ntell(412, {saved})\nos.kill(os.getpid(), signal.SIGKILL)") == 137
    assert f"Full output: logs/worker-0.log. {again}; max_restarts starts the tasks again by itself" in job.output()


NOTHING = "There is no backup, so nothing is kept: the same command starts from the beginning"
AGAIN = "Run the same command again to continue from step 400"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("tells", "said"), [("tell(412, 400)", AGAIN), ("tell(412, 0)", NOTHING), ("", "")])
def test_a_training_that_is_told_to_end_says_how_to_continue(job, number, tells, said):
    code = f"{TELL}\n{tells}\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(75))\nsleep_for_ever()"
    process = job.start(code, "--workers=2")
    until(lambda: job.output().count("ready") == 2)
    process.send_signal(number)
    assert process.wait(60) == (130 if number == signal.SIGINT else 75)
    assert [job.output().count(text) for text in (AGAIN, NOTHING)] == [said == AGAIN, said == NOTHING]


def test_a_task_that_saved_and_asks_for_another_start_says_how_to_get_it(job):
    assert job.run(f"{TELL}tell(400, 400)\nsys.exit(75)", "--workers=2") == 75
    assert job.output().splitlines()[-1] == f"tfdist: {AGAIN}"


@pytest.mark.parametrize(("tells", "why"), [("mark_backed_up()", ""), ("", ", because no backup_dir is set")])
def test_a_restart_without_backups_says_why_it_begins_at_step_0(job, tells, why):
    code = f"{TELL}from tfdist.runtime.progress import mark_backed_up\ntell(12, 0)\n{tells}\nsys.exit(7)"
    assert job.run(code, "--max_restarts=1") == 7
    assert f"restart 1/1 from step 0{why}. Full output: " in job.output()


AT_THE_CHIEF = "the chief's last backup, if there is one"


@pytest.mark.parametrize(
    ("restarts", "code", "said"),
    [
        (1, "tell(12); mark_backed_up(); exit(7)", f"restart 1/1 from {AT_THE_CHIEF}. Full output: "),
        (1, "tell(12); exit(7)", "restart 1/1 from step 0, because no backup_dir is set. Full output: "),
        (1, "exit(7)", f"restart 1/1 from {AT_THE_CHIEF}. Full output: "),
        (1, "tell(12); mark_backed_up(); exit(75)", f"at step 12; starting again from {AT_THE_CHIEF}"),
        (0, "tell(12); mark_backed_up(); exit(75)", f"Run the same command again to continue from {AT_THE_CHIEF}"),
        (
            0,
            "tell(12, 10); mark_backed_up(); abort()",
            f". Run the command again to continue from {AT_THE_CHIEF}; max_restarts",
        ),
    ],
)
def test_a_launcher_on_another_host_than_the_chief_names_no_step_of_its_backups(tmp_path, restarts, code, said):
    program = "from os import abort\nfrom tfdist.runtime.progress import Progress, mark_backed_up\ntell = Progress('worker-1').write\n"
    output, cluster = io.BytesIO(), local_cluster(2)
    command = [sys.executable, "-c", program + code]
    launcher = Launcher(command, cluster, tmp_path, output=output, max_restarts=restarts, here=[TaskSpec("worker", 1)])
    assert launcher.run() != 0
    assert said in output.getvalue().decode()


def test_a_failed_run_starts_again_as_a_whole(job):
    code = f"""{LIFE}{TELL}
say(f"life {{LIFE}}")
if LIFE == 2:
    sys.exit(0)
tell(412, 400)
if TASK["index"] == 0:
    pathlib.Path(f"there-{{LIFE}}").write_text("all is said")
    sleep_for_ever()
await_file(f"there-{{LIFE}}")
tell(412 + LIFE)
if LIFE == 0:
    os.kill(os.getpid(), signal.SIGKILL)
raise ValueError("cannot read shard 7")
"""
    assert job.run(code, "--workers=2", "--max_restarts=3") == 0
    said = [line for line in job.output().splitlines() if line.startswith("tfdist: ")]
    log = f"Full output: {pathlib.Path('logs/worker-1.log')}"
    assert said == [
        f"tfdist: worker:1 lost at step 412 (killed by SIGKILL); restart 1/3 from step 400. {log}",
        "tfdist: worker:1 lost at step 413 (exit code 1: ValueError: cannot read shard 7); restart 2/3 from step 400. "
        f"{log}",
    ]
    for task in ("worker-0", "worker-1"):
        assert [line for line in job.log(task).splitlines() if "life" in line] == ["life 0", "life 1", "life 2"]
    assert not job.alive()


def test_restarts_that_are_spent_are_said(job):
    assert job.run("sys.exit(7)", "--max_restarts=1") == 7
    assert "worker:0 lost (exit code 7); restart 1/1 from step 0" in job.output()
    assert "worker:0 failed with exit code 7; all 1 restarts are spent; ending all tasks" in job.output()


def test_a_restart_takes_other_ports_than_one_that_has_been_stolen(job):
    """The launcher's own choice may have gone to another program for good."""
    code = f"""{LIFE}
import socket
jobs = json.loads(os.environ["TF_CONFIG"])["cluster"]
say("at " + json.dumps(jobs))
if TASK["index"] == 0:
    pathlib.Path("told").write_text("the ports of this life")
port = int(jobs["worker"][1].rpartition(":")[2])
if TASK["index"] == 1 and LIFE == 0:
    thief = "import socket, time; s = socket.create_server(('', " + str(port) + ")); print('has it', flush=True); time.sleep(300)"
    subprocess.Popen([sys.executable, "-c", thief, sys.argv[1]], stdout=open("taken", "w"), stderr=subprocess.DEVNULL, start_new_session=True)
    await_file("taken")
    await_file("told")
if TASK["index"] == 1:
    socket.create_server(("", port)).close()
"""
    assert job.run(code, "--workers=2", "--max_restarts=2") == 0, job.output()
    assert job.output().count("Address already in use") >= 1
    for task in ("worker-0", "worker-1"):
        first, second = (json.loads(line[3:]) for line in job.log(task).splitlines() if line.startswith("at "))
        assert not {*first["worker"]} & {*second["worker"]}, "the ports are new"
    ended = job.alive()  # the thief, which the test has started
    assert len(ended) == 1
    os.kill(ended[0], signal.SIGKILL)


def test_addresses_that_the_launcher_is_given_stay(tmp_path):
    output = io.BytesIO()
    command = ["sh", "-c", f'echo "$TF_CONFIG"; cd {tmp_path}; test -e there || {{ touch there; exit 3; }}']
    cluster = local_cluster(1)
    assert Launcher(command, cluster, tmp_path / "logs", output=output, max_restarts=1).run() == 0
    assert output.getvalue().count(cluster.address(cluster.chief).encode()) == 2


def test_a_step_that_fails_three_times_ends_the_run(job):
    assert job.run(f"{TELL}tell(12, 10)\nos.abort()", "--max_restarts=9") == 128 + signal.SIGABRT
    assert job.output().count("restart ") == 2
    assert "worker:0 was killed by SIGABRT; it has failed 3 times at step 12; ending all tasks" in job.output()


def test_a_faulty_configuration_is_not_tried_again(job):
    assert job.run("sys.exit(2)", "--max_restarts=3") == 2
    assert "an invalid command line or configuration would fail again" in job.output()


def test_a_worker_of_parameter_servers_is_started_again_alone(job):
    code = f"""{LIFE}
say(f"life {{LIFE}}")
def await_all(*others):
    for other in others:
        await_file("logs/" + other + ".log")
if TASK["type"] == "worker" and TASK["index"] == 1:
    await_all("chief-0", "worker-0", "ps-0")
    if LIFE == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    pathlib.Path("back").write_text("x")
if TASK["type"] == "chief":
    await_file("back")
    sys.exit(0)
time.sleep(300)
"""
    assert job.run(code, "--workers=2", "--ps=1", "--max_restarts=3") == 0
    assert "worker:1 lost (killed by SIGKILL); restart 1/3 from step 0, of worker:1 alone" in job.output()
    assert job.log("worker-1") == "life 0\nlife 1\n"
    assert job.log("worker-0") == job.log("ps-0") == "life 0\n"


@pytest.mark.parametrize("task", ["chief", "ps"])
def test_parameter_servers_start_again_as_a_whole_when_chief_or_server_fails(job, task):
    code = f"""{LIFE}
if LIFE == 0 and TASK["type"] == "{task}":
    os.kill(os.getpid(), signal.SIGKILL)
if LIFE and TASK["type"] == "chief":
    sys.exit(0)
time.sleep(300)
"""
    assert job.run(code, "--workers=1", "--ps=1", "--max_restarts=3") == 0
    assert f"{task}:0 lost (killed by SIGKILL); restart 1/3 from step 0" in job.output()
    assert not job.alive()


def test_tasks_that_are_told_to_go_are_started_again_without_spending_a_restart(job):
    code = f"{LIFE}{TELL}tell(5 + LIFE, 5)\nsys.exit(75 if LIFE < 2 else 0)"
    assert job.run(code, "--workers=2", "--max_restarts=1") == 0
    for step in (5, 6):
        assert f"ended after SIGTERM at step {step}; starting again from step 5" in job.output()


def test_tasks_that_go_again_and_again_without_progress_spend_restarts(job):
    assert job.run("sys.exit(75)", "--max_restarts=2") == 75
    assert job.output().count("starting again") == 3


def test_a_worker_of_parameter_servers_that_is_told_to_go_is_started_again_alone(job):
    code = f"""{LIFE}
if TASK["type"] == "worker":
    if LIFE == 0:
        sys.exit(75)
    pathlib.Path("back").write_text("x")
if TASK["type"] == "chief":
    await_file("back")
    sys.exit(0)
time.sleep(300)
"""
    assert job.run(code, "--workers=1", "--ps=1", "--max_restarts=3") == 0
    assert "restart 1/3 from step 0, of worker:0 alone" in job.output()


def test_servers_that_were_told_to_go_do_not_make_a_finished_run_look_preempted(job):
    code = """
if TASK["type"] == "chief":
    await_file("logs/ps-0.log")
    sys.exit(0)
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
sleep_for_ever()
"""
    assert job.run(code, "--workers=1", "--ps=1") == 0


def test_tasks_that_are_told_to_go_say_so_by_the_exit_code(job):
    assert job.run("sys.exit(75)", "--workers=2") == 75


def test_a_supervisor_that_is_told_to_go_gives_its_tasks_exit_code(job):
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nsleep_for_ever()"
    process = job.start(code, "--workers=2", "--max_restarts=3")
    until(lambda: job.output().count("ready") == 2)
    process.terminate()
    assert process.wait(timeout=60) == 75
    assert "starting again" not in job.output()


def test_ctrl_c_ends_the_wait_for_a_restart(job):
    long = "from tfdist.launch import restart_policy as r; r.RestartPolicy.delay = property(lambda _: 600.0)"
    process = job.start("sys.exit(1)", "--max_restarts=99", before=long)
    until(lambda: "restart 1/99" in job.output())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 128 + signal.SIGINT


def test_a_refusal_of_the_backups_is_not_tried_again(job):
    code = f"""{TELL}
tell(12, 10)
from tfdist.runtime import progress
progress.mark_refusal()
sys.exit(1)
"""
    assert job.run(code, "--max_restarts=3") == 1
    assert (
        "no restart, because it would reject the backups again; the last backup was that of step 10; ending all tasks"
        in job.output()
    )
