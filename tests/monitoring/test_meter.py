"""What TensorBoard's meters measure, against plain arithmetic."""

from __future__ import annotations

import math
import re
import resource
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tfdist
from tests.helpers import tiers
from tests.monitoring.test_tensorboard import curves
from tfdist.compression import ErrorFeedback, Int8, PowerSGD, Warmup
from tfdist.errors import ConfigError
from tfdist.gradients.optimizer import get_reduction
from tfdist.monitoring import TensorBoard
from tfdist.monitoring.meter import SystemMeter
from tfdist.monitoring.side_summaries import histogram
from tfdist.runtime.report import progress

rng = np.random.default_rng(0)
X, Y = rng.standard_normal((16, 40), np.float32), rng.standard_normal((16, 30)).astype(np.float32)


def fit(trainer, folder, optimizer=lambda: keras.optimizers.SGD(0.1), epochs=2, **options):
    """Trains for 2 steps an epoch; returns the model, and the curves of its task without their steps."""
    keras.backend.clear_session()  # names as in a new process
    keras.utils.set_random_seed(1)
    with trainer.scope():
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(30)])
        model.compile(optimizer(), "mse")
    trainer.fit(
        model,
        X,
        Y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[TensorBoard(folder, 1, **options)],
    )
    found = curves(folder)["train"]
    return model, {tag: [value for _, value in values] for tag, values in found.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, mirrored):
    """Folder, model and curves of a training without compression, with all that is opt-in."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, *fit(tfdist.Trainer(mirrored), folder, epochs=4, gradient_norm=True, histogram_freq=2)


def test_the_system_is_measured_as_by_the_kernel(plain):
    *_, train = plain
    with open("/proc/self/status") as file:
        rss = 1024 * int(re.search(r"VmRSS:\s*(\d+) kB", file.read())[1])
    assert len(train["system/rss_bytes"]) == 8
    assert all(rss / 2 < value < rss * 2 for value in train["system/rss_bytes"])
    assert min(train["system/cpu_percent"]) > 0
    # Nothing is guessed: there are no supervisor, no compressor, no other process, no servers.
    groups = {tag.partition("/")[0] for tag in train if "/" in tag}
    assert groups == {"cluster", "perf", "system", "train"}


def test_processor_time_is_that_of_the_kernel():
    def used():
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime, time.monotonic()

    def around(call):
        before = used()
        return before, call(), used()

    meter, model = SystemMeter(), keras.Sequential()
    # Each of the meter's times lies between two of these, however long this process waits for a processor amid them.
    first, _, last = around(lambda: meter.begin(model, is_chief=True))
    for seconds in (0.001, 0.3):  # the first is shorter than a tick of the kernel
        while used()[1] < last[1] + seconds:
            pass
        before, values, after = around(meter.read)
        percent = values["system/cpu_percent"]
        least = 100 * (before[0] - last[0]) / (after[1] - first[1])
        most = 100 * (after[0] - first[0]) / (before[1] - last[1])
        assert percent > 0
        assert seconds == 0.001 or 0.95 * least < percent < 1.05 * most
        first, last = before, after


@pytest.mark.parametrize(
    ("compressor", "ratios"),
    tiers.cases(
        [
            # Numbers of 4 bytes; in blocks of 512, of a byte each and a scale of 4, for two ranks.
            (Warmup(ErrorFeedback(Int8()), 1), [1.0] + [4 * 1230 / (2 * math.ceil(1200 / 512) * 260 + 4 * 30)] * 3),
            (ErrorFeedback(PowerSGD(1)), [4 * 1230 / (4 * (40 + 30 + 30))] * 4),
            (Int8(), [4 * 1230 / (2 * math.ceil(1200 / 512) * 260 + 4 * 30)] * 4),
        ],
        quick=1,
    ),
)
def test_compression_is_measured(tmp_path, mirrored, compressor, ratios):
    model, train = fit(tfdist.Trainer(mirrored, compression=compressor), tmp_path)
    np.testing.assert_allclose(train["comm/compression_ratio"], ratios, rtol=1e-6)
    if isinstance(compressor, Int8):
        assert "comm/residual_norm" not in train
        return
    residual = get_reduction(model.optimizer).states[0][0]
    own = [each.numpy().ravel() for each in mirrored.experimental_local_results(residual)]
    assert len(own) == 2 and np.abs(own).min(0).any()
    norms = train["comm/residual_norm"]
    assert norms[-1] == pytest.approx(np.linalg.norm(np.concatenate(own)), rel=1e-5)
    assert (norms[0] == 0) == isinstance(compressor, Warmup)


def norms_by_hand(updates, batches=1, clip=math.inf):
    """Returns the norms of the gradients of linear regression by gradient descent, before they are clipped."""
    keras.utils.set_random_seed(1)
    layer = keras.layers.Dense(30)
    layer.build((None, 40))
    kernel, bias = (weight.astype(np.float64) for weight in layer.get_weights())
    found = []
    for number in range(updates):
        total = [np.zeros_like(kernel), np.zeros_like(bias)]
        for batch in range(batches):
            first = (number * batches + batch) * 8 % 16
            x, y = X[first : first + 8].astype(np.float64), Y[first : first + 8]
            error = 2 * (x @ kernel + bias - y) / y.size / batches
            total = [total[0] + x.T @ error, total[1] + error.sum(0)]
        found.append(math.sqrt(sum((each**2).sum() for each in total)))
        rate = 0.1 * min(1, clip / found[-1])
        kernel, bias = kernel - rate * total[0], bias - rate * total[1]
    return found


CLIP = 0.1
OPTIMIZERS = {
    "of one step": (lambda: keras.optimizers.SGD(0.1), 1),
    "accumulated": (lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), 2),
    "not clipped yet": (lambda: keras.optimizers.SGD(0.1, global_clipnorm=CLIP), 1),
    "unscaled": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), 1),
}


def test_the_gradients_norm_is_that_of_all_replicas(plain):
    *_, train = plain
    np.testing.assert_allclose(train["train/gradient_norm"], norms_by_hand(8), rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["mirrored", "one_device"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_norm_is_of_an_updates_whole_gradient(tmp_path, mirrored, strategy, name):
    make, batches = OPTIMIZERS[name]
    trainer = tfdist.Trainer(mirrored if strategy == "mirrored" else strategy)
    _, train = fit(trainer, tmp_path, make, gradient_norm=True)
    expected = norms_by_hand(4 // batches, batches, CLIP if "clipped" in name else math.inf)
    assert min(expected) > CLIP
    np.testing.assert_allclose(train["train/gradient_norm"][batches - 1 :: batches], expected, rtol=1e-4)


def histograms(folder):
    """Returns tag to step to `[buckets, 3]`, as TensorBoard reads them."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.endswith("/histogram")]
    assert all(events.SummaryMetadata(tag).plugin_data.plugin_name == "histograms" for tag in tags)
    return {tag: {e.step: tf.make_ndarray(e.tensor_proto) for e in events.Tensors(tag)} for tag in tags}


def test_histograms_of_weights_are_keras_own(tmp_path, plain):
    folder, own, _ = plain
    board = keras.callbacks.TensorBoard(tmp_path, histogram_freq=2)
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(30)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=[board])
    found, expected = histograms(folder / "train"), histograms(tmp_path / "train")
    if tuple(map(int, keras.__version__.split(".")[:2])) < (3, 15):  # which did not tell layers apart
        expected = {f"{weight.path}/histogram": expected[f"{weight.name}/histogram"] for weight in own.weights}
    assert found.keys() == expected.keys() == {weight.path + "/histogram" for weight in own.weights}
    for weight in own.weights:
        mine, theirs = (each[weight.path + "/histogram"] for each in (found, expected))
        assert mine.keys() == theirs.keys() == {0, 2}
        for step, buckets in mine.items():
            np.testing.assert_allclose(buckets[:, :2], theirs[step][:, :2], rtol=1e-4, atol=1e-6)
            assert np.abs(buckets[:, 2] - theirs[step][:, 2]).sum() <= 0.02 * buckets[:, 2].sum(), "rounding at edges"
            assert buckets[:, 2].sum() == weight.numpy().size


def test_a_histogram_counts_what_is_finite():
    values = np.array([0, 0.5, 1, 30, np.nan, np.inf])
    buckets = histogram(values)
    assert buckets.shape == (30, 3)
    assert [(left, right, n) for left, right, n in buckets if n] == [(0, 1, 2), (1, 2, 1), (29, 30, 1)]
    for same in ([2.0, 2.0], []):
        assert histogram(same)[:, 2].tolist() == [0] * 29 + [len(same)]


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "step"])
def test_a_wrong_frequency_is_refused(wrong):
    with pytest.raises(ConfigError, match="must be a number of steps from 1, 'batch' or 'epoch'"):
        TensorBoard("x", wrong)


@pytest.mark.parametrize("wrong", [-1, 1.5, True])
def test_a_wrong_histogram_frequency_is_refused(wrong):
    with pytest.raises(ConfigError, match="must be a number of epochs from 1, or 0 for none"):
        TensorBoard("x", histogram_freq=wrong)


def test_lost_steps_are_those_between_the_end_of_a_life_and_the_backup(tmp_path, monkeypatch):
    assert not progress.is_supervised() and progress.settle_lost_steps() is None
    monkeypatch.setenv(progress.FOLDER, str(tmp_path))
    progress.clear(tmp_path, 0)
    assert progress.is_supervised() and not progress.read_all(tmp_path)
    assert progress.settle_lost_steps() is None, "the training has not begun"
    # Where each life begins and ends, and the steps repeated until then. The second life has no step.
    lives = [(0, 13, 0), (7, 7, 13 - 7), (7, 10, 13 - 7), (7, 20, 13 - 7 + 10 - 7)]
    for number, (begin, end, lost) in enumerate(lives):
        progress.clear(tmp_path, number)
        monkeypatch.delenv(progress.FOLDER)
        progress.write()  # so that the record is opened again, as by another process
        monkeypatch.setenv(progress.FOLDER, str(tmp_path))
        progress.write(done=begin, saved=begin)
        if number != 1:
            assert progress.settle_lost_steps() == lost
            assert progress.settle_lost_steps() == lost
        progress.write(done=end)
    assert progress.restarts() == 3
