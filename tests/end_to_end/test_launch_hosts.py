"""`tfdist launch --hosts`, the same command on two hosts, which share nothing but the network."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.helpers import tiers
from tests.helpers import two_hosts as two_hosts_lib

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import hashlib, os, pathlib, signal, sys
import keras, numpy as np, tfdist

strategy, *dies = sys.argv[1:]
backs_up = "backup" in dies
trainer = tfdist.Trainer(strategy, backup_dir="backup" if backs_up else None)
x = np.random.default_rng(0).uniform(-1, 1, (64, 2))
with trainer.scope():
    model = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")

class Die(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if str(trainer.task) in dies and epoch == backs_up and not os.path.exists("died"):
            pathlib.Path("died").touch()
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


@pytest.fixture
def on_both(two_hosts, tmp_path):
    """Runs a command line of `tfdist launch` on both hosts, each in its own folder; returns what each has shown."""
    processes, outputs = [], []

    def run(*arguments):
        for number, before in enumerate(two_hosts):
            (folder := tmp_path / str(number)).mkdir()
            (folder / "script.py").write_text(SCRIPT)
            (folder / "tmp").mkdir()
            environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")}
            environ.pop("TF_CONFIG", None)
            outputs.append(folder / "out")
            with outputs[-1].open("wb") as out:
                command = [*before, sys.executable, "-m", "tfdist.launch", *arguments]
                processes.append(
                    subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=subprocess.STDOUT)
                )
        for process, output in zip(processes, outputs, strict=True):
            assert process.wait(200) == 0, output.read_text()
        return [output.read_text() for output in outputs]

    yield run
    for process in processes:
        if process.poll() is None:
            process.terminate()
        process.wait()


def ends(output):
    """Returns the tasks that have finished in an output, and what they have reached."""
    found = re.findall(r"^\[(\w+:\d)\] (\d replicas? end with \w+)$", output, re.MULTILINE)
    return sorted(task for task, _ in found), {end for _, end in found}


@pytest.mark.parametrize(("more", "of_each"), tiers.cases([((), 1), (("--workers_per_host=2",), 2)], quick=1))
def test_the_same_command_on_both_hosts_trains_one_model(on_both, more, of_each):
    hosts = ",".join(two_hosts_lib.NAMES)
    shown = on_both(f"--hosts={hosts}", *more, "--", sys.executable, "script.py", "multi_worker_mirrored")
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
    hosts = ",".join(two_hosts_lib.NAMES)
    options = [f"--hosts={hosts}", "--max_restarts=3"]
    shown = on_both(*options, sys.executable, "script.py", "multi_worker_mirrored", "worker:1")
    assert "worker:1 lost at step 4 (killed by SIGKILL); restart 1/3 from step 0" in shown[1]
    assert "worker:1 at node1:2222 (connection refused) has ended while worker:0 trained with it" in shown[0]
    assert ends(shown[0])[1] == ends(shown[1])[1] != set()


@pytest.mark.full  # test_start_order.py resumes without a launcher
def test_each_launcher_restarts_its_own_tasks_from_the_chiefs_backup(on_both):
    """The folder of the backups is relative, so that each host has its own; the seed is that of the chief's backup on both."""
    hosts = ",".join(two_hosts_lib.NAMES)
    options = [f"--hosts={hosts}", "--max_restarts=3"]
    shown = on_both(*options, sys.executable, "script.py", "multi_worker_mirrored", "worker:1", "backup")
    assert "restart 1/3 from the chief's last backup" in shown[1], shown
    assert "resuming from step 4 (the end of epoch 1)" in shown[0] and "the random seed was not" not in "".join(
        shown
    ), shown
    assert ends(shown[0])[1] == ends(shown[1])[1] != set()
