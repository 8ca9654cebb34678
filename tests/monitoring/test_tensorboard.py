"""TensorBoard's curves, as its server shows them: of a training that is killed, of two workers, on a full disk; and its profiles."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tfdist
from tests.backup.test_backup import Interrupt, Interrupted
from tests.helpers import fork_server, tiers
from tests.monitoring import tabs
from tests.multiprocess import harness
from tests.multiprocess.models import line, line_gradient_norms
from tfdist.cluster import local_cluster
from tfdist.errors import ConfigError
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options
from tfdist.monitoring import TensorBoard
from tfdist.runtime.report import progress

STEPS, EPOCHS = 5, 4
PERF = {"perf/examples_per_second", "perf/step_ms"}
SYSTEM = {"system/rss_bytes", "system/cpu_percent", "perf/input_wait_ms"}
ALL_STEPS = list(range(1, STEPS * EPOCHS + 1))


def curves(folder):
    """Returns all scalars below a folder: run to tag to `[(step, value), ...]`, in the order in which they were written."""
    found = {}
    for run in {path.parent for path in pathlib.Path(folder).rglob("*tfevents*")}:
        events = EventAccumulator(str(run), size_guidance={"tensors": 0}).Reload()
        found[run.name] = {
            tag: [(event.step, float(tf.make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]
            for tag in events.Tags()["tensors"]  # also texts, and the model's picture
            if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"
        }
    return found


@contextlib.contextmanager
def server(folder, *flags):
    """Yields a function that asks a TensorBoard server: `plugin/route`, or a route of scalars, and query to its answer."""
    command = [str(pathlib.Path(sys.executable).with_name("tensorboard")), "--host=127.0.0.1", "--port=0"]
    process = subprocess.Popen(
        ["timeout", "280", *command, "--reload_interval=1", f"--logdir={folder}", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        address = next(found[0] for row in process.stdout if (found := re.findall(r"http://[\d.:]+", row)))

        def ask(path, **query):
            plugin, _, route = path.rpartition("/")
            address_of = f"{address}/data/plugin/{plugin or 'scalars'}/{route}?{urllib.parse.urlencode(query)}"
            with urllib.request.urlopen(address_of) as got:
                return json.load(got)

        ask.address = address
        yield ask
    finally:
        process.terminate()
        process.communicate(timeout=20)


def shown(ask):
    """Returns what a server shows, as `curves` does."""
    tags = ask("tags")
    return {
        run: {tag: [(step, value) for _, step, value in ask("scalars", run=run, tag=tag)] for tag in sorted(tags[run])}
        for run in sorted(tags)
    }


def wait(ask, is_there, seconds=60):
    """Returns what a server shows once that is there, or when the time is over."""
    end = time.monotonic() + seconds
    while not is_there(found := shown(ask)) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def is_over(found):
    """Whether the server has read all: every curve has the training's last value."""
    return {"train", "validation", "hparams"} <= found.keys() and all(
        values and values[-1][0] == (EPOCHS - 1 if tag.startswith("epoch_") else ALL_STEPS[-1])
        for run in found.values()
        for tag, values in run.items()
    )


def has_read(folder):
    """Returns a function that tells whether a server has read all that is written below a folder."""

    def steps_of(found):
        return {(run, tag): [step for step, _ in values] for run, tags in found.items() for tag, values in tags.items()}

    expected = steps_of(curves(folder))
    return lambda found: steps_of(found) == expected


def life(strategy, out, number=0, **options):
    """Runs the program once, in one process, as a supervisor does the so many-th restart; returns its exit code and output."""
    (out / "progress").mkdir(exist_ok=True)
    progress.clear(out / "progress", number)
    command = fork_server.command("tests.multiprocess.tensorboard_program", strategy, str(out), json.dumps(options))
    environ = {**os.environ, progress.FOLDER: str(out / "progress")}
    done = subprocess.run(command, cwd=harness.ROOT, env=environ, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def keras_own(tmp_path_factory):
    """The curves of the same training by Keras alone, with its own callback."""
    folder = tmp_path_factory.mktemp("keras")
    model, x, y = line(keras)
    board = keras.callbacks.TensorBoard(folder, update_freq="batch")
    how = {"batch_size": 10, "shuffle": False, "epochs": EPOCHS, "validation_data": (x[:20], y[:20]), "verbose": 0}
    model.fit(x, y, **how, callbacks=[board])
    return curves(folder)


def check(found, keras_own, steps=ALL_STEPS):
    """Asserts that curves are Keras' own, and that each has every step once, in order."""
    train = dict(found["train"])
    meters = {tag for tag in train if "/" in tag} - PERF
    assert train.keys() - keras_own["train"].keys() - meters == {"batch_learning_rate"} | PERF
    assert meters >= SYSTEM
    expected = [(n, norm) for n, norm in enumerate(line_gradient_norms(len(ALL_STEPS)), 1) if n in steps]
    np.testing.assert_allclose(train["train/gradient_norm"], expected, rtol=1e-4)
    for tag in meters:
        known = [n for n in steps if n % STEPS != 1 and n != 8] if tag == "comm/bytes_per_step" else steps
        assert [step for step, _ in train.pop(tag)] == known, tag
    np.testing.assert_allclose(train.pop("batch_learning_rate"), [(n, 0.1 / (1 + n)) for n in steps], rtol=1e-6)
    for tag in PERF:
        measured = train.pop(tag)
        assert [step for step, _ in measured] == sorted({step for step, _ in measured})
        assert len(steps) - 3 <= len(measured) < len(steps), "all but the first of each life"
        assert all(value > 0 for _, value in measured)
    for run, tags in {"train": train, "validation": found["validation"]}.items():
        assert tags.keys() == keras_own[run].keys()
        for tag, values in tags.items():
            expected = [each for each in keras_own[run][tag] if not tag.startswith("batch_") or each[0] in steps]
            np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6, err_msg=f"{run}: {tag}")


@pytest.mark.full
def test_a_killed_trainings_curves_go_on_before_the_eyes_of_a_server(tmp_path, keras_own):
    with server(tmp_path / "curves") as ask:
        code, text = life("one_device", tmp_path, kills=[13])
        assert code == -signal.SIGKILL, text
        # The last backup is of step 7, and the server has seen what was written after it.
        tag = "evaluation_loss_vs_iterations"
        seen = wait(ask, lambda found: len(found.get("validation", {}).get(tag, [])) == 2)
        assert [step for step, _ in seen["validation"][tag]] == [5, 10]
        code, text = life("one_device", tmp_path, 1)
        assert code == 0 and "resuming from step 7" in text and "the model does not know" not in text, text
        found = wait(ask, is_over)
        wait(ask, lambda _: tabs.status(ask) == ["STATUS_SUCCESS"])  # which is written after the last value
        tabs.check(ask, keras_own, ALL_STEPS[-1])
    # TensorBoard would not show that something was written twice.
    files = (tmp_path / "curves").rglob("*tfevents*")
    events = [event for file in files for event in tf.compat.v1.train.summary_iterator(str(file))]
    written = [value.tag for event in events for value in event.summary.value]
    once = ["versions", "_hparams_/session_start_info", "_hparams_/session_end_info", "custom_scalars__config__"]
    assert [written.count(tag) for tag in once] == [1] * 4
    check(found, keras_own)
    check(curves(tmp_path), keras_own)
    # It was killed before it told that step 13 had ended.
    assert found["train"]["faults/lost_steps"] == [(step, 12.0 - 7 if step > 7 else 0.0) for step in ALL_STEPS]


@pytest.mark.full
@pytest.mark.parametrize("flags", [["--load_fast=false"], ["--load_fast=false", "--reload_multifile=true"], []])
def test_every_way_of_reading_shows_each_step_once(tmp_path, keras_own, flags):
    # Of the third one no backup is taken in time, of the fourth one that of step 14, which the second one has taken.
    for kill, ends in ((3, -signal.SIGKILL), (15, -signal.SIGKILL), (2, -signal.SIGKILL), (None, 0)):
        assert life("one_device", tmp_path, kills=[kill])[0] == ends
    with server(tmp_path / "curves", *flags) as ask:
        check(wait(ask, is_over), keras_own)


@pytest.mark.full
def test_steps_of_an_execution_count_each(tmp_path, keras_own):
    assert life("mirrored", tmp_path, kills=[3], steps_per_execution=5)[0] == -signal.SIGKILL
    assert life("mirrored", tmp_path, steps_per_execution=5)[0] == 0
    check(curves(tmp_path), keras_own, steps=[5, 10, 15, 20])


@pytest.mark.full
def test_of_two_workers_each_has_runs_of_its_own(tmp_path, keras_own):
    options = json.dumps({"kills": [13], "profile_steps": "3:4"})
    # Not forked: a profiler in a fork of a process with TensorFlow's threads has died of a double free.
    program = [sys.executable, "-m", "tests.multiprocess.tensorboard_program", "multi_worker_mirrored"]
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT)}
    command = ["timeout", "-k", "5", "200", *program, str(tmp_path), options]
    assert Launcher(Options(command, local_cluster(2), tmp_path / "logs", environ, max_restarts=1)).run() == 0
    found = curves(tmp_path)
    check(found, keras_own)
    assert found.keys() == {"train", "validation", "worker-1", "hparams"}
    own = PERF | SYSTEM | {"comm/bytes_per_step", "comm/gradient_bytes_per_step", "faults/restarts"}
    assert found["worker-1"].keys() == own and own | {"faults/lost_steps", "cluster/workers"} <= found["train"].keys()
    # Of gradients that travel through shared memory, no byte is counted in `comm/bytes_per_step`.
    assert all(
        value >= 4 * 3 for run in ("train", "worker-1") for _, value in found[run]["comm/gradient_bytes_per_step"]
    )
    restarts = [(step, float(step > 7)) for step in ALL_STEPS]
    assert found["train"]["faults/restarts"] == found["worker-1"]["faults/restarts"] == restarts
    # Killed as step 13 ended, which the chief may have told.
    assert {value for step, value in found["train"]["faults/lost_steps"] if step > 7} in ({5}, {6})
    for tag in found["worker-1"]:
        steps = [step for step, _ in found["worker-1"][tag]]
        assert steps == sorted(set(steps)) and steps[-1] == ALL_STEPS[-1]
    # In the first life; the second one continues from step 7.
    traces = sorted(str(path.relative_to(tmp_path / "curves")) for path in tmp_path.rglob("*.xplane.pb"))
    assert [trace.partition("/plugins/profile/")[0] for trace in traces] == ["train", "worker-1"]
    # A process's files have its id in their names.
    writers = [(path.parent.name, path.name.split(".")[-3]) for path in (tmp_path / "curves").rglob("*tfevents*")]
    of_process = {pid: {run for run, other in writers if other == pid} for _, pid in writers}
    assert sorted(map(sorted, of_process.values())) == [["hparams", "train", "validation"]] * 2 + [["worker-1"]] * 2


@pytest.mark.full
def test_the_curves_of_parameter_servers_go_on_after_a_kill(tmp_path, keras_own):
    command = fork_server.command(
        "tests.multiprocess.tensorboard_program", "parameter_server", str(tmp_path), json.dumps({"kills": [13]})
    )
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT)}
    command = ["timeout", "-k", "5", "200", *command]
    with server(tmp_path / "curves") as ask:
        assert Launcher(Options(command, local_cluster(1, 1), tmp_path / "logs", environ, max_restarts=1)).run() == 0
        found = wait(ask, has_read(tmp_path / "curves"))
    assert found.keys() == {"train", "validation", "hparams"}  # workers and servers write nothing
    for run, tags in found.items():
        for tag, values in tags.items():
            steps = [step for step, _ in values]
            assert steps == sorted(set(steps)), (run, tag)
            if tag.startswith(("epoch_", "evaluation_")):  # of one worker: as of one process
                np.testing.assert_allclose(values, keras_own[run][tag], rtol=1e-5, atol=1e-6, err_msg=tag)
    train = found["train"]
    # Logs by step lag, and staleness is that of steps which have ended.
    whole = {"batch_loss", "batch_learning_rate", "ps/steps_in_flight", "faults/restarts", "faults/lost_steps"} | SYSTEM
    whole |= {"cluster/workers"}
    assert {tag for tag, values in train.items() if [step for step, _ in values] == ALL_STEPS} == whole
    assert train.keys() == whole | PERF | {"ps/staleness", "epoch_loss", "epoch_learning_rate"}
    assert [value for _, value in train["faults/restarts"]] == [0.0] * 7 + [1.0] * 13
    in_flight = [value for _, value in train["ps/steps_in_flight"]]
    assert min(in_flight) >= 1 and max(in_flight) <= 13
    assert [value for _, value in train["ps/staleness"]] == [0.0] * len(train["ps/staleness"])


def fit(folder, epochs=2, first=0, callback=None, **options):
    model, x, y = line(keras)
    callback = callback or TensorBoard(folder, 2, **options)
    data = {"validation_data": (x, y), "batch_size": 10}
    model.fit(x, y, epochs=epochs, initial_epoch=first, verbose=0, callbacks=[callback], **data)
    return callback


def steps(folder):
    """Returns the steps of the curves that stand for the others."""
    train = curves(folder)["train"]
    return [[step for step, _ in train[tag]] for tag in ("epoch_loss", "batch_loss")]


def test_a_new_training_sets_the_curves_of_the_one_before_aside(tmp_path):
    fit(tmp_path)
    fit(tmp_path, epochs=1)
    assert steps(tmp_path) == [[0], [2, 4]]
    assert len(list(tmp_path.rglob("*before*"))) == 2


def test_a_training_that_begins_later_goes_on(tmp_path):
    callback = fit(tmp_path)
    fit(tmp_path, 3, 2, callback)
    assert steps(tmp_path) == [[0, 1, 2], [2, 4, 6, 8, 10, 12, 14]]


def test_examples_per_second_are_written_where_the_batch_size_is_known(tmp_path):
    fit(tmp_path / "unknown")
    fit(tmp_path / "known", global_batch_size=10)
    assert "perf/examples_per_second" not in curves(tmp_path / "unknown")["train"]
    train = curves(tmp_path / "known")["train"]
    for (step, speed), (other, duration) in zip(train["perf/examples_per_second"], train["perf/step_ms"], strict=True):
        assert step == other
        # Of one step after the first: its duration, rounded. Later on, the mean and the median of two.
        assert step > 2 or speed == pytest.approx(10 / duration * 1000, rel=0.01)


def test_nothing_by_step_is_written_if_so_asked(tmp_path):
    fit(tmp_path, callback=TensorBoard(tmp_path, "epoch"))
    train = curves(tmp_path)["train"]
    assert train.keys() == {"epoch_loss", "epoch_learning_rate", "perf/step_ms", "cluster/workers"} | SYSTEM - {
        "perf/input_wait_ms"
    }
    assert [step for step, _ in train["perf/step_ms"]] == [5, 10]
    (page,) = EventAccumulator(str(tmp_path / "train")).Reload().Tensors("custom_scalars__config__")
    assert b"^epoch_" in page.tensor_proto.string_val[0] and b"batch_" not in page.tensor_proto.string_val[0]


@contextlib.contextmanager
def full_disk(free):
    """Lets no file grow beyond a size, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("case", ["no folder", "full disk"])
def test_a_folder_that_cannot_be_written_to_costs_one_warning(tmp_path, case, capsys):
    (tmp_path / "file").write_text("")
    folder = tmp_path / ("file" if case == "no folder" else "curves")
    callback = TensorBoard(folder, 1)
    with contextlib.nullcontext() if case == "no folder" else full_disk(500):
        fit(folder, epochs=4, callback=callback)
        assert callback.state_dict()["throughput"]["steps"] == 20
    rows = [row for row in capsys.readouterr().out.splitlines() if "TensorBoard" in row]
    assert len(rows) == 1 and str(folder) in rows[0] and "while the training continues" in rows[0]
    assert ("is not a directory" if case == "no folder" else "File too large") in rows[0]


@pytest.mark.parametrize("first", tiers.cases([1, 0], quick=1))
def test_the_second_of_two_trainings_in_one_program_goes_on(tmp_path, mirrored, first):
    def train(interrupt):
        keras.backend.clear_session()  # names as in a new process
        trainer = tfdist.Trainer(mirrored, backup=tfdist.BackupAndRestore(tmp_path / "backup", save_freq=4))
        with trainer.scope():
            model, x, y = line(keras)
        callback = TensorBoard(tmp_path / "curves", 1)
        how = {"batch_size": 10, "verbose": 0}
        trainer.fit(model, x, y, epochs=1, callbacks=[callback], **how)
        trainer.fit(model, x, y, epochs=3, initial_epoch=first, callbacks=[callback, Interrupt(interrupt)], **how)

    for step in (3, 8):  # before the second training's first backup, and after it
        with pytest.raises(Interrupted):
            train(step)
    train(None)
    assert steps(tmp_path / "curves") == [[0, 1, 2], ALL_STEPS[:15]]


STEP_OPERATION = "/mse/Square:Square"  # each step computes one loss


def profile(folder, steps, epochs=2, execution=1):
    """Trains for 5 steps an epoch."""
    model, x, y = line(keras)
    model.steps_per_execution = execution
    model.fit(x, y, batch_size=10, epochs=epochs, verbose=0, callbacks=[TensorBoard(folder, profile_steps=steps)])


def traced_steps(folder):
    """Returns how many steps each trace below a folder holds."""
    found = []
    for file in folder.rglob("*.xplane.pb"):
        planes = xplane_pb2.XSpace.FromString(file.read_bytes()).planes
        names = [
            plane.event_metadata[e.metadata_id].name for plane in planes for row in plane.lines for e in row.events
        ]
        found.append(sum(name.endswith(STEP_OPERATION) for name in names))
    return found


@pytest.mark.parametrize(
    ("steps", "execution", "expected"),
    tiers.cases(
        [("4:7", 1, [4]), ("9:99", 1, [2]), ("11:12", 1, []), ("3", 1, [1]), ("7:7", 5, [5]), ("5:6", 5, [10])], quick=3
    ),
)
def test_a_trace_holds_the_steps_of_the_range(tmp_path, steps, execution, expected):
    profile(tmp_path, steps, execution=execution)
    assert traced_steps(tmp_path / "train" / "plugins" / "profile") == expected


def test_a_profiler_that_runs_already_costs_one_warning_and_the_profile(tmp_path, capsys):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        profile(tmp_path / "curves", "2:4")
    finally:
        tf.profiler.experimental.stop()
    rows = [row for row in capsys.readouterr().out.splitlines() if "TensorBoard" in row]
    assert len(rows) == 1 and "there is no profile of steps 2 to 4" in rows[0]
    assert traced_steps(tmp_path / "curves") == [] and traced_steps(tmp_path / "other") == [10]
    assert list((tmp_path / "curves" / "train").iterdir()), "the curves are there"


def test_a_profile_that_cannot_be_written_does_not_end_the_training(tmp_path, capsys):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "plugins").write_text("")
    profile(tmp_path, "2:4")
    rows = [row for row in capsys.readouterr().out.splitlines() if "TensorBoard" in row]
    assert len(rows) == 1 and "while the training continues" in rows[0]
    profile(tmp_path / "next", "2:4")
    assert traced_steps(tmp_path / "next") == [3], "the profiler is free"


@pytest.mark.parametrize("wrong", ["0:3", "5:4", "3:", ":3", "1-3", (1, 3), "٣", "9" * 5000])
def test_a_wrong_range_is_refused(wrong):
    with pytest.raises(ConfigError, match="profile_steps of TensorBoard must be the first and the last step"):
        TensorBoard("x", profile_steps=wrong)
