"""Trainings that real schedulers start: Slurm and Open MPI of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from tests.helpers import gate, local_slurm, two_hosts
from tests.helpers.launched_job import until

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(400)

BIN = str(pathlib.Path(sys.executable).parent)
MULTI_WORKER = ["--config.strategy.name=multi_worker_mirrored", "--config.global_batch_size=66"]
SERVERS = ["--config.strategy.name=parameter_server", "--config.cluster.ps=1"]


def environ(more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_CONFIG", "SLURM_", "OMPI_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "PATH": f"{BIN}:{os.environ['PATH']}", **more}


def run(command, more, timeout=300):
    """Returns the exit code and what was said; what takes longer fails with that, and with where its tasks were."""
    more = {"PYTHONFAULTHANDLER": "1", **more}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environ(more), cwd=ROOT, text=True, start_new_session=True, **both) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException as e:
            if isinstance(e, subprocess.TimeoutExpired):
                e.add_note(_aborted(process, command[-4:]))
            with contextlib.suppress(ProcessLookupError):  # mpirun's tasks would stay
                os.killpg(process.pid, signal.SIGTERM)
            raise
    return process.returncode, output


def _aborted(process, last_words):
    """Returns what was said, and where the tasks were, which end with these words, and may be no children of the command."""
    for each in psutil.process_iter(["cmdline"]):
        words = each.info["cmdline"] or [""]
        if pathlib.Path(words[0]).name.startswith("python") and words[-4:] == last_words:
            each.send_signal(signal.SIGABRT)
    try:
        return process.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        return "It does not end either when its tasks are aborted."


@pytest.fixture(scope="module")
def scheduler():
    """The environment that Slurm's commands need."""
    if reason := local_slurm.missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, local_slurm.running(pathlib.Path(folder)) as more:
        yield more


def train(workdir, *options):
    return ["tfdist", "train", "--config=digits", f"--workdir={workdir}", *options]


def epochs(options):
    """Returns the flag with the epochs in which these options reach the accuracy."""
    return f"--config.epochs={5 if options is SERVERS else 3}"


def check_summary(workdir, strategy, cluster, accuracy=0.95):
    summary = json.loads((workdir / "summary.json").read_text())
    assert (summary["strategy"], summary["cluster"]) == (strategy, cluster)
    assert summary["metrics"]["val_accuracy"] >= accuracy


def test_srun_tells_each_task_its_place(scheduler):
    words = ["srun", "-n", "2", "--overcommit", "tfdist", "cluster", "show", "--format=json"]
    code, output = run(words, scheduler)
    assert code == 0, output
    places = [json.loads(line)["task"] for line in output.splitlines() if line.startswith("{")]
    assert sorted(place["index"] for place in places) == [0, 1], output


@pytest.mark.full  # mpirun trains in the first tier
@pytest.mark.parametrize(
    ("tasks", "options", "strategy", "cluster"),
    [
        (2, MULTI_WORKER, "multi_worker_mirrored", {"worker": 2}),
        (3, MULTI_WORKER, "multi_worker_mirrored", {"worker": 3}),
        (4, SERVERS, "parameter_server", {"chief": 1, "worker": 2, "ps": 1}),
    ],
)
def test_srun_trains(scheduler, tmp_path, tasks, options, strategy, cluster):
    command = ["srun", "-n", str(tasks), "--overcommit", *train(tmp_path, epochs(options), *options)]
    code, output = run(command, scheduler)
    assert code == 0, output
    check_summary(tmp_path, strategy, cluster)


@pytest.mark.parametrize(
    ("tasks", "options", "strategy", "cluster"),
    [
        (2, MULTI_WORKER, "multi_worker_mirrored", {"worker": 2}),
        pytest.param(3, MULTI_WORKER, "multi_worker_mirrored", {"worker": 3}, marks=pytest.mark.full),
        pytest.param(4, SERVERS, "parameter_server", {"chief": 1, "worker": 2, "ps": 1}, marks=pytest.mark.slow),
    ],
)
def test_mpirun_trains(tmp_path, tasks, options, strategy, cluster):
    code, output = run([*mpirun(tasks), *train(tmp_path, epochs(options), *options)], {})
    assert code == 0, output
    assert "\nval_accuracy: " in output and "\x1b" not in output, "its pseudo-terminal shows no table"
    check_summary(tmp_path, strategy, cluster)


@pytest.fixture(scope="module")
def two_nodes():
    """The words that run a command on the first node of a Slurm of two hosts, and the environment that it needs."""
    if reason := local_slurm.missing() or two_hosts.missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm") as name, two_hosts.two(folder := pathlib.Path(name)) as commands:
        nodes = [local_slurm.Node(*each) for each in zip(two_hosts.NAMES, two_hosts.ADDRESSES, commands, strict=True)]
        with local_slurm.running(folder, nodes) as more:
            yield commands[0], more


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "second", "expected"),
    [
        (["-n3"], [], ["node0", "node0", "node1"]),
        (["-n4", "--distribution=cyclic"], [], ["node0", "node1", "node0", "node1"]),
        (["-n5", "--distribution=plane=2"], [], ["node0", "node0", "node1", "node1", "node0"]),
        (["-n1", "-wnode1"], ["-n2", "-wnode0"], ["node1", "node0", "node0"]),  # a heterogeneous job
    ],
)
def test_tasks_on_two_nodes_know_where_all_are(two_nodes, options, second, expected):
    on, more = two_nodes
    say = ["sh", "-c", 'echo "$(hostname) $(tfdist cluster show --format=json)"']
    own = ["--overcommit", *([] if second else ["-N2"])]
    code, output = run([*on, "srun", *own, *options, *say, *([":", *own, *second, *say] if second else [])], more)
    assert code == 0, output
    said = [line.split(" ", 1) for line in output.splitlines() if line.startswith("node")]
    found = sorted(((json.loads(text), host) for host, text in said), key=lambda each: each[0]["task"]["index"])
    assert [host for _, host in found] == expected, "as Slurm has placed them"
    for number, (each, _) in enumerate(found):
        assert each["task"]["index"] == number
        assert [address.partition(":")[0] for address in each["cluster"]["worker"]] == expected


@pytest.mark.slow
def test_srun_trains_on_two_nodes(two_nodes, tmp_path):
    on, more = two_nodes
    code, output = run(
        [*on, "srun", "-N2", "-n3", "--overcommit", *train(tmp_path, "--config.epochs=5", *MULTI_WORKER)], more
    )
    assert code == 0, output
    check_summary(tmp_path, "multi_worker_mirrored", {"worker": 3})


def mpirun(tasks, *options):
    if not shutil.which("mpirun"):
        pytest.skip("Open MPI is not installed: make system-deps")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", *options, "-np", str(tasks)]


@pytest.mark.full
def test_mpirun_trains_on_two_hosts(tmp_path):
    """They tell each other their addresses in a folder."""
    if two_hosts.missing():
        pytest.skip(two_hosts.missing())
    with two_hosts.two(tmp_path) as on:
        where = two_hosts.mpirun_options(on, tmp_path)
        passed = ["-x", f"TFDIST_RENDEZVOUS={tmp_path / 'rendezvous'}", "-x", "PYTHONPATH", "-x", "PATH"]
        command = [*on[0], *mpirun(2, *where, *passed)]
        code, told = run([*command, "tfdist", "cluster", "show", "--format=json"], {})
        assert code == 0, told
        # A rank that waits long for the other says so.
        found = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
        assert len(found) == 2, told
        for each in found:
            assert [address.partition(":")[0] for address in each["cluster"]["worker"]] == list(two_hosts.NAMES)
        options = train(tmp_path / "run", "--config.epochs=1", "--config.strategy.name=multi_worker_mirrored")
        code, output = run([*command, *options], {})
    assert code == 0, output
    check_summary(tmp_path / "run", "multi_worker_mirrored", {"worker": 2}, accuracy=0.0)
    assert not list((tmp_path / "rendezvous").iterdir()), "each start has removed its files"


SLOWLY = """
import sys, time
from tfdist.backup import storage; from tfdist.commands import train
write = storage.Storage.write_manifest
storage.Storage.write_manifest = lambda *arguments: (time.sleep(8), write(*arguments))
sys.exit(train.main(sys.argv))
"""


@pytest.mark.slow
def test_a_task_that_is_told_to_go_has_all_save_before_mpirun_ends_them(tmp_path):
    """It does so as the first of them has ended, however slowly the chief saves."""
    workdir, log = tmp_path / "run", tmp_path / "log"
    options = train(workdir, "--config.epochs=200", "--config.backup.save_freq=1000", *MULTI_WORKER)[2:]
    with log.open("wb") as output:
        command = [*mpirun(2), "python", "-c", SLOWLY, *options]
        job = subprocess.Popen(command, env=environ({}), cwd=ROOT, stdout=output, stderr=output)
    try:
        until(lambda: "Epoch 3/200" in log.read_text(), 150)
        (second,) = [
            each for each in psutil.Process(job.pid).children() if each.environ()["OMPI_COMM_WORLD_RANK"] == "1"
        ]
        second.terminate()
        assert job.wait(120) == 75, log.read_text()
    finally:
        job.terminate()
        job.wait(30)
    assert "received SIGTERM: saved at step" in log.read_text()
    code, output = run([*mpirun(2), *train(workdir, "--config.epochs=7", *MULTI_WORKER)], {})
    assert code == 0 and "resuming from step" in output, output
    assert json.loads((workdir / "summary.json").read_text())["steps"] == 7 * 21


def emit(more, *arguments):
    code, output = run(["tfdist", "cluster", "emit", "--target=slurm", *arguments], more)
    assert code == 0, output
    return output


@pytest.mark.full
def test_the_script_runs_as_it_is_and_goes_on_after_sigterm(scheduler, tmp_path):
    """`scancel --signal=TERM` has the tasks save; the script has the job start again, which continues from there."""
    workdir = tmp_path / "run"
    options = ["--config=configs/digits_multi_worker.py", f"--workdir={workdir}", "--config.epochs=10"]
    script = tmp_path / "job.sh"
    told = tmp_path / "told"
    script.write_text(emit(scheduler, *options, "--config.backup.save_freq=1000", "--memory=400M", gate.flag(told, 6)))
    log = tmp_path / "log"
    code, output = run(["sbatch", "--parsable", f"--output={log}", str(script)], scheduler)
    assert code == 0, output
    job = output.strip()
    try:
        until(lambda: log.exists() and "Epoch 3/10" in log.read_text(), 120)
        assert run(["scancel", "--signal=TERM", job], scheduler)[0] == 0
        told.touch()
        until(lambda: "saved at step" in log.read_text(), 60)

        # Slurm lets a job that it takes back wait two minutes: a node refuses one that it has ended in the same second.
        until(lambda: "PENDING" in run(["squeue", "-h", "-o", "%T"], scheduler)[1], 60)
        time.sleep(3)
        assert run(["scontrol", "update", f"JobId={job}", "StartTime=now"], scheduler)[0] == 0
        until(lambda: "resuming from step" in log.read_text(), 120)
        until(lambda: (workdir / "summary.json").exists(), 120)
    except AssertionError as e:
        e.add_note(pathlib.Path(scheduler["SLURM_CONF"]).with_name("slurmctld.log").read_text()[-4000:])
        e.add_note(log.read_text()[-4000:])
        raise
    finally:
        run(["scancel", "--full", job], scheduler)
    summary = json.loads((workdir / "summary.json").read_text())
    assert (summary["steps"], summary["epochs"]) == (10 * 22, 10), "each step once"
