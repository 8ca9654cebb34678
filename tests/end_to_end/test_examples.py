"""Every example runs as its text says."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

from tests.helpers import fork_server, tiers

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "existing_script.py")


def run_existing_script(tmp_path, workers, script=SCRIPT, ps=0):
    command = [sys.executable, script]
    if workers + ps > 1:
        command = [sys.executable, "-m", "tfdist.launch", f"--workers={workers}", f"--ps={ps}", "--", *command]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "circle.keras").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("logs", "script.py")] == ["runs"]
    return re.findall(r"accuracy ([\d.]+) on (\d) replicas", done.stdout)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.full)])
def test_existing_script(tmp_path, workers):
    found = run_existing_script(tmp_path, workers)
    assert len(found) == workers
    assert all(float(accuracy) > 0.9 and int(replicas) == workers for accuracy, replicas in found)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "central_storage", "parameter_server"])
def test_existing_script_with_the_name_of_the_strategy_changed(tmp_path, strategy):
    text = pathlib.Path(SCRIPT).read_text()
    assert text.count('"multi_worker_mirrored"') == 1
    script = tmp_path / "script.py"
    script.write_text(text.replace("multi_worker_mirrored", strategy))
    ((accuracy, replicas),) = run_existing_script(tmp_path, 1, str(script), ps=int(strategy == "parameter_server"))
    assert float(accuracy) > 0.9 and replicas == "1"


# Flags that cut an example to some steps.
FEW = {
    "image_cnn": ["--images_per_class=10", "--epochs=3"],
    "text_transformer": ["--steps=4", "--epochs=2"],
    "text_transformer_model_parallel": ["--sentences=512", "--epochs=2"],
    "ratings_parameter_server": ["--steps=175", "--epochs=2"],
    "transfer_learning": ["--epochs=2"],
    "custom_train_step": ["--epochs=3"],
    "data_parallel": [],
    "gan_custom_loop": ["--steps=40", "--epochs=5"],
}
HEADERS = {name: ast.get_docstring(ast.parse((ROOT / f"examples/{name}.py").read_text())) for name in FEW}
COMMANDS = {
    name: re.findall(r"^    ((?:python|tfdist) .+?)(?:\s+#.*)?$", text, re.MULTILINE) for name, text in HEADERS.items()
}
EVERY = [command for commands in COMMANDS.values() for command in commands]
COMMAND = re.compile(r"(?:tfdist (?P<launcher>launch .*) -- )?python examples/(?P<name>\w+)\.py ?(?P<flags>.*)")


def label(command):
    """Returns a short name of a test's command."""
    return " ".join(re.findall(r"--\w+=\w+|(?<=examples/)\w+", command))


def run_command(command, folder, few=()):
    """Runs a command of a header, its scripts forked from a process that has imported TensorFlow; returns what it prints."""
    launcher, name, flags = COMMAND.fullmatch(command).groups()
    words = fork_server.command(f"examples.{name}", *flags.split(), *few)
    if launcher:
        words = [str(pathlib.Path(sys.executable).with_name("tfdist")), *launcher.split(), "--", *words]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.glob("runs/*.keras"))
    assert {path.name for path in folder.iterdir()} <= {"runs", "logs"}
    return done.stdout


def expected(command):
    """Returns the metric that an example's header names, whether it is to be above or below, and the bar."""
    header = " ".join(HEADERS[COMMAND.fullmatch(command)["name"]].split())
    metric, side, bar = re.search(r"expect an? ([a-z ]+?) (above|below) (\d+(?:\.\d+)?)", header).groups()
    return metric, side, float(bar)


@pytest.mark.parametrize("command", tiers.cases(EVERY, quick=["python examples/custom_train_step.py"]), ids=label)
def test_commands_of_headers_learn_in_some_steps(command, tmp_path):
    name = COMMAND.fullmatch(command)["name"]
    output = run_command(command, tmp_path, FEW[name])
    losses = [float(loss) for loss in re.findall(r"/step.* - loss: ([\d.]+)", output)]
    if name == "gan_custom_loop":  # its losses are a contest
        losses = [1.0, float(re.search(r"error ([\d.]+)", output)[1])]
    assert losses[-1] < losses[0]
    trainings = 3 if name == "transfer_learning" else 1
    assert len(re.findall(rf"{expected(command)[0]} [\d.]+", output)) == trainings, "the chief alone prints it"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", [commands[0] for commands in COMMANDS.values()], ids=label)
def test_what_headers_expect_comes(command, tmp_path):
    output = run_command(command, tmp_path)
    metric, side, bar = expected(command)
    found = float(re.findall(rf"{metric} ([\d.]+)", output)[-1])
    assert found > bar if side == "above" else found < bar
    if "text_transformer.py" in command:
        assert found < float(re.search(r"perplexity of the 3-gram model ([\d.]+)", output)[1])


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ray_tune_finds_the_best_learning_rate(tmp_path):
    pytest.importorskip("ray.tune", exc_type=ImportError)
    command = [sys.executable, str(ROOT / "examples/ray_tune.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (loss,) = re.findall(r"best learning rate 0\.3: loss ([\d.]+)", done.stdout)
    assert float(loss) < 0.1
