"""`tfdist train`: the main job, each strategy's configuration, and tasks that fail."""

import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from tests.helpers import fork_server, gate, launched_job, tiers
from tests.helpers.terminal import Terminal
from tfdist import config
from tfdist.commands import train
from tfdist.config import registry
from tools import chaos
from tools.site import demo

ROOT = pathlib.Path(__file__).parents[2]


def start(*arguments, forked=False, **environ):
    """Starts the command; with `forked`, where one process trains, from the fork server, without the imports."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    if "TF_CONFIG" not in environ or not environ["TF_CONFIG"]:
        environ.pop("TF_CONFIG", None)
    command = [str(pathlib.Path(sys.executable).with_name("tfdist")), "train", *arguments]
    return subprocess.Popen(
        fork_server.command("tfdist.train", *arguments) if forked else command,
        cwd=ROOT,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process, timeout=200):
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        process.kill()


def left_over(marker):
    """The processes whose command line holds `marker`."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker in path.read_bytes().decode(errors="replace"):
                found.append(path.parent.name)
        except OSError:
            pass
    return found


@pytest.fixture(scope="module")
def main_job(tmp_path_factory):
    """The demo's job: output, work directory."""
    workdir = tmp_path_factory.mktemp("main")
    process = start("--config=digits_multi_worker", f"--workdir={workdir}")
    output = finish(process)
    assert process.returncode == 0, output
    return output, workdir


def test_main_job_reaches_its_accuracy_and_says_so(main_job):
    output, workdir = main_job
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["metrics"]["val_accuracy"] >= 0.97
    assert summary["strategy"] == "multi_worker_mirrored"
    assert (summary["num_replicas"], summary["cluster"], summary["restarts"]) == (2, {"worker": 2}, 0)
    assert (summary["epochs"], summary["steps"]) == (10, 220)
    assert summary["sizes"] == [{"step": 0, "workers": 2}]
    assert summary["examples_per_second"] > 0 and 0 < summary["step_ms"]["median"] <= summary["step_ms"]["p95"]
    planned, goodput = summary["wire_bytes_per_step"]["predicted"], summary["goodput"]
    assert planned > 0.9 * 4 * 20000
    assert (summary["transport"], summary["transport_reason"]) == ("shared_memory", "all workers share a host")
    assert summary["wire_bytes_per_step"]["measured"] > 0
    shown = output.splitlines()
    sent = f"{summary['wire_bytes_per_step']['measured']:,}"
    assert shown[shown.index("task: digits") :] == [
        "task: digits",
        "strategy: multi_worker_mirrored",
        "replicas: 2",
        "global batch: 64",
        *(f"{name}: {value:.6g}" for name, value in summary["metrics"].items()),
        f"speed: {summary['step_ms']['mean']:.1f} ms a step, {summary['examples_per_second']:,.0f} examples/s, validation not counted",
        f"network bytes per step: {sent} (gradients travel through shared memory: {planned:,} bytes)"
        if summary["transport"] == "shared_memory"
        else f"network bytes per step: {sent} (prediction for the gradients alone: {planned:,} bytes)",
        "restarts: 0",
        f"wall time: {goodput['wall_seconds']} s: "
        + ", ".join(f"{part.replace('_', ' ')} {seconds} s" for part, seconds in goodput["seconds"].items() if seconds),
        f"workdir: {workdir}",
        f"tensorboard --logdir {workdir}/tensorboard",
        "then open http://localhost:6006/#custom_scalars",
    ]
    assert sum(goodput["seconds"].values()) == pytest.approx(goodput["wall_seconds"], abs=0.05)
    # One speed: the batch divided by the time of a step.
    assert 64_000 / summary["step_ms"]["mean"] == pytest.approx(summary["examples_per_second"], rel=1e-3)
    assert any("replicas, global batch 64 = 2 x 32" in line for line in shown)


def test_the_readme_shows_what_the_main_job_prints(main_job):
    output, workdir = main_job
    printed = demo.shorten(output).replace(str(workdir), demo.WORKDIR)
    assert demo.without_numbers(demo.shown()) == demo.without_numbers(printed), "python -m tools.site.demo writes it"


def test_main_job_shows_progress_on_the_chief_alone(main_job):
    output, _ = main_job
    for epoch in range(1, 11):
        assert f"[worker:0] Epoch {epoch}/10" in output
    assert "[worker:1] Epoch" not in output


def test_other_workers_say_little_and_nothing_holds_an_escape_code(main_job):
    output, _ = main_job
    assert output.count("[worker:1]") <= 20
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", output)
    assert "cuInit" not in output and "InitializeLog" not in output


@pytest.mark.full
def test_in_a_terminal_a_table_tells_steps_below_the_lines(tmp_path):
    shown = tmp_path / "shown"
    arguments = ["--config=digits_multi_worker", "--config.epochs=3", f"--workdir={tmp_path}", gate.flag(shown, 3)]
    environ = {"PYTHONPATH": str(ROOT)}
    terminal = Terminal([sys.executable, "-m", "tfdist.train", *arguments], tmp_path, environ)
    try:
        row = re.compile(r"worker:1 +(training|finishing) +[1-3]/3 +\d+/66")
        terminal.until(lambda: row.search(terminal.text()))
        shown.touch()
        assert terminal.wait() == 0
    finally:
        terminal.close()
    assert terminal.screen.cursor_is_shown
    assert "[worker:0] Epoch 3/3" in terminal.text() and not row.search(terminal.text())
    assert terminal.text().count("[worker:1]") <= 20


def test_main_job_leaves_one_set_of_files(main_job):
    _, workdir = main_job
    files = {str(path.relative_to(workdir)) for path in workdir.rglob("*") if path.is_file()}
    events = {file for file in files if file.startswith("tensorboard/")}
    assert files - events == {
        "config.json",
        "summary.json",
        "model.keras",
        "logs/worker-0.log",
        "logs/worker-1.log",
    }
    # One writer in each run.
    assert sorted(map(os.path.dirname, events)) == [
        f"tensorboard/{run}" for run in ("hparams", "train", "validation", "worker-1")
    ]
    assert json.loads((workdir / "config.json").read_text())["cluster"]["workers"] == 2


def test_main_job_writes_scalars_by_epoch_and_by_step(main_job):
    _, workdir = main_job
    summary = json.loads((workdir / "summary.json").read_text())
    tags = {}
    for run in ("train", "validation", "worker-1", "hparams"):
        events = EventAccumulator(str(workdir / "tensorboard" / run), size_guidance={"tensors": 0}).Reload()
        plugins = {tag: events.SummaryMetadata(tag).plugin_data.plugin_name for tag in events.Tags()["tensors"]}
        tags[run] = {tag: events.Tensors(tag) for tag, plugin in plugins.items() if plugin == "scalars"}
        if run == "train":
            (cluster,) = events.Tensors("cluster")
            assert b"| worker:1 | 127.0.0.1:" in cluster.tensor_proto.string_val[0]
    perf = {
        "perf/examples_per_second",
        "perf/step_ms",
        "comm/bytes_per_step",
        "comm/gradient_bytes_per_step",
        "faults/restarts",
    }
    perf |= {"system/rss_bytes", "system/cpu_percent", "perf/input_wait_ms", "perf/own_step_ms"}
    names = ("loss", "accuracy", "learning_rate")
    own = perf | {"faults/lost_steps", "goodput/productive", "cluster/workers"}
    own |= {f"goodput_seconds/{part}" for part in summary["goodput"]["seconds"]}
    assert tags["train"].keys() == {f"{by}_{name}" for by in ("batch", "epoch") for name in names} | own
    by_iterations = {f"evaluation_{name}_vs_iterations" for name in names[:2]}
    assert tags["validation"].keys() == {"epoch_loss", "epoch_accuracy"} | by_iterations
    assert tags["worker-1"].keys() == perf
    assert tags["train"]["goodput_seconds/startup"][-1].tensor_proto.float_val[0] == pytest.approx(
        summary["goodput"]["seconds"]["startup"], abs=0.01
    )
    final = {tag.removeprefix("final/"): event.tensor_proto.float_val[0] for tag, (event,) in tags["hparams"].items()}
    assert final == pytest.approx({name: summary["metrics"][name] for name in final}) and len(final) >= 4
    start = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    hparams = plugin_data_pb2.HParamsPluginData.FromString(start).session_start_info.hparams
    assert hparams["strategy.name"].string_value == "multi_worker_mirrored"
    assert (hparams["Strategy"].string_value, hparams["Replicas"].number_value) == ("multi_worker_mirrored", 2)
    assert (hparams["Batch size"].number_value, hparams["Learning rate"].number_value) == (64, 0.003)
    assert (hparams["cluster.workers"].number_value, hparams["global_batch_size"].number_value) == (2, 64)
    for run in ("train", "worker-1"):
        sent = [event.tensor_proto.float_val[0] for event in tags[run]["comm/bytes_per_step"]]
        # By shared memory ten steps may send nothing over the network: then the value is 0, and is written all the same.
        assert len(sent) == 22 and min(sent) >= 0 and max(sent) > 0
        gradients = {event.tensor_proto.float_val[0] for event in tags[run]["comm/gradient_bytes_per_step"]}
        assert gradients == {summary["wire_bytes_per_step"]["predicted"]}
    assert [event.step for event in tags["validation"]["epoch_accuracy"]] == list(range(10))
    assert [event.step for event in tags["train"]["batch_loss"]] == list(range(10, 221, 10))
    last = tags["validation"]["epoch_accuracy"][-1].tensor_proto.float_val[0]
    assert last == pytest.approx(summary["metrics"]["val_accuracy"])


def test_main_jobs_model_is_plain_keras(main_job):
    from tfdist.tasks import digits

    _, workdir = main_job
    summary = json.loads((workdir / "summary.json").read_text())
    model = keras.models.load_model(workdir / "model.keras")
    assert model.optimizer.iterations.numpy() == 220
    loss, accuracy = model.evaluate(*digits.load()[1], verbose=0)
    assert accuracy == pytest.approx(summary["metrics"]["val_accuracy"])
    assert loss == pytest.approx(summary["metrics"]["val_loss"], rel=1e-4)


# The options of the step have a run of digits_mirrored, too.
@pytest.mark.parametrize(
    "name", tiers.cases(["default", "digits_mirrored", "digits_central_storage"], slow=["digits_mirrored"])
)
def test_each_strategys_configuration_trains(tmp_path, name):
    process = start(f"--config={name}", f"--workdir={tmp_path}", "--config.epochs=3", forked=True)
    output = finish(process)
    assert process.returncode == 0, output
    accuracy = json.loads((tmp_path / "summary.json").read_text())["metrics"]["val_accuracy"]
    assert accuracy >= 0.95
    assert f"\nval_accuracy: {accuracy:.6g}\n" in output and not re.search("[\x1b\u2500-\u257f]", output)


@pytest.mark.full
def test_synthetic_trains_in_bfloat16_and_with_other_options(tmp_path):
    process = start(
        "--config=synthetic",
        f"--workdir={tmp_path}",
        "--config.task_options.width=64",
        "--config.task_options.examples=256",
        "--config.optimizer.name=adamw",
        "--config.optimizer.weight_decay=0.01",
        "--config.precision=mixed_bfloat16",
        "--config.deterministic=True",
        "--config.steps_per_epoch=7",
        "--config.epochs=2",
    )
    output = finish(process)
    assert process.returncode == 0, output
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 14


@pytest.mark.full
def test_workers_take_shares_by_their_speed(tmp_path):
    process = start(
        "--config=digits_multi_worker",
        f"--workdir={tmp_path}",
        "--config.strategy.batch_shares=by_speed",
        "--config.epochs=3",
    )
    output = finish(process)
    assert process.returncode == 0, output
    shares = json.loads((tmp_path / "summary.json").read_text())["batch_shares"]
    assert len(shares) == 2 and sum(shares) == pytest.approx(1, abs=1e-3)
    listed = ", ".join(f"worker:{rank} {100 * share:.3g} %" for rank, share in enumerate(shares))
    assert f"batch shares by speed: {listed}" in output


@pytest.mark.full  # tests/compression/test_options.py makes it of a configuration
def test_a_users_own_compressor_trains_from_a_configuration(tmp_path):
    """One step of SGD on two workers moves a compressed weight by the sum of two signs, times the option `scale`."""
    process = start(
        "--config=digits_multi_worker",
        f"--workdir={tmp_path}",
        "--config.compression.name=tests.compression.toy_compressor:Sign",
        "--config.compression.scale=0.25",
        "--config.compression.use_error_feedback",
        "--config.optimizer.name=sgd",
        "--config.learning_rate=0.125",
        "--config.epochs=1",
        "--config.steps_per_epoch=1",
    )
    output = finish(process)
    assert process.returncode == 0, output
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = {
        "use_error_feedback": True,
        "warmup_steps": 0,
        "scale": 0.25,
        "width": 16,
        "symmetric": True,
    }
    assert summary["compression"] == {"name": "tests.compression.toy_compressor:Sign", **expected}
    like = config.TrainConfig()
    keras.utils.set_random_seed(like.seed)
    before = registry.resolve("task", like.task, registry.TASKS)(like.task_options).build_model()
    after = keras.models.load_model(tmp_path / "model.keras")
    pairs = zip(before.trainable_variables, after.trainable_variables, strict=True)
    large = [
        (old.numpy(), new.numpy()) for old, new in pairs if len(old.shape) > 1 and old.shape.num_elements() >= 1024
    ]
    assert large
    for old, new in large:
        signs = (old - new) / (0.125 * 0.25)
        np.testing.assert_allclose(signs, np.round(signs), atol=1e-4)
        assert set(np.unique(np.round(signs))) <= {-2, -1, 0, 1, 2} and np.abs(signs).max() > 1.5


def test_tpu_without_one_is_one_sentence(tmp_path):
    process = start("--config=digits_tpu", f"--workdir={tmp_path}", "--config.strategy.devices=local", forked=True)
    output = finish(process)
    assert process.returncode == 2
    assert "No TPU was found for strategy.devices='local'" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("where", "code", "named"),
    [
        (
            "import",
            2,
            "'tests.helpers.failing_task:Failing' cannot be imported: RuntimeError: failing in import, on purpose",
        ),
        # Like the step: the others are in their strategy and wait for this one.
        pytest.param(
            *("build", 1, "worker:1 failed with exit code 1: RuntimeError: failing in build, on purpose"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("step", 1, "worker:1 failed with exit code 1: RuntimeError: failing in step, on purpose"),
            marks=pytest.mark.full,
        ),
        # tests/launch/test_launcher.py ends the others of a killed task; the job that is killed below does so before its restart.
        pytest.param("kill", 137, "worker:1 was killed by SIGKILL", marks=pytest.mark.full),
    ],
)
def test_a_task_that_fails_ends_all_within_seconds(tmp_path, where, code, named):
    config = tmp_path / "config.py"
    by_name = where == "import"  # a task that the configuration only names is imported later
    config.write_text(
        "from tfdist.config import *\n"
        + ("" if by_name else "from tests.helpers import failing_task\n")
        + "def get_config():\n"
        + "    return TrainConfig('tests.helpers.failing_task:Failing', strategy=StrategyConfig('multi_worker_mirrored'),\n"
        + "        cluster=ClusterConfig(2), global_batch_size=8"
        + ("" if by_name else ", task_options=failing_task.Options()")
        + ")\n"
    )
    moment = tmp_path / "moment"
    process = start(
        f"--config={config}",
        f"--workdir={tmp_path / 'run'}",
        *([] if by_name else [f"--config.task_options.where={where}", f"--config.task_options.moment={moment}"]),
        **({"FAIL_AT_IMPORT": str(moment)} if by_name else {}),
    )
    output = finish(process)
    ended = time.time()
    assert process.returncode == code, output
    # It takes about 3; without the supervisor the others would wait for minutes.
    assert ended - float(moment.read_text()) < 40
    # A fault of the configuration is the task's own message, and the reason that the supervisor gives.
    assert output.count(named) == (2 if by_name else 1), output
    tracebacks = [line for line in output.splitlines() if "Traceback (most recent call last)" in line]
    if where in ("kill", "import"):
        assert not tracebacks, output
    else:
        assert tracebacks and all(line.startswith("[worker:1] ") for line in tracebacks), output
        assert output.count(f"[worker:1] RuntimeError: failing in {where}, on purpose") == 1, output
    assert not left_over(str(tmp_path))


@pytest.mark.full
def test_interrupt_ends_all(tmp_path):
    process = start(
        "--config=configs/digits_multi_worker.py",
        f"--workdir={tmp_path}",
        "--config.epochs=1000",
        "--config.grace_seconds=3",
    )
    deadline = time.monotonic() + 150
    log = tmp_path / "logs" / "worker-0.log"
    while not (log.exists() and "Epoch 2/" in log.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    finish(process, timeout=60)
    assert process.returncode == 130
    assert not left_over(str(tmp_path))


def kill(launcher, task):
    """Kills a task of a job."""
    os.kill(next(pid for name, pid, _ in chaos.tasks(launcher.pid) if name == task), signal.SIGKILL)


@pytest.fixture(scope="module")
def parameter_servers(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("ps")
    options = ["--config.strategy.name=parameter_server", "--config.cluster.workers=2", "--config.cluster.ps=2"]
    killed = gate.flag(workdir / "killed", 4)
    process = start("--config=configs/digits.py", f"--workdir={workdir}", "--config.epochs=5", *options, killed)
    log = workdir / "logs" / "chief-0.log"
    launched_job.until(lambda: (log.exists() and "Epoch 3/" in log.read_text()) or process.poll() is not None, 150)
    kill(process, "worker:1")
    (workdir / "killed").touch()
    output = finish(process)
    assert process.returncode == 0, output
    return output, workdir


def test_one_command_trains_with_parameter_servers_of_which_a_worker_is_killed(parameter_servers):
    output, workdir = parameter_servers
    summary = json.loads((workdir / "summary.json").read_text())
    # About 0.99; but at a constant learning rate, and updates that come as they like, the last epoch may end lower.
    assert summary["metrics"]["val_accuracy"] >= 0.9
    assert (summary["strategy"], summary["num_replicas"]) == ("parameter_server", 2)
    assert summary["cluster"] == {"chief": 1, "worker": 2, "ps": 2}
    assert (summary["epochs"], summary["steps"]) == (5, 110)
    assert "tfdist: worker:1 was killed by SIGKILL; the other workers continue" in output
    assert set(summary["bytes_per_server"]) == {"ps:0", "ps:1"} and min(summary["bytes_per_server"].values()) > 0
    assert "[chief:0] parameter_server: 2 workers, each with batches of 64" in output
    assert keras.models.load_model(workdir / "model.keras").optimizer.iterations.numpy() == 110
    logs = {path.name for path in (workdir / "logs").glob("*.log")}
    assert logs == {"chief-0.log", "worker-0.log", "worker-1.log", "ps-0.log", "ps-1.log"}
    assert {run.name: len(list(run.iterdir())) for run in (workdir / "tensorboard").iterdir()} == {
        "train": 1,
        "validation": 1,
        "hparams": 1,
    }
    assert not left_over(str(workdir))


@pytest.mark.slow
def test_a_killed_server_is_named(tmp_path):
    options = [
        "--config.cluster.workers=1",
        "--config.cluster.ps=2",
        "--config.epochs=5",
        "--config.steps_per_epoch=60",
    ]
    process = start(
        "--config=digits_parameter_server", f"--workdir={tmp_path}", *options, gate.flag(tmp_path / "killed", 4)
    )
    log = tmp_path / "logs" / "chief-0.log"
    launched_job.until(lambda: (log.exists() and "Epoch 2/" in log.read_text()) or process.poll() is not None, 150)
    kill(process, "ps:1")
    (tmp_path / "killed").touch()
    output = finish(process)
    assert process.returncode == 137 and "tfdist: ps:1 was killed by SIGKILL" in output, output
    assert not left_over(str(tmp_path))


@pytest.mark.full
def test_options_of_the_step_reach_the_model(tmp_path):
    options = ["--config.steps_per_execution=4", "--config.jit_compile", "--config.precision=mixed_float16"]
    options += ["--config.optimizer.gradient_accumulation_steps=2", "--config.steps_per_epoch=10", "--config.epochs=8"]
    options += ["--config.task_options.filters=8", "--config.validation_freq=4"]
    process = start("--config=digits_mirrored", f"--workdir={tmp_path}", *options)
    output = finish(process)
    assert process.returncode == 0, output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 80
    assert output.count("val_accuracy: ") == 2 + 1, "of epochs 4 and 8, and the result"
    assert summary["metrics"]["val_accuracy"] > 0.5
    model = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.optimizer.inner_optimizer.gradient_accumulation_steps == 2
    assert model.optimizer.iterations.numpy() == 40, "updates"
    assert model.layers[-1].dtype_policy.name == "mixed_float16"


@pytest.fixture(scope="module")
def killed_job(tmp_path_factory):
    """A job of which a worker is killed, once there is a backup: output, work directory."""
    workdir = tmp_path_factory.mktemp("killed")
    process = start(
        "--config=configs/digits_multi_worker.py",
        f"--workdir={workdir}",
        "--config.backup.save_freq=15",
        "--config.max_restarts=1",
        "--config.epochs=2",
        gate.flag(workdir / "killed", 2),
    )
    deadline = time.monotonic() + 150
    while not (workdir / "backup" / "checkpoint").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [pid for name, pid, _ in chaos.tasks(process.pid) if name.startswith("worker:")]
    os.kill(workers[-1], signal.SIGKILL)
    (workdir / "killed").touch()
    output = finish(process)
    assert process.returncode == 0, output
    return output, workdir


def test_a_job_with_a_killed_worker_is_restarted_from_its_backup(killed_job):
    output, workdir = killed_job
    assert re.search(r"tfdist: worker:\d lost at step \d+ \(killed by SIGKILL\); restart 1/1 from step [1-9]", output)
    assert "tfdist: resuming from step" in output
    summary = json.loads((workdir / "summary.json").read_text())
    assert (summary["restarts"], summary["steps"], summary["epochs"]) == (1, 44, 2)
    assert not (workdir / "backup").exists(), "removed with everything written"
    assert not left_over(str(workdir))


@pytest.mark.full
def test_another_configuration_does_not_go_on_from_a_backup(tmp_path):
    options = ["--config=default", f"--workdir={tmp_path}", "--config.steps_per_epoch=4"]
    process = start(*options, "--config.backup.save_freq=2", "--config.epochs=9999")
    deadline = time.monotonic() + 150
    while not (tmp_path / "backup" / "checkpoint").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 75, output
    said = r"tfdist: received SIGTERM: saved at step (\d+)\. Run the same command again to continue from step \1\n"
    assert re.search(said, output)
    process = start(*options, "--config.learning_rate=0.5", "--config.epochs=1")
    output = finish(process)
    assert process.returncode == 2, output
    assert "is of another training: config.learning_rate is 0.5, and was 0.003" in output
    assert (tmp_path / "backup" / "checkpoint").exists()


def test_ctrl_c_ends_a_training_with_one_line(tmp_path):
    process = start("--config=digits", f"--workdir={tmp_path}", "--config.epochs=1000")
    shown = [process.stdout.readline()]
    while not shown[-1].startswith("Epoch 2/"):
        shown.append(process.stdout.readline())
        assert shown[-1], shown
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    again = r"tfdist: ended by Ctrl-C \(SIGINT\)\. Run the same command again to continue from step \d+\n"
    assert re.search(again, rest) and "Traceback" not in rest


ENDS_EARLY = """
import ctypes, os, sys
import keras

class Ends(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and '"index": 1' in os.environ.get("TF_CONFIG", '"index": 1'):
            how = os.environ["HOW"]
            {"sys": lambda: sys.exit(0), "os": lambda: os._exit(0), "c": lambda: ctypes.CDLL(None)._exit(0)}[how]()
"""


@pytest.mark.parametrize(
    ("workers", "how", "said"),
    [
        # Under `tfdist launch`: test_supervised_end.py.
        pytest.param(
            2, "c", "worker:1 failed with exit code 0 before the training has finished", marks=pytest.mark.full
        ),
        pytest.param(2, "os", "ends_early.py:9 called os._exit(0)", marks=pytest.mark.full),
        pytest.param(2, "sys", "ends_early.py:9 called sys.exit(0)", marks=pytest.mark.full),
        (1, "sys", "ends_early.py:9 called sys.exit(0) before the training has finished. To end a training early"),
    ],
)
def test_a_training_that_has_not_finished_is_no_success(tmp_path, workers, how, said):
    (tmp_path / "ends_early.py").write_text(ENDS_EARLY)
    name = "multi_worker_mirrored" if workers > 1 else "one_device"
    options = [f"--config.cluster.workers={workers}", f"--config.strategy.name={name}", "--config.epochs=2"]
    options += ["--config=digits", f"--workdir={tmp_path / 'run'}", "--config.callbacks=ends_early:Ends"]
    process = start(*options, HOW=how, PYTHONPATH=f"{ROOT}:{tmp_path}")
    output = finish(process)
    assert process.returncode == 1, output
    assert said in output
    assert not {"summary.json", "model.keras"} & {path.name for path in (tmp_path / "run").iterdir()}


def test_a_finished_run_is_trained_again_when_asked_to(tmp_path):
    def run(*more):
        process = start(*options, *more, forked=True)
        return finish(process), process.returncode, (tmp_path / "model.keras").stat().st_mtime_ns

    options = ["--config=digits", f"--workdir={tmp_path}", "--config.epochs=1", "--config.steps_per_epoch=2"]
    output, code, written = run()
    assert code == 0 and "finished run" not in output
    output, code, after = run("--overwrite")
    assert code == 0 and after > written
    assert (
        output.count("holds a finished run; training again from the beginning. Its model.keras and summary.json stay")
        == 1
    )


def state_of(folder):
    """Returns all that is known of each file of a folder, besides when it was last read."""
    return {
        path: (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.is_file() and hashlib.sha256(path.read_bytes()).digest(),
        )
        for path in [folder, *folder.rglob("*")]
    }


def test_the_folder_of_a_run_that_lives_is_no_other_runs(tmp_path, capsys):
    workdir, opened = tmp_path / "run", tmp_path / "opened"
    options = [f"--workdir={workdir}", "--config.backup.save_freq=never", "--config.steps_per_epoch=2"]
    one, two = (["--config=digits", *options], ["--config=digits_multi_worker", *options])
    first = start(*one, "--config.epochs=2", gate.flag(opened, 1))
    try:
        launched_job.until(lambda: (workdir / "goodput.bin").exists(), 150)
        for pid in left_over(str(workdir)):
            os.kill(int(pid), signal.SIGSTOP)  # so that it changes nothing itself
        before = state_of(workdir)
        for more in (two, [*one, "--overwrite"]):
            assert train.main(["train", *more]) == 2
            (said,) = capsys.readouterr().err.splitlines()
            assert f"workdir '{workdir}' belongs to another run, which has not ended: process {first.pid} on " in said
            assert "Give each run its own workdir, or end that process first" in said
        assert state_of(workdir) == before
    finally:
        first.kill()
        first.communicate()
    third = start(*one, "--config.epochs=1", forked=True)
    output = finish(third)
    assert third.returncode == 0, output
    assert not (workdir / "run").exists() and (workdir / "summary.json").exists()
