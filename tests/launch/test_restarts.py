"""Which failures and preemptions the supervisor answers with a restart, with small scripts in place of training runs."""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
import signal

import pytest

from tests.helpers.launched_job import PROGRESS, until
from tfdist.cluster import TaskSpec, local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options

# As a training does.
REPORTS = f"{PROGRESS}LIFE = progress.restarts()\ntell = progress.write\ntell()\n"
NOTHING = "There is no backup, so nothing is kept: the same command starts from the beginning"
AGAIN = "Run the same command again to continue from step 400"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("restarts", "code", "status", "said"),
    [
        (0, f"tell(done=412); {KILL}", 137, "No backup was made; max_restarts starts the tasks again by itself"),
        (
            0,
            f"tell(done=412, saved=400); {KILL}",
            137,
            "Full output: logs/worker-0.log. Run the command again to continue from step 400; max_restarts starts",
        ),
        (0, "tell(done=400, saved=400); sys.exit(75)", 75, f"tfdist: {AGAIN}\n"),
        (1, "tell(done=12, backed_up=True); sys.exit(7)", 7, "restart 1/1 from step 0. Full output: "),
        (1, "tell(done=12); sys.exit(7)", 7, "restart 1/1 from step 0, because no backup_dir is set. Full output: "),
        (1, "sys.exit(7)", 7, "worker:0 failed with exit code 7; all 1 restarts are spent; ending all tasks"),
        (
            3,
            "raise __import__('tfdist').ConfigError('bad')",
            2,
            "an invalid command line or configuration would fail again",
        ),
        (3, "sys.exit(2)", 2, "an invalid command line or configuration would fail again"),
        (
            3,
            "tell(done=12, saved=10, refused=True); sys.exit(1)",
            1,
            "no restart, because it would reject the backups again; the last backup was that of step 10; ending all tasks",
        ),
    ],
)
def test_an_end_is_followed_by_a_restart_or_by_what_to_do(supervise, restarts, code, status, said):
    exit_code, output = supervise(REPORTS + code, local_cluster(1), max_restarts=restarts)
    assert exit_code == status
    assert said in output
    assert output.count("; restart ") == (restarts == 1)


SHARED = """
import os, pathlib, signal, sys, time, tfdist
if '"index": 0' in os.environ["TF_CONFIG"]:
    while not pathlib.Path("ready").exists():
        time.sleep(0.01)
    sys.exit("UnavailableError: Socket closed")
def end(*_):
    raise tfdist.ConfigError("the bucket is missing")
signal.signal(signal.SIGTERM, end)
pathlib.Path("ready").touch()
time.sleep(600)
"""


def test_an_error_of_the_configuration_outweighs_its_consequences(supervise, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exit_code, output = supervise(SHARED, local_cluster(2))
    assert exit_code == 2
    assert "worker:0 failed with exit code 1, last line: UnavailableError: Socket closed" in output
    assert "worker:1 failed with exit code 1: ConfigError: the bucket is missing" in output


AT_THE_CHIEF = "the chief's last backup, if there is one"


@pytest.mark.parametrize(
    ("restarts", "code", "said"),
    [
        (1, "tell(done=12, backed_up=True); sys.exit(7)", f"restart 1/1 from {AT_THE_CHIEF}. Full output: "),
        (1, "tell(done=12); sys.exit(7)", "restart 1/1 from step 0, because no backup_dir is set. Full output: "),
        (1, "tell(done=12, backed_up=True); sys.exit(75)", f"at step 12; starting again from {AT_THE_CHIEF}"),
        (
            0,
            "tell(done=12, backed_up=True); sys.exit(75)",
            f"Run the same command again to continue from {AT_THE_CHIEF}",
        ),
        (
            0,
            "tell(done=12, saved=10, backed_up=True); os.abort()",
            f". Run the command again to continue from {AT_THE_CHIEF}; max_restarts",
        ),
    ],
)
def test_a_launcher_on_another_host_than_the_chief_names_no_step_of_its_backups(supervise, restarts, code, said):
    here = [TaskSpec("worker", 1)]
    exit_code, output = supervise(REPORTS + code, local_cluster(2), max_restarts=restarts, here=here)
    assert exit_code != 0
    assert said in output


@pytest.mark.parametrize(
    ("number", "tells", "said"),
    [
        (signal.SIGINT, "tell(done=412)", NOTHING),
        (signal.SIGTERM, "tell(done=412, saved=400)", AGAIN),
        pytest.param(signal.SIGTERM, "", "", marks=pytest.mark.full),
    ],
)
def test_a_training_that_is_told_to_end_says_how_to_continue(job, number, tells, said):
    reports = f"{PROGRESS}tell = progress.write\n{tells}\n"
    ends = "signal.signal(signal.SIGTERM, lambda *_: os._exit(75))\nsleep_for_ever()"
    process = job.start(reports + ends, "--workers=2", "--max_restarts=3")
    until(lambda: job.output().count("ready") == 2)
    process.send_signal(number)
    assert process.wait(60) == (130 if number == signal.SIGINT else 75)
    assert [job.output().count(text) for text in (AGAIN, NOTHING)] == [said == AGAIN, said == NOTHING]
    assert "starting again" not in job.output()


def test_a_failed_run_starts_again_as_a_whole(job):
    code = f"""{REPORTS}
say(f"life {{LIFE}}")
if LIFE == 2:
    sys.exit(0)
tell(done=412, saved=400)
if TASK["index"] == 0:
    pathlib.Path(f"there-{{LIFE}}").write_text("all is said")
    sleep_for_ever()
await_file(f"there-{{LIFE}}")
tell(done=412 + LIFE)
if LIFE == 0:
    {KILL}
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


def test_a_restart_takes_other_ports_than_one_that_has_been_stolen(job):
    """The launcher's own choice may have gone to another program for good."""
    code = f"""{REPORTS}
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
    assert Launcher(Options(command, cluster, tmp_path / "logs", max_restarts=1), output=output).run() == 0
    given = re.findall(rb"^\[worker:0\] .*(127\.0\.0\.1:\d+)", output.getvalue(), re.MULTILINE)
    assert given == [cluster.address(cluster.chief).encode()] * 2


def test_a_worker_of_parameter_servers_that_ends_is_started_again_alone(supervise, tmp_path):
    """Killed, or told to go: the servers keep what it has learnt."""
    code = f"""{REPORTS}
say(f"life {{LIFE}}")
if TASK == {{"type": "worker", "index": 1}}:
    for other in ("chief-0", "worker-0", "ps-0"):
        await_file("logs/" + other + ".log")
    if LIFE == 0:
        {KILL}
    pathlib.Path("back-1").write_text("x")
if TASK == {{"type": "worker", "index": 0}}:
    if LIFE == 0:
        await_file("back-1")
        sys.exit(75)
    pathlib.Path("back-0").write_text("x")
if TASK["type"] == "chief":
    await_file("back-0")
    sys.exit(0)
time.sleep(300)
"""
    exit_code, output = supervise(code, local_cluster(2, ps=1), max_restarts=3)
    assert exit_code == 0
    assert "worker:1 lost (killed by SIGKILL); restart 1/3 from step 0, of worker:1 alone" in output
    assert "worker:0 lost (exit code 75); restart 2/3 from step 0, of worker:0 alone" in output
    logs = {path.stem: path.read_text() for path in (tmp_path / "logs").glob("*.log")}
    assert logs == {
        "chief-0": "life 0\n",
        "worker-0": "life 0\nlife 2\n",
        "worker-1": "life 0\nlife 1\n",
        "ps-0": "life 0\n",
    }


def test_parameter_servers_start_again_as_a_whole_when_chief_or_server_fails(supervise):
    code = f"""{REPORTS}
if TASK["type"] == "chief":
    tell(done=5 + LIFE)
    pathlib.Path(f"there-{{LIFE}}").write_text("at a step, so that the restart does not wait")
    if LIFE == 1:
        {KILL}
    if LIFE == 2:
        sys.exit(0)
if TASK["type"] == "ps" and LIFE == 0:
    await_file("there-0")
    {KILL}
time.sleep(300)
"""
    exit_code, output = supervise(code, local_cluster(1, ps=1), max_restarts=3)
    assert exit_code == 0
    assert "ps:0 lost at step 5 (killed by SIGKILL); restart 1/3 from step 0" in output
    assert "chief:0 lost at step 6 (killed by SIGKILL); restart 2/3 from step 0" in output
    assert "alone" not in output


def test_tasks_that_are_told_to_go_are_started_again_without_spending_a_restart(supervise):
    code = f"{REPORTS}tell(done=5 + LIFE, saved=5)\nsys.exit(75 if LIFE < 2 else 0)"
    exit_code, output = supervise(code, local_cluster(2), max_restarts=1)
    assert exit_code == 0
    for step in (5, 6):
        assert f"ended after SIGTERM at step {step}; starting again from step 5" in output


def test_tasks_that_go_again_and_again_without_progress_spend_restarts(supervise):
    exit_code, output = supervise("sys.exit(75)", local_cluster(2), max_restarts=1)
    assert exit_code == 75
    assert output.count("starting again") == 2


def test_servers_that_were_told_to_go_do_not_make_a_finished_run_look_preempted(supervise):
    code = """
if TASK["type"] == "chief":
    await_file("logs/ps-0.log")
    sys.exit(0)
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
sleep_for_ever()
"""
    assert supervise(code, local_cluster(1, ps=1))[0] == 0


def test_ctrl_c_ends_the_wait_for_a_restart(job):
    long = "from tfdist.launch import restart_policy as r; r.RestartPolicy.delay = property(lambda _: 600.0)"
    process = job.start("sys.exit(1)", "--max_restarts=99", before=long)
    until(lambda: "restart 1/99" in job.output())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 128 + signal.SIGINT
