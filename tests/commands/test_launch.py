"""`tfdist launch`: its command line, and a hangup under nohup."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.helpers import tiers
from tfdist.commands import launch, train, verify

ROOT = pathlib.Path(__file__).parents[2]
WORKERS = ("--config.strategy.name=multi_worker_mirrored", "--config.cluster.workers=2")


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
        (
            ["--hosts=a,b", "--nnodes=1:2", "true"],
            "--nnodes is removed: for an elastic job on several hosts, start a Ray cluster and give --ray",
        ),
    ],
)
def test_a_faulty_command_line_is_told_in_sentences(flags, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert launch.main(["launch", *flags]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (launch, ["--workers=2", "true"]),
        (verify, ["true"]),
        (train, ["--config=digits", *WORKERS, "--workdir=work"]),
    ],
)
def test_nothing_starts_on_a_host_with_fewer_gpus_than_workers(command, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert command.main(["", *arguments]) == 2
    assert "Start at most 1 there, as by --workers=1, or set CUDA_VISIBLE_DEVICES= (empty)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "tasks", "shown"),
    tiers.cases(
        [
            (["--workers=2", "echo", "--workers=3", "-n", "4"], ["worker:0", "worker:1"], "--workers=3 -n 4"),
            (["--hosts", "h1,h2", "--task=worker:0,worker:1", "echo", "x"], ["worker:0", "worker:1"], "x"),
            # Not with a server, which may be ended before it speaks, as the chief has ended.
            (["--hosts", "h1,h2", "--ps-hosts=h3", "--task=chief:0", "echo", "x"], ["chief:0"], "x"),
            (
                ["--workers", "2", "--", "echo", "--max-restarts=1", "--", "-x"],
                ["worker:0", "worker:1"],
                "--max-restarts=1 -- -x",
            ),
            (["-n", "2", "echo", "--", "x"], ["worker:0", "worker:1"], "-- x"),
            (["-n=2", "--max-restarts", "1", "echo", "--h"], ["worker:0", "worker:1"], "--h"),
            (["--hosts=127.0.0.1", "--workers_per_host", "2", "echo", "x"], ["worker:0", "worker:1"], "x"),
        ],
        quick=2,
    ),
)
def test_what_stands_behind_the_command_is_its_own(arguments, tasks, shown, tmp_path):
    command = [sys.executable, "-m", "tfdist.launch", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [
        line
        for line in done.stdout.splitlines()
        if not line.startswith(("tfdist: no task has created a tfdist.Trainer", "tfdist: starting "))
    ]
    assert sorted(lines) == sorted(f"[{task}] {shown}" for task in tasks)


def test_a_launcher_leaves_the_logs_of_tasks_of_other_hosts(tmp_path):
    """Hosts may share the folder, and start one after the other."""
    (tmp_path / "logs").mkdir()
    for task in ("worker-0", "worker-1"):
        (tmp_path / "logs" / f"{task}.log").write_text("earlier")
    command = [sys.executable, "-m", "tfdist.launch", "--hosts=h1,h2", "--task=worker:1", "echo", "now"]
    done = subprocess.run(command, check=True, timeout=60, cwd=tmp_path, capture_output=True, text=True)
    told = "tfdist: starting worker:1 here; the same command starts worker:0 on h1. The progress is printed by worker:0 on h1"
    assert done.stdout.splitlines()[0] == told
    logs = {str(path.relative_to(tmp_path / "logs")): path.read_text() for path in tmp_path.rglob("*.log")}
    assert logs == {"worker-0.log": "earlier", "worker-1.log": "now\n", "before/worker-1.log": "earlier"}


def test_a_hangup_is_ignored_under_nohup(tmp_path):
    command = [
        "nohup",
        sys.executable,
        "-m",
        "tfdist.launch",
        "--",
        "sh",
        "-c",
        "echo started; until [ -e go ]; do sleep 0.1; done",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout.readline() == "[worker:0] started\n"
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
