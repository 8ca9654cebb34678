"""Bad inputs of commands: each row is a command line, its exit code, and words that must and must not stand in its output.

All rows run in one process, which must not import TensorFlow.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import keras
import numpy as np
import pytest

from tfdist.config import OptimizerConfig
from tfdist.config import optimizer as optimizer_lib

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = ("train", "--config=bad_config.py", "--workdir=work")
TRACEBACK = "Traceback (most recent call last)"
MOST = 2**31 - 1


class Row(NamedTuple):
    """A command line, what stands in its output, and its exit code."""

    argv: tuple[str, ...]
    words: tuple[str, ...]
    code: int = 2
    absent: tuple[str, ...] = (TRACEBACK,)
    environ: tuple[tuple[str, str], ...] = ()


def train(*flags: str, words: tuple[str, ...]) -> Row:
    return Row((*TRAIN, *(f"--config.{flag}" for flag in flags)), words)


def callback(text: str, *words: str) -> Row:
    return train(f"callbacks={text}", words=words)


def optimizer(name: str, argument: str, value: str, must_be: str) -> Row:
    where = f"optimizer.{argument}"
    return train(f"optimizer.name={name}", f"{where}={value}", words=(f"{where} must be {must_be}. Received: ",))


ROWS = [
    *(optimizer("adam", "epsilon", value, "1e-30 to 1000") for value in ("0", "-1", "nan", "inf", "1e30", "1e-60")),
    *(optimizer("adam", "beta_2", value, "0 to 0.9999999") for value in ("1", "0.99999999", "-0.1", "nan", "inf")),
    *(optimizer("rmsprop", "rho", value, "0 to 0.9999999") for value in ("1", "1.5", "-1")),
    optimizer("sgd", "momentum", "1", "0 to 0.9999999"),
    optimizer("lion", "beta_1", "0", "1e-07 to 0.9999999"),
    optimizer("adam", "ema_momentum", "1", "0 to 0.9999999"),
    optimizer("adamw", "weight_decay", "1e30", "0 to 1000000"),
    optimizer("adam", "clipnorm", "1e31", "0 (off) to 1e+30"),
    optimizer("muon", "ns_steps", "0", "1 to 1000"),
    optimizer("muon", "muon_a", "nan", "-10 to 10"),
    optimizer("adafactor", "clip_threshold", "-1", "1e-06 to 1e+30"),
    optimizer("adafactor", "beta_2_decay", "0.5", "-10 to 0"),
    optimizer("ftrl", "learning_rate_power", "5", "-10 to 0"),
    optimizer("adagrad", "initial_accumulator_value", "-1", "0 to 1000000"),
    optimizer("adam", "ema_overwrite_frequency", "-3", f"0 (off) to {MOST}"),
    optimizer("adam", "loss_scale_factor", "inf", "1e-06 to 1e+15"),
    train("learning_rate=1e30", words=("learning_rate must be 0 to 1000000. Received: 1e+30.",)),
    train("schedule.name=step", "schedule.boundaries=1e300", words=(f"schedule.boundaries must be at most {MOST}",)),
    train(f"schedule.warmup_steps={10**30}", words=(f"schedule.warmup_steps must be 0 (off) to {MOST}",)),
    train("schedule.warmup_epochs=1e300", words=(f"schedule.warmup_epochs must be 0 (off) to {MOST}",)),
    train("schedule.name=polynomial", "schedule.power=1e30", words=("schedule.power must be 0.001 to 1000",)),
    train(f"steps_per_execution={10**30}", words=(f"steps_per_execution must be 1 to {MOST}",)),
    train("strategy.timeout_seconds=1e30", words=("strategy.timeout_seconds must be 0 (off) to 1000000000",)),
    train(f"per_replica_batch_size={10**30}", "global_batch_size=0", words=("per_replica_batch_size must be 1 to",)),
    train(
        "optimizer.gradient_accumulation_steps=8",
        words=("gradient_accumulation_steps is 8, but the run has 4 steps, so that no weight would be updated",),
    ),
    callback("EarlyStopping(patience=abc)", "patience of EarlyStopping must be a whole number, 0 to"),
    callback("EarlyStopping(mode=up)", "mode of EarlyStopping must be one of: auto, min, max. Received: 'up'."),
    callback("EarlyStopping(min_delta=1e999)", "min_delta of EarlyStopping must be a finite number. Received: inf."),
    callback("EarlyStopping(restore_best_weights=true)", "must be True or False. Received: 'true'."),
    callback("ReduceLROnPlateau(factor=1)", "factor of ReduceLROnPlateau must be a number, 1e-30 to 0.9999999."),
    callback("CSVLogger()", "CSVLogger needs filename, such as CSVLogger(filename='log.csv')."),
    callback("CSVLogger(filename='/proc')", "must be a file that can be written. Received: '/proc' (it is a folder)."),
    callback("CSVLogger(filename=x, separator=', ')", "separator of CSVLogger must be one character."),
    callback(
        "ModelCheckpoint(filepath='x.pt')", "filepath of ModelCheckpoint must end in .keras or .h5. Received: 'x.pt'"
    ),
    callback("ModelCheckpoint(filepath='{epoch.keras')", "or a metric such as {val_loss:.2f} are filled in. Received"),
    callback("ModelCheckpoint(filepath='{epoch:zz}.keras')", "or a metric such as {val_loss:.2f} are filled in. Rec"),
    callback(
        "ModelCheckpoint(filepath='{batch}.keras')", "has {batch}, which is not known after an epoch; see save_fre"
    ),
    callback(
        "ModelCheckpoint(filepath='x.keras', save_freq=0)", "must be 'epoch' or a number of steps, 1 or more. Rec"
    ),
    callback("SwapEMAWeights()", "SwapEMAWeights needs optimizer.use_ema, but it is False"),
    train(
        "task=synthetic", "callbacks=EarlyStopping()", words=("'val_loss', but task 'synthetic' has no method eval_",)
    ),
    train(
        "validation_freq=3", "callbacks=EarlyStopping()", words=("'val_loss', but no epoch is validated: validation",)
    ),
]
ROWS += [
    Row(("new-task", "__init__"), ("Names that begin with __ are Python's own",)),
    Row(("new-task", "a\x1b[31mb"), ("must be a Python identifier",)),
    Row(("new-task", "x" * 5000), ("...",)),
    Row(("launch", "--workers=1000000000", "--", "true"), ("--workers must be 1 to 10000, or MIN:MAX",)),
    Row(
        ("cluster", "emit", *TRAIN[1:], "--config.cluster.workers=1000000000"), ("cluster.workers must be 1 to 10000",)
    ),
    Row(("cluster", "show", "--format=\x1b[31m"), ("flag --format",)),
    train(f"backup.dir={'x' * 5000}", words=("xxx...",)),
    train(f"export.dir={'x' * 5000}", words=("xxx...",)),
    train("backup.dir=a\x1b[31m\nb/" + "x" * 5000, words=("\\x1b[31m\\nb",)),
    train("backup.dir=file", words=("backup.dir must be a folder, and 'file' is a file",)),
]
OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_NAMESPACE": "x"}
PODS = {"TFDIST_SERVICE": "s", "HOSTNAME": "pod-0"}
SHOW = ("cluster", "show", "--timeout=1")


def environment(words: str, **variables: str) -> Row:
    return Row(SHOW, (words,), environ=tuple(variables.items()))


ROWS += [
    environment("TFDIST_PODS must be the number of pods, 1 or more", **PODS, TFDIST_PODS="0"),
    environment("JOB_COMPLETION_INDEX must be 0 to 1", **PODS, TFDIST_PODS="2", JOB_COMPLETION_INDEX="5"),
    environment(
        "OMPI_COMM_WORLD_RANK must be 0 to 1", **OMPI, OMPI_COMM_WORLD_RANK="5", OMPI_COMM_WORLD_LOCAL_SIZE="1"
    ),
    Row(
        SHOW,
        ("OMPI_COMM_WORLD_SIZE must be the number of tasks, 1 or more. Received: 0.",),
        environ=tuple(
            {
                **OMPI,
                "OMPI_COMM_WORLD_SIZE": "0",
                "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            }.items()
        ),
    ),
    environment("LOCAL_SIZE must be more than", **OMPI, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_LOCAL_SIZE="5"),
    Row(("train", "--config=/proc/kmsg"), ("expected a regular file", "--config=/proc/kmsg"))
    if os.geteuid() == 0
    else ROWS[0],
    *(
        Row((command, *more, "--flagfile=pipe"), ("--flagfile: pipe: expected a regular file, and found a FIFO",))
        for command, *more in (["train", "--config=digits"], ["launch"], ["doctor"], ["cluster", "show"])
    ),
    Row(("train", "--config=/dev/zero"), ("expected a regular file, and found a device",)),
    Row(("train", "--config=big.py"), ("--config=big.py: expected at most 64 MB, and found more",)),
    Row(("train", f"--config={'x' * 5000}"), ("no such file, and no preset",)),
    Row(("train", "--config=a\x1b[31m\n"), ("a\\x1b[31m\\n: no such file",)),
    train("strategy.devices=/job:worker/device:CPU:0", words=("strategy.devices must be names such as GPU:0",)),
    train(f"task_options.filters={10**12}", words=("task_options.filters must be 1 to 100000",)),
    train(f"task_options.filters={10**30}", words=("task_options.filters must be 1 to 100000",)),
    train(
        "compression.name=int8", f"compression.block={2**60}", words=("compression.block must be a power of two, 4 to",)
    ),
    train("task=synthetic", f"task_options.width={10**30}", words=("task_options.width must be 1 to 1000000000",)),
    callback(
        "EarlyStopping(patience=3, patience=4)", "and each argument once. Received: 'EarlyStopping(patience=3, pa"
    ),
    callback("ModelCheckpoint(filepath='{epoch:99999999999}.keras')", "are filled in. Received", "MemoryError"),
    callback("ModelCheckpoint(filepath='{epoch:300}.keras')", "a file's name has at most 255 bytes"),
    callback(r"ModelCheckpoint(filepath='\ud800.keras')", "a path has no lone surrogates"),
    callback("nope_nope:x", "callback 'nope_nope:x' cannot be found: No module named 'nope_nope'"),
    callback("os:", "callback must be your own as 'package.module:Name'. Received: 'os:'"),
    train("optimizer.name=:", words=("optimizer must be your own as 'package.module:Name'. Received: ':'",)),
    train("optimizer.name=nope_nope:x", words=("optimizer 'nope_nope:x' cannot be found",)),
    train("schedule.name=step", "schedule.boundaries=,", words=("needs schedule.boundaries, such as 3000,6000",)),
    train("strategy.devices=,", words=("strategy.devices names no device; leave it empty",)),
    train("backup.dir=/dev/null/x", words=("backup.dir must be a folder, and a parent folder of it is a file",)),
    train("global_batch_size=-64", words=("global_batch_size must be 0 to", "Received: -64.")),
    Row((*TRAIN, "--flagfile="), ("--flagfile has no value; write --flagfile=FILE",)),
    Row(("doctor", "--no-devices=3"), ("--nodevices=3 does not take an argument.",)),
    Row(("doctor", "--json=perhaps"), ("flag --json=perhaps: expected true or false. Received: 'perhaps'",)),
    Row(("backup", "export", "d", "x.keras", "--step=x"), ("flag --step=x: expected a whole number. Received: 'x'",)),
    Row(("backup", "show", ""), ("'' is not a folder",)),
    Row(("launch", "--", "./file"), ("'./file' cannot be run; it is not executable: chmod +x ./file",)),
    Row(("launch", "--", "."), ("'.' cannot be run; it is a folder",)),
    Row(("launch", "--log_dir=/dev/null", "--", "true"), ("--log_dir must be a folder that can be written to",)),
    Row(("launch", "--log_dir=dangling", "--", "true"), ("--log_dir must be a folder that can be written to",)),
    *(
        Row(("train", f"--config={name}.py"), (words,))
        for name, words in {
            "no_cluster": "config.cluster must be ClusterConfig. Received: {}.",
            "no_backup": "config.backup must be BackupConfig. Received: None.",
            "hosts": "config.cluster.hosts must be str. Received: 3.",
            "surrogate": "backup.dir must be a folder, and a path has no lone surrogates. Received: '\\ud800'.",
        }.items()
    ),
    train(
        "backup.dir=dangling",
        words=("backup.dir must be a folder, and 'dangling' is a link to a folder that does not exist.",),
    ),
    Row((*TRAIN[:2], "--workdir=foo://b/run"), ("workdir 'foo://b/run' has the unknown scheme 'foo'",)),
    Row(
        (*TRAIN[:2], "--workdir=s3://id:secret@b/run"),
        ("workdir must not contain credentials", "Received: 's3://...@b/run'"),
    ),
    Row((*TRAIN[:2], "--workdir=folders"), ("'folders/model.keras' must be a file of the run, and is a folder",)),
    Row(("train", "--config=cycle.py"), ("config.task_options must not hold itself",)),
    Row(
        ("train", "--config=options.py"),
        ("optimizer 'adam' takes no 'options'; did you mean 'epsilon'? It takes: beta_1, ",),
    ),
    Row(("train", "--config=names.py"), ("optimizer.exclude_layers must be a list of texts. Received: [1].",)),
    train(
        "optimizer.rhoo=0.9",
        "optimizer.name=adadelta",
        words=("--config.optimizer.rhoo: optimizer 'adadelta' takes no 'rhoo'; did you mean 'rho'?",),
    ),
    train(
        "optimizer.momentum=0.9",
        "compression.name=int8",
        "compression.samples=3",
        words=(
            "--config.optimizer.momentum: optimizer 'adam' takes no 'momentum', which is an option of muon, rmsprop, sgd.",
            "--config.compression.samples: compression 'int8' takes no 'samples', which is an option of topk.",
        ),
    ),
    train("optimizer.beta_1=x", words=("--config.optimizer.beta_1: expected a number. Received: 'x'.",)),
    Row(
        ("train", "--config=null.py"),
        ("backup.dir must be a folder, and a path has no null", "export.dir must be a fol"),
    ),
    Row(
        (*TRAIN[:2], "--workdir=.", "--config.strategy.name=multi_worker_mirrored", "--config.cluster.workers=2"),
        ("'logs' must be a folder for the tasks' output, and is a file",),
    ),
]

CONFIG = """
import tfdist
def get_config():
    return tfdist.TrainConfig(task="digits", global_batch_size=64, steps_per_epoch=2, epochs=2)
"""
PROGRAMS = {
    "cycle.py": "made.task_options = made",
    "options.py": "made.optimizer.options = [1]",
    "names.py": "made.optimizer = tfdist.config.OptimizerConfig('muon', exclude_layers=[1])",
    "no_cluster.py": "made.cluster = {}",
    "no_backup.py": "made.backup = None",
    "hosts.py": "made.cluster.hosts = 3",
    "surrogate.py": "made.backup.dir = chr(0xD800)",
    "null.py": "made.backup.dir = made.export.dir = 'a\\0b'",
}
RUN = """
import contextlib, io, json, os, sys, traceback
from tfdist.__main__ import main
results = []
for argv, environ in json.load(sys.stdin):
    os.environ.update(environ := dict(environ))
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(["tfdist", *argv])
        except BaseException:
            code = -1
            traceback.print_exc()
    for name in environ:
        del os.environ[name]
    results.append((code, output.getvalue(), "tensorflow" in sys.modules))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns exit code, output and whether TensorFlow was imported, for each row."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "bad_config.py").write_text(CONFIG)
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "folders" / "model.keras").mkdir(parents=True)
    with (folder / "big.py").open("wb") as file:
        file.truncate(2**26 + 1)
    for name in ("file", "logs"):
        (folder / name).write_text("a file")
    for name, line in PROGRAMS.items():
        (folder / name).write_text(CONFIG.replace("    return", "    made =") + f"    {line}\n    return made\n")
    command = [sys.executable, "-c", RUN]
    text = json.dumps([(row.argv, row.environ) for row in ROWS])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    done = subprocess.run(command, input=text, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: " ".join(ROWS[number].argv)[-80:])
def test_a_bad_input_is_a_sentence(results, number):
    row, (code, output, has_tensorflow) = ROWS[number], results[number]
    assert code == row.code, output
    assert not [word for word in row.words if word not in output], output
    assert not [word for word in row.absent if word in output], output
    assert not has_tensorflow
    assert all(character.isprintable() or character == "\n" for character in output)


def test_a_current_folder_that_was_removed_is_a_sentence(tmp_path):
    program = "import os, sys; os.rmdir(os.getcwd()); from tfdist.__main__ import main; sys.argv = ['tfdist', 'presets']; sys.exit(main())"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tfdist: the current folder cannot be used (No such file or directory)")


@pytest.mark.parametrize("name", optimizer_lib.OPTIMIZERS)
def test_optimizers_train_to_finite_weights_at_the_ends_of_each_range(name):
    """Of the three coefficients of Muon, which are right together only, each is but a finite number."""
    kinds = {key.lower(): kind for key, kind in vars(keras.optimizers).items()}
    if name not in kinds:
        pytest.skip("this Keras does not have it")
    for argument in {**optimizer_lib.OPTIMIZERS[name], **optimizer_lib.EVERY_OPTIMIZER}:
        allowed = optimizer_lib.range_of(name, argument)
        for end in () if allowed is None or argument in ("muon_a", "muon_b", "muon_c") else allowed[:2]:
            if allowed.off and end == 0:
                continue
            options = {argument: end, **({"use_ema": True} if argument.startswith("ema_") else {})}
            made = kinds[name](learning_rate=1e-3, **OptimizerConfig(name, **options).arguments())
            weights = [keras.Variable(np.array([[1, -2], [0, 3]], "float32")), keras.Variable(np.zeros(3, "float32"))]
            before = [keras.ops.convert_to_numpy(weight) for weight in weights]
            made.build(weights)
            for _ in range(3):
                made.apply([keras.ops.array([[0.5, 0.0], [0.0, -1e-3]]), keras.ops.array([0.0, 1.0, 1e-4])], weights)
            assert all(np.isfinite(keras.ops.convert_to_numpy(weight)).all() for weight in weights), f"{argument}={end}"
            assert any(
                (keras.ops.convert_to_numpy(weight) != old).any() for weight, old in zip(weights, before, strict=True)
            ), f"{argument}={end}"
