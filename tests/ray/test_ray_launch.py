"""Jobs on a real Ray cluster of three nodes on this machine: places, output, exit codes, lost nodes, actors, tasks and drivers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

import tfdist
from tests.helpers.launched_job import PROGRESS, Job, until
from tests.multiprocess import harness

ray = pytest.importorskip("ray")


# Ray lives in processes of its own: its threads outlast `ray.shutdown` and the cluster, and may end the process minutes later.
NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "remove\\n":
        cluster.remove_node(nodes.pop())
    else:
        nodes.append(cluster.add_node(num_cpus=1))
    print("done", flush=True)
cluster.shutdown()
"""


class RayCluster:
    """A cluster of three nodes, in a child process.

    Attributes:
        address: The address of its first node.
    """

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self.address = self._answer()

    def remove_node(self) -> None:
        self._ask("remove")

    def add_node(self) -> None:
        self._ask("add")

    def _ask(self, what: str) -> None:
        print(what, file=self._process.stdin, flush=True)
        assert self._answer() == "done"

    def _answer(self) -> str:
        line = self._process.stdout.readline()
        assert line, f"the cluster's process ended with exit code {self._process.wait(60)}"
        return line.rstrip("\n")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # Also for the nodes, whose tasks inherit them.
    environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(harness.ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", NODES], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield RayCluster(process)
            process.communicate(timeout=60)
        finally:
            process.kill()


CALL_CHILD = """
import sys
from ray import cloudpickle
with open(sys.argv[1], "rb") as file:
    function = cloudpickle.load(file)
try:
    result = function(), None
except BaseException as error:
    result = None, error
with open(sys.argv[1], "wb") as file:
    cloudpickle.dump(result, file)
"""


def in_child(folder: pathlib.Path, function: Callable[[], Any]) -> Any:
    """Returns the value of a function that runs in a child process, or raises its exception."""
    (folder / "call").write_bytes(ray.cloudpickle.dumps(function))
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT)}
    subprocess.run([sys.executable, "-c", CALL_CHILD, "call"], cwd=folder, env=environ, check=True, timeout=250)
    value, error = ray.cloudpickle.loads((folder / "call").read_bytes())
    if error is not None:
        raise error
    return value


class RayJob(Job):
    """A job on the cluster."""

    def __init__(self, folder: pathlib.Path, address: str):
        super().__init__(folder)
        self.flag = f"--ray={address}"

    def tasks(self) -> list[psutil.Process]:
        """Returns the tasks' processes."""
        return [psutil.Process(pid) for pid in self.alive() if "TFDIST_TASK" in psutil.Process(pid).environ()]


@pytest.fixture
def job(tmp_path: pathlib.Path, cluster: RayCluster) -> Iterator[RayJob]:
    job = RayJob(tmp_path, cluster.address)
    yield job
    for pid in job.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if job.process:
        job.process.wait(timeout=30)


def test_each_worker_has_a_place_a_log_and_the_folder_of_the_command(job):
    script = """
workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
say(f"{TASK['index']} of {len(set(workers))}")
say(os.getcwd())
"""
    assert job.run(script, job.flag, "--workers=3") == 0, job.output()
    for index in range(3):
        assert f"[worker:{index}] {index} of 3" in job.output()
        assert job.log(f"worker-{index}").splitlines()[-1] == str(job.folder)


def test_an_exception_ends_all_tasks_with_its_traceback(job):
    script = """
if TASK["index"] == 1:
    raise ValueError("no such luck")
sleep_for_ever()
"""
    assert job.run(script, job.flag, "--workers=2", "--grace_seconds=1") == 1
    assert "[worker:1] Traceback (most recent call last):" in job.output()
    assert (
        "tfdist: worker:1 failed with exit code 1, last line: ValueError: no such luck; ending all tasks"
        in job.output()
    )
    assert not job.alive()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_signal_ends_the_job(job, number):
    process = job.start("sleep_for_ever()", job.flag, "--workers=2", "--grace_seconds=1")
    until(lambda: job.output().count("ready") == 2)
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert not job.alive()


def test_nothing_is_left_on_the_nodes_after_a_driver_is_killed(job):
    # The task's own child is in its group.
    process = job.start(
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(999)', sys.argv[1]])\nsleep_for_ever()",
        job.flag,
        "--workers=2",
    )
    until(lambda: job.output().count("ready") == 2)
    folders = {task.environ()["TFDIST_PROGRESS"] for task in job.tasks()}
    assert len(folders) == 2
    process.kill()
    until(lambda: not job.alive() and not any(map(os.path.exists, folders)), seconds=10)


# Worker 1 loses its task, or its actor, in its first start.
LOST = (
    PROGRESS
    + """
progress.write(done=7, saved=5)
if progress.restarts() == 0:
    say("at step 7")
    if TASK["index"] == 1:
        await_file("go")
        os.kill(PID, signal.SIGKILL)
    sleep_for_ever()
say(f"restarts: {progress.restarts()}")
"""
)


@pytest.mark.parametrize("lost", ["os.getpid()", "os.getppid()"], ids=["task", "actor"])
def test_the_job_restarts_after_the_loss_of_a_task_or_of_an_actor(job, lost):
    process = job.start(LOST.replace("PID", lost), job.flag, "--workers=2", "--max_restarts=1", "--warm=0")
    until(lambda: job.output().count("at step 7") == 2)  # the launcher has the records, which arrive with the lines
    (job.folder / "go").write_text("now")
    assert process.wait(timeout=150) == 0, job.output()
    assert "worker:1 lost at step 7 (killed by SIGKILL); restart 1/1 from step 5" in job.output()
    assert ("Ray has lost the actor of this task" in job.output()) == (lost == "os.getppid()")
    assert "[worker:1] restarts: 1" in job.output()


def test_a_resource_that_no_node_has_is_one_sentence_with_the_offer(job):
    assert job.run("", job.flag, "--workers=2", "--gpus_per_worker=1", "--join_seconds=1") == 1
    (line,) = job.output().splitlines()
    assert "0 of 2 workers have a place on the Ray cluster, with 1 CPU, 1 GPU each; its 3 nodes offer 4 CPU" in line


def test_a_cluster_that_does_not_exist_is_one_sentence(job):
    assert job.run("", "--ray=127.0.0.1:1", "--workers=2") == 1
    assert "no Ray cluster was found at 127.0.0.1:1" in job.output()
    assert "ray start --head" in job.output()


@pytest.mark.full
def test_a_training_of_two_workers_prints_its_summary(job, cluster):
    flags = [
        "--config=digits_multi_worker",
        "--workdir=run",
        f"--config.cluster.ray={cluster.address}",
        "--config.epochs=1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tfdist", "train", *flags], cwd=job.folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((job.folder / "run/summary.json").read_text())["cluster"] == {"worker": 2}
    assert "val_accuracy" in done.stdout


# Trains until it has all its workers after a loss; saves when told to end.
GROWS = (
    PROGRESS
    + """
workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
say(f"{workers} workers")
step = 0
while not (workers == 4 and pathlib.Path("back").exists()):
    time.sleep(0.1)
    step += 1
    progress.write(done=step, saved=step)
"""
)


def test_a_job_continues_without_a_lost_node_and_grows_when_it_is_back(job, cluster):
    process = job.start(GROWS, job.flag, "--workers=2:4", "--warm=0")
    until(lambda: job.output().count("] 4 workers") == 4)
    cluster.remove_node()
    lost = time.monotonic()
    until(lambda: job.output().count("] 2 workers") == 2)
    print(f"steps again {time.monotonic() - lost:.1f} s after the loss of a node")
    (job.folder / "back").touch()
    cluster.add_node()
    assert process.wait(timeout=120) == 0, job.output()
    assert "continuing with 2 of 4 workers from step" in job.output()
    assert "starting again with 4 workers instead of 2" in job.output()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_training_that_loses_a_node_ends_with_the_same_bits(job, cluster, monkeypatch):
    program = ["-m", "tests.multiprocess.resize_program"]

    def arguments(strategy, devices):
        return [
            *program,
            strategy,
            str(job.folder / strategy),
            devices,
            str(job.folder / f"backup-{strategy}"),
            "none",
            "0",
        ]

    monkeypatch.setenv("TFDIST_TEST_WAITS", "4 1")
    command = [sys.executable, *arguments("multi_worker_mirrored", "")]
    process = job.start(command, job.flag, "--workers=2:4")
    backup = job.folder / "backup-multi_worker_mirrored"
    until(lambda: [*backup.glob("*/manifest*")] or process.poll() is not None)
    cluster.remove_node()
    lost = time.monotonic()
    until(lambda: "continuing with 2 of 4 workers from step" in job.output() or process.poll() is not None)
    until(lambda: job.output().count("gradients travel") == 2 or process.poll() is not None)
    print(f"a start {time.monotonic() - lost:.1f} s after the loss of a node")
    cluster.add_node()
    assert process.wait(timeout=240) == 0, job.output()
    assert "starting again with 4 workers instead of 2" in job.output()
    subprocess.run([sys.executable, *arguments("mirrored", "4")], cwd=harness.ROOT, check=True, timeout=200)
    results = harness.load(job.folder / "multi_worker_mirrored", 0)
    assert results == harness.load(job.folder / "mirrored", 0)  # its history has the sum of the examples' numbers


@pytest.fixture
def run(job, cluster):
    """Returns `tfdist.ray.run` on the cluster, in a child process and in the job's folder."""

    def call(*arguments, **options):
        return in_child(job.folder, functools.partial(tfdist.ray.run, *arguments, address=cluster.address, **options))

    return call


@pytest.mark.parametrize("workers", [2, pytest.param((1, 2), marks=pytest.mark.full)])
def test_the_value_of_a_function_on_worker_0_is_returned(run, workers, capfd):
    factor = 3

    def train():
        task = os.environ["TFDIST_TASK"]
        print("here is", task)
        # A class of the caller's program is pickled, too.
        return [task] * factor, type("Result", (), {"loss": 0.5})()

    names, result = run(train, workers, warm=False)
    assert names == ["worker-0"] * 3 and result.loss == 0.5
    output = capfd.readouterr().out
    assert "[worker:0] here is worker-0" in output and "[worker:1] here is worker-1" in output


def test_a_function_reads_references_of_its_caller_and_uses_ray_itself(job, cluster):
    address = cluster.address

    def call():
        ray.init(address, log_to_driver=False)
        rows, nodes = ray.put(list(range(5))), len(ray.nodes())

        def read():
            return sum(ray.get(rows))

        def store():
            return ray.get(ray.put(3)), len(ray.nodes())

        return nodes, [tfdist.ray.run(function, 2, warm=warm) for function in (read, store) for warm in (True, False)]

    nodes, values = in_child(job.folder, call)
    assert values == [10, 10, (3, nodes), (3, nodes)]


def test_an_exception_of_a_function_is_raised_with_its_traceback(job, cluster):
    address = cluster.address

    def train():
        if os.environ["TFDIST_TASK"] == "worker-1":
            raise ValueError("no such luck")
        signal.pause()

    def call():
        # From another thread than the main one, where Python has no handlers of signals.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            return pool.submit(tfdist.ray.run, train, 2, address=address, warm=False).exception()

    error = in_child(job.folder, call)
    assert isinstance(error, tfdist.ClusterError)
    assert str(error).startswith("worker:1 failed with exit code 1: ValueError: no such luck. Read its output in logs/")
    (note,) = error.__notes__
    assert note.startswith("Traceback (most recent call last):") and "in train" in note
    assert note.endswith("ValueError: no such luck\n")


CALL = """
import os, signal, sys
import tfdist
def train():
    print(f"ready {os.getpid()}", flush=True)
    signal.pause()
try:
    tfdist.ray.run(train, 2, address=sys.argv[1], warm=False)
except KeyboardInterrupt:
    print("interrupted; TensorFlow is", "tensorflow" in sys.modules)
"""


def test_ctrl_c_ends_the_workers_of_a_function_and_is_raised(job, cluster):
    output = job.folder / "out"
    with output.open("wb") as out:
        command = [sys.executable, "-c", CALL, cluster.address]
        job.process = subprocess.Popen(command, cwd=job.folder, stdout=out)
    try:
        until(lambda: job.output().count("ready") == 2)
        workers = [int(line.split()[-1]) for line in job.output().splitlines() if "ready" in line]
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(timeout=60) == 0, job.output()
    finally:
        job.process.kill()
    assert "interrupted; TensorFlow is False" in job.output()
    assert not any(map(psutil.pid_exists, workers))


@pytest.mark.full
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_function_that_is_called_again_continues_from_its_backup(run, job, capfd, is_shared):
    def train(is_lost):
        import keras
        import numpy as np

        keras.utils.set_random_seed(1)
        # Folders of the tasks' own, as on disks that the nodes do not share.
        own = "" if is_shared else os.environ["TFDIST_TASK"]
        trainer = tfdist.Trainer("multi_worker_mirrored", backup_dir=f"backup-{is_lost}{own}")
        with trainer.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile("adam", "mse")

        def lose(epoch, logs):
            if is_lost and epoch == 1 and not pathlib.Path("lost").exists() and not trainer.is_chief:
                pathlib.Path("lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)

        x = np.arange(64.0).reshape(32, 2)
        model.fit(x, x[:, :1], batch_size=8, epochs=3, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lose)])
        return model.get_weights()

    lost = run(functools.partial(train, True), 2, max_restarts=1)
    output = capfd.readouterr().out
    assert "resuming from step 4" in output
    assert ("the tasks do not share backup_dir" in output) == (not is_shared)
    for weights, others in zip(lost, run(functools.partial(train, False), 2), strict=True):
        assert (weights == others).all()


@pytest.mark.full
def test_a_ray_task_may_run_a_training(job, cluster):
    address = cluster.address

    def call():
        from examples import ray_tune

        # A trial of Ray Tune is such a task; tests/end_to_end/test_examples.py runs the example with Tune.
        @ray.remote(num_cpus=0.1)
        def trial(rate):
            return tfdist.ray.run(functools.partial(ray_tune.train, rate), workers=2, cpus_per_worker=0.4)

        ray.init(address)
        return ray.get([trial.remote(rate) for rate in (0.001, 0.3)], timeout=240)

    losses = in_child(job.folder, call)
    assert losses[1] < 0.1 < losses[0]
