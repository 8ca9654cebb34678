"""`tfdist verify` on scripts, in real processes: a right one is equal to the bit, and planted faults are found and named."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.helpers.launched_job import until

HEAD = """
import os, pathlib, sys
import keras, numpy as np, tensorflow as tf, tfdist
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.integers(-4, 5, (128, 4)).astype("float32")
y = rng.integers(-4, 5, (128, 1)).astype("float32")
trainer = tfdist.Trainer("multi_worker_mirrored")
"""
# The gradient does not depend on the weights, and is exact in float32: no order of a sum rounds it.
EXACT = """
with trainer.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.125), lambda y, p: y * p)
"""
OWN_STEP = """
class Model(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": loss}
with trainer.scope():
    model = Model([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01))
"""
FIT = "model.fit(x, y, batch_size=16, verbose=0)\n"
SCRIPTS = {
    # Takes arguments, reads a file beside it and writes one, trains twice, and ends by sys.exit.
    "right": HEAD
    + EXACT
    + """
assert sys.argv[1:] == ["--workers=5"]
assert pathlib.Path(__file__).with_name("kept").read_text() == "the user's"
model.fit(x, y, batch_size=16, epochs=1, verbose=0, steps_per_epoch=4)
model.fit(x, y, batch_size=16, epochs=9, verbose=0)
pathlib.Path("kept").write_text("the script's")
model.save("model.keras")
sys.exit(0)
""",
    "shard": HEAD
    + EXACT
    + """
def data(context):
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(context.get_per_replica_batch_size(16))
model.fit(data, steps_per_epoch=8, verbose=0)
""",
    "seed": HEAD
    + EXACT
    + """
def data(context):
    part = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(128, seed=context.input_pipeline_id).repeat()
    part = part.shard(context.num_input_pipelines, context.input_pipeline_id)
    return part.batch(context.get_per_replica_batch_size(16))
model.fit(data, steps_per_epoch=8, verbose=0)
""",
    "rate": HEAD
    + EXACT
    + """
class Rate(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if trainer.is_chief and batch == 2:
            self.model.optimizer.learning_rate = 0.5
model.fit(x, y, batch_size=16, verbose=0, callbacks=[Rate()])
""",
    "skips": HEAD
    + EXACT
    + """
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
if os.path.exists(os.environ["TFDIST_VERIFY"] + "/killed"):
    dataset = dataset.skip(1)
model.fit(dataset.repeat(), steps_per_epoch=8, verbose=0)
""",
    "unequal": HEAD
    + """
class Model(keras.Sequential):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {"error": tf.reduce_mean(tf.abs(y - y_pred))}
"""
    + EXACT.replace("keras.Sequential", "Model")
    + """
def data(context):
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16).repeat()
    if context.num_input_pipelines == 2:  # twelve examples of each batch, and four
        part = [slice(12), slice(12, 16)][context.input_pipeline_id]
        batches = batches.map(lambda x, y: (x[part], y[part]))
    return batches
model.fit(data, steps_per_epoch=8, verbose=0)
""",
    "half": HEAD + EXACT + "keras.config.set_dtype_policy('mixed_float16')\n" + FIT,
    "asks": HEAD + EXACT + "input()\n" + FIT,
    "batches": HEAD + EXACT + "for _ in range(8): model.train_on_batch(x[:16], y[:16])\n",
    "fails": HEAD + "raise RuntimeError('of the script')\n",
    "waits": HEAD + "print('waits', flush=True)\nimport time\nwhile True: time.sleep(0.05)\n",
}
for name, right, wrong in (
    ("divided", "** 2)", "** 2) / trainer.num_replicas"),
    ("summed", "reduce_mean", "reduce_sum"),
    ("clips", "apply(grads,", "apply(tf.clip_by_global_norm(grads, 0.1)[0],"),
    ("unreduced", "return", "self.weights[0].value.assign_sub(0.01 * grads[0])\n        return"),
):
    SCRIPTS[name] = HEAD + OWN_STEP.replace(right, wrong) + FIT


def start(name: str, folder: pathlib.Path, *flags: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPTS[name])
    (folder / "kept").write_text("the user's")
    command = [sys.executable, "-m", "tfdist", "verify", *flags, "--", sys.executable, "script.py", "--workers=5"]
    (folder / "temporary").mkdir(exist_ok=True)  # in the folder that is copied, too
    environ = {**os.environ, "TMPDIR": str(folder / "temporary")}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environ, **both)


def run(name: str, folder: pathlib.Path, *flags: str) -> tuple[int, dict, str]:
    process = start(name, folder, *flags)
    output, _ = process.communicate(timeout=280)
    path = folder / "verify.json"
    return process.returncode, json.loads(path.read_text()) if path.exists() else {}, output


def test_two_workers_are_one_device_bit_for_bit_and_resume_exactly(tmp_path):
    code, found, output = run("right", tmp_path, "--steps=10")
    line = "2 workers = 1 device, bit for bit, 10 updates; resume exact"
    assert (code, found["conclusion"]) == (0, line), output
    assert (tmp_path / "verify.md").read_text().rstrip().endswith(line)
    assert (tmp_path / "kept").read_text() == "the user's"
    names = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert names == {"script.py", "kept", "verify.json", "verify.md"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "arms", "check", "cause"),
    [
        ("divided", "A,C", "scale", "0.5 of one device's: the loss is divided twice"),
        ("summed", "A,C", "scale", "0.5 of one device's: the loss is divided twice, or is a sum"),
        ("shard", "A,C", "same examples", "worker-0 and worker-1 read the same ones"),
        ("seed", "A,C", "same examples", "with different seeds?"),
        ("rate", "A,C", "ranks agree", "the learning rate of worker-1 is 0.125, that of worker-0 0.5"),
        ("clips", "A,C", "scale", "does clipping, a loss or a gradient of your own use each replica's part"),
        ("unreduced", "A,C", "ranks agree", "Does the step apply a gradient that is not reduced?"),
        (
            "unequal",
            "A,C",
            "loss and metrics",
            "error is 2.5 in place of 2.75: is it averaged over replicas of unequal",
        ),
        ("half", "A,C", "precision used", "the policy is mixed_float16, and all layers compute in float32"),
        ("skips", "A,C,D", "resume exact", "other examples than without the kill"),
    ],
)
def test_a_planted_fault_is_found_and_named(name, arms, check, cause, tmp_path):
    code, found, output = run(name, tmp_path, "--steps=8", f"--arms={arms}")
    assert code == 1, output
    texts = {verdict["check"]: verdict["text"] for verdict in found["verdicts"] if verdict["status"] == "differs"}
    assert cause in texts[check], output


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "causes"),
    [
        ("fails", ("arm A (one device) ended with exit code 1", "RuntimeError: of the script")),
        ("asks", ("arm A (one device) ended with exit code 1", "EOFError: EOF when reading a line")),
        ("batches", ("arm A (one device) recorded no update: train by fit or trainer.step, not by train_on_batch",)),
    ],
)
def test_a_script_that_cannot_be_compared_did_not_run(name, causes, tmp_path):
    code, _, output = run(name, tmp_path, "--arms=A")
    assert code == 2
    for cause in causes:
        assert cause in output


@pytest.mark.full
def test_servers_are_named_as_a_known_difference(tmp_path):
    code, found, output = run("right", tmp_path, "--steps=4", "--ps=1", "--arms=A,C")
    assert code == 0, output
    assert "known difference" in {verdict["status"] for verdict in found["verdicts"]}


@pytest.mark.full
def test_ctrl_c_ends_the_arm_and_leaves_nothing(tmp_path):
    process = start("waits", tmp_path)
    try:
        until(lambda: any("waits" in path.read_text() for path in tmp_path.rglob("output")))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.communicate()
    assert not list(tmp_path.rglob("tfdist-*"))
    assert not list(tmp_path.glob("verify.*"))
