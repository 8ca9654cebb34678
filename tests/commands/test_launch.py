"""`tfdist launch`: its command line, and a hangup under nohup."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "Usage: "),
        (["--workers=2", "--"], "The command is missing."),
        (["--workers=0", "--", "true"], "--workers"),
        (["--workers=two", "--", "true"], "--workers must be 1 to 10000, or MIN:MAX as 1:4. Received: 'two'."),
        (["--wrokers=2", "--", "true"], "unknown flag '--wrokers'; did you mean '--workers'? Known: "),
        (["x", "--", "true"], "the command 'x' cannot be run; is it installed?"),
        (
            ["--workers=2", "script.py", "--epochs=1"],
            "'script.py' cannot be run; a script needs its interpreter: python script.py",
        ),
        (["-n", "two", "true"], "--workers must be 1 to 10000, or MIN:MAX as 1:4. Received: 'two'."),
        (
            ["--hosts=a,b", "--workers=2", "true"],
            "--hosts and --workers exclude each other: leave out --workers; each host gets",
        ),
        (["--hosts=a,b", "-n", "2", "true"], "--hosts and --workers exclude each other"),
        (["--hostfile=f", "--ps=1", "true"], "--hostfile and --ps exclude each other: leave out --ps; name the hosts"),
        (["--hosts=a,b", "--ps=1"], "The command is missing.\n--hosts and --ps exclude each other"),
        (["--hosts=a,b", "--ps=1", "true"], "\nthis host ("),
        (["--ps_hosts=c", "--task=ps:0", "true"], "--ps_hosts, --task: only with --hosts=A,B or --hostfile=FILE"),
        (["--workers_per_host=2", "true"], "--workers_per_host: only with --hosts=A,B or --hostfile=FILE"),
        (["--hosts=", "true"], "either hosts or hostfile must be given. Received: hosts='', hostfile=''."),
        (["--hosts=a,a", "true"], "hosts has 'a' more than once"),
        (["--hosts=a,b", "true"], ") is not one of a, b: write the names or addresses"),
        (["--hostfile=no/such", "true"], "hostfile no/such: No such file or directory."),
    ],
)
def test_a_faulty_command_line_is_told_in_sentences(flags, told, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.launch", *flags], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 2
    assert told in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "tasks", "shown"),
    [
        (["--workers=2", "echo", "--workers=3", "-n", "4"], ["worker:0", "worker:1"], "--workers=3 -n 4"),
        (
            ["--workers", "2", "--", "echo", "--max-restarts=1", "--", "-x"],
            ["worker:0", "worker:1"],
            "--max-restarts=1 -- -x",
        ),
        (["-n", "2", "echo", "--", "x"], ["worker:0", "worker:1"], "-- x"),
        (["-n=2", "--max-restarts", "1", "echo", "--h"], ["worker:0", "worker:1"], "--h"),
        (["--hosts=127.0.0.1", "--workers_per_host", "2", "echo", "x"], ["worker:0", "worker:1"], "x"),
        (["--hosts", "h1,h2", "--ps-hosts=h3", "--task=ps:0,chief:0", "echo", "x"], ["ps:0", "chief:0"], "x"),
    ],
)
def test_what_stands_behind_the_command_is_its_own(arguments, tasks, shown, tmp_path):
    launch = [sys.executable, "-m", "tfdist.launch", *arguments]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [
        line for line in done.stdout.splitlines() if not line.startswith("tfdist: no task has created a tfdist.Trainer")
    ]
    assert sorted(lines) == sorted(f"[{task}] {shown}" for task in tasks)


def test_a_launcher_leaves_the_logs_of_tasks_of_other_hosts(tmp_path):
    """Hosts may share the folder, and start one after the other."""
    (tmp_path / "logs").mkdir()
    for task in ("worker-0", "worker-1"):
        (tmp_path / "logs" / f"{task}.log").write_text("earlier")
    launch = [sys.executable, "-m", "tfdist.launch", "--hosts=h1,h2", "--task=worker:1", "echo", "now"]
    subprocess.run(launch, check=True, timeout=60, cwd=tmp_path, capture_output=True)
    logs = {str(path.relative_to(tmp_path / "logs")): path.read_text() for path in tmp_path.rglob("*.log")}
    assert logs == {"worker-0.log": "earlier", "worker-1.log": "now\n", "before/worker-1.log": "earlier"}


def test_a_hangup_is_ignored_under_nohup(tmp_path):
    command = ["nohup", sys.executable, "-m", "tfdist.launch", "--", "sh", "-c", "echo started; sleep 4"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout.readline() == "[worker:0] started\n"
    process.send_signal(signal.SIGHUP)
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
