"""The supervisor, with small scripts in place of training runs: clusters, exit codes, signals, and no process left over."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import re
import signal
import sys
import time

import psutil
import pytest

from tests.helpers.launched_job import imported, until
from tfdist.cluster import TaskSpec, local_cluster
from tfdist.launch.failure import Failure
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options

# A busy machine may keep a task waiting for longer than the 2 s that it has after Ctrl-C.
PATIENT = "from tfdist.launch import launcher; launcher.AFTER_INTERRUPT = 20.0"
CHILD = "import sys, time; time.sleep(300)"


def test_each_task_gets_the_same_cluster_and_its_own_task(supervise, tmp_path):
    # The end of the chief ends the others: it waits for their words.
    code = """
print(os.environ["TF_CONFIG"], flush=True)
if TASK["type"] == "chief":
    for other in ("worker-0", "worker-1", "ps-0"):
        await_file(f"logs/{other}.log")
else:
    time.sleep(300)
"""
    exit_code, output = supervise(code, local_cluster(2, ps=1))
    assert exit_code == 0
    found = {}
    for name in ("chief-0", "worker-0", "worker-1", "ps-0"):
        log = (tmp_path / "logs" / f"{name}.log").read_text()
        config = json.loads(log)
        assert f"{config['task']['type']}-{config['task']['index']}" == name
        found[name] = config["cluster"]
        assert f"[{name.replace('-', ':')}] {log}" in output
    assert {job: len(addresses) for job, addresses in found["ps-0"].items()} == {"chief": 1, "worker": 2, "ps": 1}
    assert all(cluster == found["chief-0"] for cluster in found.values())


@pytest.mark.parametrize(
    ("end", "exit_code", "reason"),
    [
        ("sys.exit(7)", 7, "worker:1 failed with exit code 7, last line: last words"),
        (
            "print('train.py: error: no such file')\nsys.exit(7)",
            7,
            "worker:1 failed with exit code 7, last line: train.py: error: no such file",
        ),
        (
            "from tfdist.errors import ConfigError\nraise ConfigError('no bucket')",
            2,
            "worker:1 failed with exit code 1: ConfigError: no bucket",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "worker:1 was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGUSR1)", 138, "worker:1 was killed by SIGUSR1"),
    ],
)
def test_a_failed_task_is_named_and_gives_the_exit_code(supervise, end, exit_code, reason):
    code = f"if TASK['index'] == 0: sleep_for_ever()\nawait_file('logs/worker-0.log')\nprint('last words', flush=True)\n{end}"
    found, output = supervise(code, local_cluster(2))
    assert found == exit_code
    assert f"tfdist: {reason}; ending all tasks. Full output: logs/worker-1.log" in output
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [command for command in commands if "script.py" in command]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_task_which_may_end_in_its_own_way(job, number):
    code = f"""
def bye(*args):
    print("bye", flush=True)
    sys.exit(0)
signal.signal({number}, bye)
sleep_for_ever()
"""
    process = job.start(code, "--workers=2", "--grace_seconds=600", before=PATIENT)
    until(lambda: job.output().count("ready") == 2)
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert "[worker:0] bye" in job.output() and "[worker:1] bye" in job.output()
    assert "failed" not in job.output()


DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN); sleep_for_ever()"


def test_a_deaf_task_is_killed_after_the_grace(job):
    process = job.start(DEAF, "--workers=2", "--grace_seconds=1")
    until(lambda: job.output().count("ready") == 2)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert time.monotonic() - begun > 0.9
    assert not job.alive()


def test_a_second_signal_does_not_wait_for_the_grace(job):
    process = job.start(DEAF, "--workers=2", "--grace_seconds=600")
    until(lambda: job.output().count("ready") == 2)
    process.send_signal(signal.SIGTERM)
    until(lambda: "tasks that still run after 600 s, or at another signal, are killed" in job.output())
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert not job.alive()


def test_what_a_shell_runs_has_the_grace_although_the_shell_dies_at_once(job):
    child = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: (time.sleep(0.5), print('saved'), sys.exit())); "
        "print('ready', flush=True); time.sleep(300)"
    )
    process = job.start(["bash", "-c", f'{sys.executable} -c "{child}" {job.marker}; true'])
    until(lambda: "ready" in job.output())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert "[worker:0] saved" in job.output()


def test_killing_the_launcher_leaves_no_process(job):
    child = f'{sys.executable} -c "{CHILD}" {job.marker}'
    process = job.start(["bash", "-c", f"echo ready; {child} & {child}; true"], "--workers=2")
    until(lambda: len(job.alive()) == 7)  # the launcher, two shells, four children
    process.kill()
    until(lambda: not job.alive())


def test_killing_a_task_takes_what_it_has_started_and_the_other_tasks_along(job):
    code = f"""
subprocess.Popen([sys.executable, "-c", {CHILD!r}, sys.argv[1]])
pathlib.Path(f"pid{{TASK['index']}}").write_text(str(os.getpid()))
sleep_for_ever()
"""
    process = job.start(code, "--workers=2")
    until(lambda: len(job.alive()) == 5 and job.output().count("ready") == 2)
    os.kill(int((job.folder / "pid1").read_text()), signal.SIGKILL)
    assert process.wait(timeout=60) == 137
    assert "worker:1 was killed by SIGKILL" in job.output()
    until(lambda: not job.alive())


def test_killing_the_launcher_just_after_it_has_started_a_task_leaves_no_process(job):
    """Its guardian has not heard of that task yet."""
    before = """
import os, signal
from tfdist.launch import guardian
def watch(self, group, started=[]):
    started.append(group)
    if len(started) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    tell(self, group)
tell, guardian.Guardian.watch = guardian.Guardian.watch, watch
"""
    process = job.start("pathlib.Path(f'{os.getpid()}.pid').touch()\nsleep_for_ever()", "--workers=2", before=before)
    assert process.wait(timeout=60) == -signal.SIGKILL
    until(lambda: not job.alive())


def test_a_launcher_without_its_guardian_still_ends_well(job):
    process = job.start("await_file('go')", "--workers=2")
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: len(children.read_text().split()) == 3)  # first the guardian, then the tasks
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    (job.folder / "go").write_text("yes")
    assert process.wait(timeout=60) == 0
    assert [line for line in job.output().splitlines() if "no task has created a tfdist.Trainer" not in line] == []


def test_a_killed_worker_is_spared_where_servers_keep_what_it_has_learnt(job):
    """And the servers, and the workers that are left, end with the chief."""
    code = """
if TASK == {"type": "worker", "index": 1}:
    os.kill(os.getpid(), signal.SIGKILL)
elif TASK["type"] == "chief":
    while "the other workers continue" not in pathlib.Path("out").read_text():
        time.sleep(0.05)
else:
    sleep_for_ever()
"""
    assert job.run(code, "--workers=2", "--ps=1") == 0
    assert "tfdist: worker:1 was killed by SIGKILL; the other workers continue" in job.output()
    assert "failed" not in job.output()
    assert job.alive() == []


@pytest.mark.parametrize(("workers", "task"), [(1, "worker:0"), (2, "ps:0")])
def test_the_last_worker_and_a_server_are_not_spared(supervise, workers, task):
    code = f"""
if f"{{TASK['type']}}:{{TASK['index']}}" == "{task}":
    os.kill(os.getpid(), signal.SIGKILL)
sleep_for_ever()
"""
    exit_code, output = supervise(code, local_cluster(workers, ps=1))
    assert exit_code == 137
    assert f"tfdist: {task} was killed by SIGKILL; ending all tasks" in output


def test_a_command_that_does_not_exist_is_a_fault(job):
    assert job.run(["no-such-command"], "--workers=2") == 2
    assert job.output() == "the command 'no-such-command' cannot be run; is it installed?\n"
    assert not (job.folder / "logs").exists()


def test_a_command_that_the_system_does_not_run_is_a_fault(job):
    (program := job.folder / "program").write_text("of no known format")
    program.chmod(0o755)
    assert job.run(["./program"], "--workers=2") == 2
    assert "cannot start the tasks" in job.output() and "'./program'" in job.output()
    assert "Traceback" not in job.output()


def test_in_python_the_failure_is_kept_and_the_signal_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    output = io.BytesIO()
    launcher = Launcher(Options(["sh", "-c", "echo oh no; exit 3"], local_cluster(1), tmp_path / "logs"), output=output)
    assert launcher.run() == 3
    assert launcher.failure == Failure(TaskSpec("worker", 0), 3, last_line="oh no")
    assert b"[worker:0] oh no\n" in output.getvalue()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_signal_that_comes_while_tasks_are_started_is_heeded(tmp_path):
    command = ["sh", "-c", "kill -TERM $PPID; sleep 600"]  # the first task signals before the last one starts
    launcher = Launcher(Options(command, local_cluster(8), tmp_path / "logs"), output=io.BytesIO())
    assert launcher.run() == 128 + signal.SIGTERM


def test_ctrl_c_is_answered_at_once_and_leaves_nobody_waiting(job):
    code = """
if TASK["index"] == 0:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as if it waited in a collective
pathlib.Path(f"ready-{TASK['index']}").touch()
sleep_for_ever()
"""
    job.start(code, "--workers=2", "--grace_seconds=600")
    until(lambda: len(list(job.folder.glob("ready-*"))) == 2)
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(timeout=60) == 130  # the grace is 600
    assert (
        "tfdist: SIGINT: ending all tasks; tasks that still run after 2 s, or at another signal, are killed"
        in job.output()
    )


def test_after_ctrl_c_no_traceback_is_shown_of_a_task_that_takes_seconds_to_end(job):
    code = """
try:
    sleep_for_ever()
except KeyboardInterrupt:
    import traceback
    traceback.print_exc()
    time.sleep(4)  # longer than a traceback is held back
"""
    job.start(code, "--workers=1", before=PATIENT)
    until(lambda: "ready" in job.output())
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(timeout=60) == 130
    assert "Traceback" not in job.output() and "Traceback" in job.log("worker-0")


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.full)])
def test_one_ctrl_c_ends_deaf_and_stopped_tasks_within_seconds_and_says_one_line(job, stopped):
    process = job.start(DEAF, "--workers=2", "--grace_seconds=600")
    until(lambda: job.output().count("ready") == 2)
    if stopped:
        for pid in set(job.alive()) - {process.pid}:
            os.kill(pid, signal.SIGSTOP)
    before = job.output()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not job.alive()
    said = job.output().removeprefix(before)
    assert (
        said == "tfdist: SIGINT: ending all tasks; tasks that still run after 2 s, or at another signal, are killed\n"
    )


def test_a_standard_output_of_text_alone_shows_the_lines(tmp_path):
    """As a notebook's."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert Launcher(Options(["sh", "-c", "echo ä; echo b"], local_cluster(1), tmp_path / "logs")).run() == 0
    assert "ä\n" in shown.getvalue() and "b\n" in shown.getvalue()


def test_a_crash_of_a_library_is_named_with_the_line_of_the_script(job):
    code = f"""
{imported("tfdist.runtime.report.stacks")}
stacks.listen("worker-0")
def crash():
    os.abort()
crash()
"""
    assert job.run(code) == 134
    assert re.search(r"tfdist: worker:0 was killed by SIGABRT at script\.py:\d+ in crash; ending all", job.output())


def test_a_task_that_the_system_kills_for_its_memory_is_named_so(job):
    """The count is in place of the kernel's: a group of processes with a limit of its own needs root."""
    kills = "from tfdist.launch import start; counts = iter([0, 1]); start.out_of_memory_kills = lambda: next(counts)"
    assert job.start("os.kill(os.getpid(), signal.SIGKILL)", before=kills).wait(60) == 137
    assert "worker:0 was killed by SIGKILL, because memory was exhausted; ending all tasks" in job.output()
