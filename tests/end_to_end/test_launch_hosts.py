"""`tfdist launch --hosts`, the same command on two hosts, which share nothing but the network."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from tests.helpers import tiers
from tests.helpers import two_hosts as two_hosts_lib

ROOT = pathlib.Path(__file__).parents[2]
HOSTS = f"--hosts={','.join(two_hosts_lib.NAMES)}"
pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import hashlib, os, pathlib, signal, sys
import keras, numpy as np, tfdist

strategy, *words = sys.argv[1:]
if "seeded" in words:
    keras.utils.set_random_seed(3)
backs_up = "backup" in words
trainer = tfdist.Trainer(
    strategy,
    devices=2 if strategy == "mirrored" else None,
    backup_dir="backup" if backs_up else None,
    start_timeout=20 if "impatient" in words else 200,
)
x = np.random.default_rng(0).uniform(-1, 1, (64, 2))
with trainer.scope():
    model = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")

class Die(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if str(trainer.task) in words and epoch == backs_up and not os.path.exists("died"):
            pathlib.Path("died").touch()
            if "launcher" in words:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

model.fit(x, x.sum(axis=1), batch_size=16, epochs=2, verbose=0, callbacks=[Die()])
weights = hashlib.sha256(b"".join(each.tobytes() for each in model.get_weights())).hexdigest()
print(f"{trainer.num_replicas} replicas end with {weights}", flush=True)
"""


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    if two_hosts_lib.missing():
        pytest.skip(two_hosts_lib.missing())
    with two_hosts_lib.two(tmp_path_factory.mktemp("names")) as commands:
        yield commands


@pytest.fixture(scope="module")
def undisturbed():
    """Returns how a seeded training of two replicas in one process ends."""
    command = [sys.executable, "-c", SCRIPT, "mirrored", "seeded"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200).stdout.strip()


@pytest.fixture
def start(two_hosts, tmp_path):
    """Starts `tfdist launch` on a host, in a folder of its own; returns the process, and the file of what it shows."""
    processes = []

    def run(number, *arguments):
        folder = tmp_path / str(number)
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        (folder / "script.py").write_text(SCRIPT)
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")}
        environ.pop("TF_CONFIG", None)
        output = folder / "out"
        command = [*two_hosts[number], sys.executable, "-m", "tfdist.launch", *arguments]
        with output.open("wb") as out:
            process = subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=subprocess.STDOUT)
        processes.append(process)
        return process, output

    yield run
    for process in processes:
        process.terminate()
        process.wait()


@pytest.fixture
def on_both(start):
    """Runs `tfdist launch` on both hosts; returns what each has shown.

    The flags `of_one[number]` are those of one host alone, and `codes` are the exit codes.
    """

    def run(*arguments, of_one=((), ()), codes=(0, 0)):
        started = [start(number, *of_one[number], *arguments) for number in range(2)]
        for (process, output), code in zip(started, codes, strict=True):
            assert process.wait(200) == code, output.read_text()
        return [output.read_text() for _, output in started]

    return run


def ends(output):
    """Returns the tasks that have finished in an output, and what they have reached."""
    found = re.findall(r"^\[(\w+:\d)\] (\d replicas? end with \w+)$", output, re.MULTILINE)
    return sorted(task for task, _ in found), {end for _, end in found}


@pytest.mark.parametrize(("more", "of_each"), tiers.cases([((), 1), (("--workers_per_host=2",), 2)], quick=1))
def test_the_same_command_on_both_hosts_trains_one_model(on_both, more, of_each):
    shown = on_both(HOSTS, *more, "--", sys.executable, "script.py", "multi_worker_mirrored")
    (first, one), (second, other) = map(ends, shown)
    workers = [f"worker:{number}" for number in range(2 * of_each)]
    assert (first, second) == (workers[:of_each], workers[of_each:]), shown
    assert one == other and len(one) == 1 and f"{2 * of_each} replicas" in one.pop()


@pytest.mark.full  # tests/commands/test_launch.py has which tasks are started
def test_a_hostfile_of_addresses_and_servers_are_a_cluster(on_both, tmp_path):
    (tmp_path / "hosts").write_text("\n".join(two_hosts_lib.ADDRESSES))
    options = [f"--hostfile={tmp_path / 'hosts'}", f"--ps_hosts={two_hosts_lib.ADDRESSES[1]}"]
    shown = on_both(*options, sys.executable, "script.py", "parameter_server")
    assert ends(shown[0])[0] == ["chief:0"] and "[ps:0] tfdist: ps:0 ends with exit code 0, like the chief" in shown[1]


@pytest.mark.full  # tests/launch has the restarts of one launcher
def test_each_launcher_restarts_its_own_tasks_until_all_have_met(on_both):
    shown = on_both(HOSTS, "--max_restarts=3", sys.executable, "script.py", "multi_worker_mirrored", "worker:1")
    assert "worker:1 lost at step 4 (killed by SIGKILL); restart 1/3 from step 0" in shown[1]
    assert "worker:1 at node1:2222 (connection refused) has ended while worker:0 trained with it" in shown[0]
    assert ends(shown[0])[1] == ends(shown[1])[1] != set()


@pytest.mark.full
def test_each_launcher_restarts_its_own_tasks_from_the_chiefs_backup_with_equal_bits(on_both, undisturbed):
    """The folder of the backups is relative, so that each host has its own."""
    command = [sys.executable, "script.py", "multi_worker_mirrored", "seeded", "backup", "worker:1"]
    shown = on_both(HOSTS, "--max_restarts=3", *command)
    assert "worker:1 lost at step 8 (killed by SIGKILL); restart 1/3 from the chief's last backup" in shown[1], shown
    assert "worker:1 at node1:2222 (connection refused) has ended while worker:0 trained with it" in shown[0], shown
    assert "resuming from step 4 (the end of epoch 1)" in shown[0], shown
    assert ends(shown[0])[1] == ends(shown[1])[1] == {undisturbed}


@pytest.mark.full  # test_start_order.py resumes without a launcher
def test_the_seed_of_a_restart_is_that_of_the_chiefs_backup(on_both):
    shown = on_both(
        HOSTS, "--max_restarts=3", sys.executable, "script.py", "multi_worker_mirrored", "worker:1", "backup"
    )
    assert "resuming from step 4 (the end of epoch 1)" in shown[0], shown
    assert "the random seed was not" not in "".join(shown), shown
    assert ends(shown[0])[1] == ends(shown[1])[1] != set()


@pytest.mark.full
def test_a_host_whose_launcher_was_killed_joins_again_when_it_is_started(start, undisturbed):
    words = ["multi_worker_mirrored", "seeded", "backup", "worker:1", "launcher"]
    command = [HOSTS, "--max_restarts=3", sys.executable, "script.py", *words]
    first, shown = start(0, *command)
    second, _ = start(1, *command)
    assert second.wait(200) == -signal.SIGKILL
    second, other = start(1, *command)
    assert (first.wait(200), second.wait(200)) == (0, 0), shown.read_text() + other.read_text()
    assert "restart 1/3 from step 4" in shown.read_text()
    assert ends(shown.read_text())[1] == ends(other.read_text())[1] == {undisturbed}


@pytest.mark.full  # tests/cluster has the limit of the start
def test_a_host_without_restarts_ends_and_the_other_ends_at_the_limit_of_the_start(on_both):
    command = [sys.executable, "script.py", "multi_worker_mirrored", "impatient", "worker:1"]
    of_one = (["--max_restarts=1"], ["--max_restarts=0"])
    shown = on_both(HOSTS, *command, of_one=of_one, codes=(1, 128 + signal.SIGKILL))
    assert "worker:1 was killed by SIGKILL; ending all tasks" in shown[1], shown
    assert "restart 1/1 from step 0" in shown[0], shown
    waited = "Waited 20 s for worker:1 at node1:2222 (connection refused). Is it started"
    assert f"worker:0 failed with exit code 1: ClusterError: {waited}" in shown[0], shown
    assert "all 1 restarts are spent; ending all tasks" in shown[0], shown
