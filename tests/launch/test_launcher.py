"""The supervisor, with small scripts in place of trainings: outputs, exit codes, signals, and no process left over."""

from __future__ import annotations

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.launched_job import until
from tfdist.cluster import TaskSpec, local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.process import Failure

# A busy machine may keep a task waiting for longer than the 2 s that it has after Ctrl-C.
PATIENT = "from tfdist.launch import launcher; launcher._AFTER_INTERRUPT = 20.0"
CHILD = "import sys, time; time.sleep(300)"


def test_each_task_gets_the_same_cluster_and_its_own_task(job):
    # The end of the chief ends the others: it waits for their words.
    code = """
print(os.environ["TF_CONFIG"], flush=True)
if TASK["type"] == "chief":
    for other in ("worker-0", "worker-1", "ps-0"):
        await_file(f"logs/{other}.log")
else:
    time.sleep(300)
"""
    assert job.run(code, "--workers=2", "--ps=1") == 0
    found = {}
    for name in ("chief-0", "worker-0", "worker-1", "ps-0"):
        config = json.loads(job.log(name))
        assert f"{config['task']['type']}-{config['task']['index']}" == name
        found[name] = config["cluster"]
        assert f"[{name.replace('-', ':')}] {job.log(name)}" in job.output()
    assert {job: len(addresses) for job, addresses in found["ps-0"].items()} == {"chief": 1, "worker": 2, "ps": 1}
    assert all(cluster == found["chief-0"] for cluster in found.values())


def test_lines_are_shown_behind_the_task_as_a_terminal_would_and_logged_as_they_came(job):
    assert job.run(r"""sys.stdout.write("10%\r20%\r\nwhole\n\nno newline at the end")""") == 0
    assert job.output().splitlines() == [f"[worker:0] {x}" for x in ("20%", "whole", "no newline at the end")]
    assert job.log("worker-0") == "10%\r20%\r\nwhole\n\nno newline at the end"


def test_tensorflows_chatter_is_in_the_log_alone(job):
    line = "2026-01-31 12:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] optimized"
    assert job.run(f"print({line!r}); print('shown')") == 0
    assert job.output() == "[worker:0] shown\n"
    assert line in job.log("worker-0")


@pytest.mark.parametrize(
    ("end", "exit_code", "reason"),
    [
        ("sys.exit(7)", 7, "worker:1 failed with exit code 7"),
        (
            "print('train.py: error: no such file')\nsys.exit(7)",
            7,
            "worker:1 failed with exit code 7: train.py: error: no such file",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "worker:1 was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGUSR1)", 138, "worker:1 was killed by SIGUSR1"),
    ],
)
def test_a_failed_task_is_named_and_gives_the_exit_code(job, end, exit_code, reason):
    code = f"if TASK['index'] == 0: sleep_for_ever()\nawait_file('logs/worker-0.log')\nprint('last words', flush=True)\n{end}"
    assert job.run(code, "--workers=2") == exit_code
    assert f"tfdist: {reason}; ending all tasks. Full output: logs/worker-1.log" in job.output()
    assert not job.alive()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "Exception encountered when calling Sequential.call().\\n\\nInput 0 of layer 'dense' has axis -1 of 5.\\n\\n"
            "Arguments received by Sequential.call():\\n  • mask=None",
            "Input 0 of layer 'dense' has axis -1 of 5",
        ),
        (
            "Graph execution error:\\n\\nDetected at node x\\n<stack traces unavailable>\\ntoo large\\n\\t [[{{node x}}]]",
            "too large",
        ),
        ("use strategy tpu.", "use strategy tpu"),
        ("first fault.\\nsecond fault.", "first fault"),
        ("x" * 300, "x" * 185 + "..."),
    ],
)
def test_the_reason_is_the_line_that_says_something(job, message, reason):
    assert job.run(f'raise ValueError("{message}")') == 1
    assert f"failed with exit code 1: ValueError: {reason}; ending all tasks." in job.output()


@pytest.mark.parametrize(
    ("saved", "again"), [(0, "No backup was made"), (400, "Run the command again to go on from step 400")]
)
def test_a_killed_task_is_followed_by_what_to_do(job, saved, again):
    assert job.run(f"{TELL}\ntell(412, {saved})\nos.kill(os.getpid(), signal.SIGKILL)") == 137
    assert f"Full output: logs/worker-0.log. {again}; max_restarts starts the tasks again by itself" in job.output()


@pytest.mark.parametrize("what", ["", "import tfdist; tfdist.create_strategy('multi_worker_mirrored', cluster=False)"])
def test_tasks_that_never_use_tfdist_are_said_to_run_alone(job, what):
    assert job.run(what, "--workers=2") == 0
    assert ("tfdist: no task has made a tfdist.Trainer or strategy: unless" in job.output()) == (not what)


def test_the_first_failure_is_shown_once_and_its_consequences_not_at_all(job):
    code = """
if TASK["index"] == 1:
    await_file("logs/worker-0.log")
    raise ValueError("the cause")
def fail(*args):
    raise RuntimeError("the consequence")
signal.signal(signal.SIGTERM, fail)
sleep_for_ever()
"""
    assert job.run(code, "--workers=2") == 1
    assert job.output().count("Traceback") == 1
    assert "[worker:1] ValueError: the cause\n" in job.output()
    assert "tfdist: worker:1 failed with exit code 1: ValueError: the cause; ending" in job.output()
    assert "the consequence" not in job.output()
    assert "RuntimeError: the consequence" in job.log("worker-0")


def test_a_traceback_that_its_task_survives_is_shown_while_it_runs(job):
    code = """
import traceback
try:
    raise ValueError("handled")
except ValueError:
    traceback.print_exc()
print("going on", flush=True)
await_file("seen")
"""
    process = job.start(code)
    until(lambda: "[worker:0] going on" in job.output())
    assert process.poll() is None
    assert job.output().index("[worker:0] ValueError: handled") < job.output().index("going on")
    (job.folder / "seen").write_text("yes")
    assert process.wait(timeout=60) == 0
    assert job.output().count("handled") == 2  # the line of code, and the error


def test_a_traceback_of_a_task_that_succeeds_is_shown_at_its_end(job):
    assert job.run("print('Traceback (most recent call last):'); print('ValueError: handled')") == 0
    assert "[worker:0] ValueError: handled\n" in job.output()


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
    until(lambda: "those left after 600 s are killed, or upon another signal" in job.output())
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
    self._send(f"+{group}")
guardian.Guardian.watch = watch
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
    assert [line for line in job.output().splitlines() if "no task has made a tfdist.Trainer" not in line] == []


def test_a_killed_worker_is_spared_where_servers_keep_what_it_has_learnt(job):
    code = """
if TASK == {"type": "worker", "index": 1}:
    os.kill(os.getpid(), signal.SIGKILL)
elif TASK["type"] == "chief":
    while "go on" not in pathlib.Path("out").read_text():
        time.sleep(0.05)
else:
    sleep_for_ever()
"""
    assert job.run(code, "--workers=2", "--ps=1") == 0
    assert "tfdist: worker:1 was killed by SIGKILL; the other workers go on" in job.output()
    assert job.alive() == []


@pytest.mark.parametrize(
    ("flags", "task"), [(("--workers=1", "--ps=1"), "worker:0"), (("--workers=2", "--ps=1"), "ps:0")]
)
def test_the_last_worker_and_a_server_are_not_spared(job, flags, task):
    code = f"""
if f"{{TASK['type']}}:{{TASK['index']}}" == "{task}":
    os.kill(os.getpid(), signal.SIGKILL)
sleep_for_ever()
"""
    assert job.run(code, *flags) == 137
    assert f"tfdist: {task} was killed by SIGKILL; ending all tasks" in job.output()


def test_servers_end_when_the_chief_has_finished(job):
    code = "await_file('logs/ps-0.log') if TASK['type'] == 'chief' else sleep_for_ever()"
    assert job.run(code, "--workers=2", "--ps=1") == 0
    assert "failed" not in job.output()
    assert not job.alive()


def test_a_reader_that_goes_away_neither_ends_nor_blocks_the_run(job):
    process = job.start("await_file('go'); [print('x' * 99) for _ in range(9999)]", stdout=subprocess.PIPE)
    process.stdout.close()
    (job.folder / "go").write_text("yes")
    assert process.wait(timeout=60) == 0
    assert len(job.log("worker-0")) == 999900


def test_a_command_that_does_not_exist_is_a_fault(job):
    assert job.run(["no-such-command"], "--workers=2") == 2
    assert "cannot start the tasks" in job.output() and "'no-such-command'" in job.output()
    assert "Traceback" not in job.output()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "Usage: "),
        (["--workers=0", "--", "true"], "--workers"),
        (["--workers=two", "--", "true"], "flag --workers=two: expected a whole number. Received: 'two'"),
        (["--wrokers=2", "--", "true"], "unknown flag '--wrokers'; did you mean '--workers'? Known: "),
        (["x", "--", "true"], "Usage: "),
        (
            ["--workers", "2", "python", "script.py", "--epochs=1"],
            "--workers. Write the command behind --: tfdist launch",
        ),
    ],
)
def test_a_faulty_command_line_is_told_in_sentences(flags, told, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.launch", *flags], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 2
    assert told in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_in_python_the_failure_is_kept_and_the_signal_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    output = io.BytesIO()
    launcher = Launcher(["sh", "-c", "echo oh no; exit 3"], local_cluster(1), tmp_path / "logs", output=output)
    assert launcher.run() == 3
    assert launcher.failure == Failure(TaskSpec("worker", 0), 3, "")
    assert b"[worker:0] oh no\n" in output.getvalue()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


LIFE = "LIFE = int(pathlib.Path(os.environ['TFDIST_PROGRESS'], 'restarts').read_text())\n"
# As a training does.
TELL = """
from tfdist.runtime.progress import Progress
tell = Progress(f"{TASK['type']}-{TASK['index']}").write
"""


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
    assert "a faulty command line or configuration stays so" in job.output()


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
        assert f"was told to end (SIGTERM) at step {step}; starting again from step 5" in job.output()


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


def test_a_signal_that_comes_while_tasks_are_started_is_heeded(tmp_path, monkeypatch):
    start = Launcher._start

    def interrupted(self, spec):
        start(self, spec)
        self._signals.append(signal.SIGTERM)

    monkeypatch.setattr(Launcher, "_start", interrupted)
    began = time.monotonic()
    launcher = Launcher(["sleep", "60"], local_cluster(2), tmp_path / "logs", output=io.BytesIO())
    assert launcher.run() == 128 + signal.SIGTERM
    assert time.monotonic() - began < 30


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


def test_a_progress_bar_is_shown_when_it_is_full(job):
    code = """
import keras
bar = keras.utils.Progbar(3)
for step in range(4):
    bar.update(step)
"""
    assert job.run(code) == 0
    lines = job.output().splitlines()
    assert (
        len(lines) == 1 and lines[0].startswith("[worker:0] 3/3 ") and "\x1b" not in lines[0] and "\x08" not in lines[0]
    )


def test_escape_codes_of_a_task_are_not_shown(job):
    assert job.run(r"""print("a\x1b[31mred\x1b[0m \x1b[2K\x1b]0;title\x07x\x1b[?25l")""") == 0
    assert job.output() == "[worker:0] ared x\n"
    assert "\x1b[31m" in job.log("worker-0")


def test_repeated_warnings_are_shown_once_and_counted_and_prints_are_all_shown(job):
    code = """
import logging, warnings
warnings.simplefilter("always")
for _ in range(3):
    warnings.warn("slow")
    print('    warnings.warn("slow")?')
    logging.warning("odd")
    print("mine")
print("W0000 00:00:1795.6 1998 x.cc:5] late", file=sys.stderr)
print("E0000 00:00:1795.6 1998 x.cc:5] bad", file=sys.stderr)
"""
    assert job.run(code, "--workers=2") == 0
    lines = job.output().splitlines()
    bare = [line.split("] ", 1)[1] for line in lines if line.startswith("[worker:")]
    assert sum("UserWarning: slow" in line for line in bare) == 1
    assert bare.count('  warnings.warn("slow")') == 1 and bare.count('    warnings.warn("slow")?') == 6
    assert bare.count("WARNING:root:odd") == 1 and bare.count("mine") == 6
    assert sum("late" in line for line in bare) == 1 and sum("bad" in line for line in bare) == 2
    counts = [line for line in lines if "more line" in line]
    assert [line.split(" like: ")[0] for line in counts] == [
        f"tfdist: {x}" for x in ("5 more lines", "5 more lines", "1 more line")
    ]
    assert counts[1].endswith("] WARNING:root:odd")
    assert job.log("worker-1").count("WARNING:root:odd") == 3


def test_what_a_script_logs_is_shown(job):
    code = """
from absl import logging
logging.set_verbosity("info")
logging.info("mine")
logging.warning("mine, too")
"""
    assert job.run(code) == 0
    first, second = job.output().splitlines()
    assert first.endswith("mine") and second.endswith("mine, too")


def test_logs_of_the_run_before_are_put_away(job):
    assert job.run("print('first')", "--workers=2") == 0
    assert job.run("print('second')") == 0
    assert job.log("worker-0") == "second\n"
    assert (job.folder / "logs" / "before" / "worker-1.log").read_text() == "first\n"
    assert not (job.folder / "logs" / "worker-1.log").exists()


def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    shown = io.BytesIO()
    launcher = Launcher([sys.executable, "-c", "print('on')"], local_cluster(1), tmp_path, output=shown)
    monkeypatch.setattr("tfdist.launch.launcher.set_logs_aside", lambda folder: None)  # or the link would go
    assert launcher.run() == 0
    assert b"[worker:0] on\n" in shown.getvalue()
    assert f"cannot write {tmp_path}/worker-0.log: No space left on device".encode() in shown.getvalue()


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
    assert "tfdist: SIGINT: ending all tasks; those left after 2 s are killed, or upon another signal" in job.output()


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


def test_a_refusal_of_the_backups_is_not_tried_again(job):
    code = f"""{TELL}
tell(12, 10)
from tfdist.runtime import progress
progress.mark_refusal()
sys.exit(1)
"""
    assert job.run(code, "--max_restarts=3") == 1
    assert (
        "no restart, as it would refuse the backups again; the last backup was that of step 10; ending all tasks"
        in job.output()
    )


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
    assert said == "tfdist: SIGINT: ending all tasks; those left after 2 s are killed, or upon another signal\n"
