"""A training that is killed, and continues on another number of processes, or of replicas."""

import io
import json
import os
import re
import subprocess

import pytest

from tests.helpers import fork_server
from tests.multiprocess import harness
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options
from tfdist.launch.sizes import Sizes

pytestmark = pytest.mark.timeout(600)

STEPS, EXAMPLES = 9, 500  # of an epoch


def run(folder, number, workers, devices, compression="none", kill_at=0, backups="backup", **limits):
    """Runs a leg of a training in one process (`workers` 0), or in a cluster; returns the first rank's results, or None, and its output."""
    strategy, out = ("multi_worker_mirrored" if workers else "mirrored"), folder / f"leg{number}"
    arguments = (strategy, str(out), str(devices), str(folder / backups), compression, str(kill_at))
    command = fork_server.command("tests.multiprocess.resize_program", *arguments)
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    if workers:
        shown = io.BytesIO()
        launcher = Launcher(
            Options(["timeout", "200", *command], local_cluster(workers), out / "logs", environ, **limits), output=shown
        )
        code, text = launcher.run(), shown.getvalue().decode()
    else:
        done = subprocess.run(
            command,
            env=environ,
            cwd=harness.ROOT,
            text=True,
            timeout=200,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        code, text = done.returncode, done.stdout
    ends = not kill_at or "sizes" in limits
    assert (code == 0) == ends, text
    return None if not ends else harness.load(out, 0), text


def trained(results):
    """Returns what does not depend on whether slots are split."""
    return {name: value for name, value in results.items() if name != "optimizer"}


@pytest.fixture(scope="module")
def undisturbed(once):
    """Returns a function: the compression -> the results of four replicas in one process."""

    def train(compression):
        folder = once.folder(f"resize {compression}", lambda folder: run(folder, 0, 0, 4, compression))
        return harness.load(folder / "leg0", 0)

    return train


LEGS = (("4 2 1 4", [(4, 1, 4), (2, 2, 13), (0, 4, 22), (4, 1, 0)]), ("1 2", [(0, 4, 12), (2, 2, 0)]))
REPLICAS = [(4, "replicas=4", 4), (2, "replicas=4", 13), (1, "replicas=4", 22), (2, "replicas=4", 0)]
FEWER = [(2, "replicas=4", 4), (1, "replicas=4", 0)]  # four workers: the job that loses one


@pytest.mark.parametrize(
    ("legs", "compression"),
    [
        pytest.param(LEGS[0][1], "powersgd", id="4 2 1 4 powersgd", marks=pytest.mark.full),
        pytest.param(FEWER, "none", id="replicas 2 1", marks=pytest.mark.full),
        pytest.param(REPLICAS, "none", id="replicas 4 2 1 2", marks=pytest.mark.full),
        pytest.param(REPLICAS, "powersgd", id="replicas 4 2 1 2 powersgd", marks=pytest.mark.full),
        pytest.param(LEGS[0][1], "none", id="4 2 1 4", marks=pytest.mark.full),
        pytest.param(LEGS[1][1], "none", id="1 2", marks=pytest.mark.full),
    ],
)
def test_a_training_killed_on_any_number_of_processes_ends_with_the_same_bits(tmp_path, undisturbed, legs, compression):
    for number, (workers, devices, kill_at) in enumerate(legs):
        results, text = run(tmp_path, number, workers, devices, compression, kill_at)
        assert ("resuming from step" in text) == (number > 0), text
        assert "bits differ" not in text
    assert results == undisturbed(compression)


@pytest.mark.full
@pytest.mark.parametrize(
    "kinds", [["sharded"] * 4, ["sharded", "none"] * 2, ["rounded"] * 4], ids=["always", "at times", "rounded"]
)
def test_a_training_with_split_slots_continues_on_any_number_of_processes(tmp_path, undisturbed, kinds):
    legs = [*REPLICAS[:2], (0, 4, 22), (4, "replicas=4", 0)]
    for number, (workers, devices, kill_at) in enumerate(legs):
        results, text = run(tmp_path, number, workers, devices, kinds[number], kill_at)
        assert ("resuming from step" in text) == (number > 0), text
    assert trained(results) == trained(undisturbed("rounded" if "rounded" in kinds else "none"))
    if kinds[-1] == "none":
        assert results["optimizer"] == undisturbed("none")["optimizer"]


@pytest.mark.parametrize("compression", ["none", pytest.param("powersgd", marks=pytest.mark.full)])
def test_another_number_of_replicas_continues_with_each_example_once(tmp_path, undisturbed, compression):
    run(tmp_path, 0, 0, 4, compression, kill_at=STEPS + 5)
    results, text = run(tmp_path, 1, 0, 3, compression)
    assert text.count("the backup was made with 4 replicas, and this run has 3") == 1, text
    history, expected = (json.loads(each["history"]) for each in (results, undisturbed(compression)))
    for name in ("numbers", "squares"):
        assert history[name] == expected[name]
    assert history["numbers"] == [EXAMPLES * (EXAMPLES - 1) / 2] * 4
    assert history["loss"][0] == expected["loss"][0]
    assert history["loss"] == pytest.approx(expected["loss"], rel=0.05)


@pytest.mark.full
def test_workers_that_train_alone_continue_with_another_number_of_workers(tmp_path):
    losses = []
    for legs in ([(2, 0)], [(2, STEPS + 5), (3, 0)], [(2, STEPS + 5), (1, 0)]):
        for number, (workers, kill_at) in enumerate(legs):
            folder = tmp_path / str(len(losses))
            results, _ = run(folder, number, workers, "1", "local", kill_at)
        history = json.loads(results["history"])
        assert history["numbers"] == [EXAMPLES * (EXAMPLES - 1) / 2] * 4, "each example once"
        losses.append(history["loss"])
    assert losses[1][-1] == pytest.approx(losses[0][-1], rel=0.3)
    assert losses[2][-1] == pytest.approx(losses[0][-1], rel=0.3)


@pytest.mark.parametrize("kind", ["none", pytest.param("sharded", marks=pytest.mark.full)])
def test_a_job_of_four_that_loses_a_worker_goes_on_with_two_and_grows_back(tmp_path, undisturbed, kind):
    results, text = run(tmp_path, 0, 4, "", kind, kill_at=13, sizes=Sizes(1, 4))
    assert re.search(
        r"worker:3 lost at step 1[23] \(killed by SIGKILL\); continuing with 2 of 4 workers from step", text
    ), text
    assert "starting again with 4 workers instead of 2" in text, text
    assert trained(results) == trained(undisturbed("none"))
    if kind == "none":
        assert results["optimizer"] == undisturbed("none")["optimizer"]
