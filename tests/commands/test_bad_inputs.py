"""Bad inputs of commands: each row is a command line, its exit code, and words that must and must not stand in its output.

All rows run in one process, which must not import TensorFlow.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import keras
import numpy as np
import pytest

from tests.helpers import tiers
from tfdist.config import OptimizerConfig
from tfdist.config import optimizer as optimizer_lib
from tfdist.config.constraints import field_faults

ROOT = pathlib.Path(__file__).parents[2]
TRAIN = ("train", "--config=bad_config.py", "--workdir=work")
TRACEBACK = "Traceback (most recent call last)"


class Row(NamedTuple):
    """A command line, what stands in its output, and its exit code."""

    argv: tuple[str, ...]
    words: tuple[str, ...]
    code: int = 2
    absent: tuple[str, ...] = (TRACEBACK,)
    environ: tuple[tuple[str, str], ...] = ()


def train(*flags: str, words: tuple[str, ...]) -> Row:
    return Row((*TRAIN, *(f"--config.{flag}" for flag in flags)), words)


# Faults of fields: tests/config/test_sentences.py.
ROWS = [
    train("optimizer.name=adam", "optimizer.epsilon=0", words=("optimizer.epsilon must be 1e-30 to 1000. Received: ",)),
    train(
        "callbacks=ModelCheckpoint(filepath='{epoch:99999999999}.keras')",
        words=("are filled in. Received", "MemoryError"),
    ),
]
ROWS += [
    Row(("launch", "--workers=1000000000", "--", "true"), ("--workers must be 1 to 10000, or MIN:MAX",)),
    Row(
        ("cluster", "emit", *TRAIN[1:], "--config.cluster.workers=1000000000"), ("cluster.workers must be 1 to 10000",)
    ),
    Row(("cluster", "show", "--format=\x1b[31m"), ("flag --format",)),
    train(f"backup.dir={'x' * 5000}", words=("xxx...",)),
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
    Row((*TRAIN, "--flagfile="), ("--flagfile has no value; write --flagfile=FILE",)),
    Row(("doctor", "--no-devices=3"), ("--nodevices=3 does not take an argument.",)),
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
        "optimizer.momentum=0.9",
        "compression.name=int8",
        "compression.samples=3",
        words=(
            "--config.optimizer.momentum: optimizer 'adam' takes no 'momentum', which is an option of muon, rmsprop, sgd.",
            "--config.compression.samples: compression 'int8' takes no 'samples', which is an option of topk.",
        ),
    ),
    Row(
        ("train", "--config=null.py"),
        ("backup.dir must be a folder, and a path has no null",),
    ),
    Row(
        (*TRAIN[:2], "--workdir=.", "--config.strategy.name=multi_worker_mirrored", "--config.cluster.workers=2"),
        ("'logs' must be a folder for the tasks' output, and is a file",),
    ),
]

WORKERS = "strategy.name=multi_worker_mirrored"
SERVERS = ("strategy.name=parameter_server", "cluster.ps=1")


def verify(flag: str, *words: str) -> Row:
    return Row(("verify", *flag.split(), "--", "true"), words)


def launch(flags: str, *words: str, code: int = 2) -> Row:
    return Row(("launch", "--log_dir=launched", *flags.split(), "--", "true"), words, code)


def emit(flag: str, *words: str, target: str = "trainjob") -> Row:
    return Row(("cluster", "emit", f"--target={target}", TRAIN[1], "--workdir=/mnt/work", flag), words)


ROWS += [
    train(WORKERS, "strategy.sync_every=", words=("strategy.sync_every must be a number of updates, or a list",)),
    train(WORKERS, "strategy.sync_every=-5", words=("strategy.sync_every must be a number of updates, or a list",)),
    train(WORKERS, "strategy.sync_every=5,5:0", words=("strategy.sync_every must be a number of updates, or a list",)),
    train(WORKERS, f"strategy.sync_every={10**30}", words=("strategy.sync_every must be a number of updates",)),
    train(*SERVERS, "strategy.sync_every=5", words=("strategy.sync_every is not possible with parameter_server",)),
    train("strategy.outer=sgd", words=("this is a group of fields; set one of them",)),
    train(WORKERS, "strategy.sync_every=5", "strategy.outer.momentum=nan", words=("outer.momentum must be 0 to 1",)),
    train(
        WORKERS, "strategy.sync_every=5", "strategy.outer.learning_rate=-1", words=("learning_rate must be 0 to 10",)
    ),
    train(WORKERS, "strategy.outer.beta=1", words=("unknown config field 'beta'. Known: learning_rate, momentum",)),
    train(*SERVERS, "strategy.shard_optimizer=1", words=("shard_optimizer is not possible with parameter_server",)),
    train(WORKERS, "strategy.shard_optimizer=2", words=("expected true or false. Received: '2'",)),
    train(WORKERS, "strategy.weights_dtype=bf16", words=("strategy.weights_dtype 'bf16'; did you mean 'bfloat16'?",)),
    train(*SERVERS, "strategy.max_staleness=-1", words=("strategy.max_staleness must be 0 to 10000",)),
    train("monitoring.tracker=mlflw", words=("unknown monitoring.tracker 'mlflw'; did you mean 'mlflow'?",)),
    train("monitoring.tracker=:", words=("tracker must be your own as 'package.module:Name'. Received: ':'",)),
    train("monitoring.tracker=x\x1b[31m:y", words=("Received: 'x\\x1b[31m:y'",)),
    train("cluster.ray=auto", *SERVERS, words=("cluster.ray is not possible with cluster.ps",)),
    emit("--name=A_B", "name must be lower-case letters, digits and '-', at most 42. Received: 'A_B'"),
    emit("--cpus=0", "cpus must be 1 to 10000. Received: 0"),
    emit("--memory=4G; rm", "memory must be a number with K, M, G or T, such as 4G. Received: '4G; rm'"),
    emit("--image=a\nb", "image must be such as registry.example/team/image:tag. Received: 'a\\nb'"),
    emit("--claim=/x", "claim must be lower-case letters, digits, '-' and '.'. Received: '/x'"),
    emit("--time=1:00", "--time has no meaning for --target=trainjob; leave it out."),
    emit("--notice=5", "--notice has no meaning for --target=kubernetes", target="kubernetes"),
    emit("--claim=x", "--claim has no meaning for --target=slurm", target="slurm"),
    emit("--config.cluster.ray=auto", "cluster.ray is not for a job, whose tasks the scheduler places"),
    launch("--ray --cpus_per_worker=nan", "cpus_per_worker must be 0 to 10000. Received: nan."),
    launch("--ray --gpus_per_worker=1e30", "gpus_per_worker must be 0 to 10000. Received: 1e+30."),
    launch("--cpus_per_worker=2", "--cpus_per_worker: only for a Ray cluster; add --ray, or leave it out."),
    launch("--ray --ps=1", "--ray and --ps exclude each other"),
    launch("--ray --join_seconds=1e30", "--join_seconds must be 0 to 1000000000. Received: 1e+30."),
    launch("--grace_seconds=1e300", "--grace_seconds must be 0 to 1000000000. Received: 1e+300."),
    launch("--ray=127.0.0.1:1", "no Ray cluster was found at 127.0.0.1:1", code=1),
    launch("--ray=a:b:c", "no Ray cluster was found at a:b:c", code=1),
    verify("--compression=nonsense", "unknown --compression 'nonsense'; did you mean 'none'?"),
    verify("--compression=int8 --ps=1", "--compression is not possible with --ps"),
    verify("--compression=no_such:X", "The module of compression 'no_such:X' cannot be found"),
    verify("--out=file", "--out must be a folder that can be written to. Received: 'file'"),
    verify("--seed=-1", "-1 is not an integer in the range [0, 2147483647]"),
    verify(f"--steps={10**30}", "is not an integer in the range [1, 2147483647]"),
    verify("--minutes=1e300", "--minutes must be 0 to 16666666. Received: 1e+300."),
    verify("--arms=E", "--arms must name some of A, B, C and D"),
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
    "null.py": "made.backup.dir = 'a\\0b'",
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


UNTRIED = ("muon_a", "muon_b", "muon_c", "gradient_accumulation_steps")  # the last delays updates


def ends(argument, field):
    """Returns the least and the most that the error of an argument names, without a 0 that turns it off."""
    (fault,) = field_faults(argument, -(10**9) if isinstance(field.default, int) else -1e9, field)
    least, off, most = re.search(r"must be (\S+)( \(off\))? to (\S+)\.", fault).groups()
    return [type(field.default)(float(end)) for end in ([most] if off else [least, most])]


@pytest.mark.parametrize("name", tiers.cases(optimizer_lib.OPTIMIZERS, quick=["adamw", "sgd"]))
def test_optimizers_train_to_finite_weights_at_the_ends_of_each_range(name):
    """Of the three coefficients of Muon, which are right together only, each is but a finite number."""
    kinds = {key.lower(): kind for key, kind in vars(keras.optimizers).items()}
    if name not in kinds:
        pytest.skip("this Keras does not have it")
    for argument, field in OptimizerConfig(name).option_fields().items():
        if type(field.default) not in (int, float) or argument in UNTRIED:
            continue
        for end in ends(argument, field):
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
