"""Throughput, and what callbacks say of themselves."""

from __future__ import annotations

import json
import types

import keras
import pytest
import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.errors import ConfigError
from tfdist.monitoring import TensorBoard, network
from tfdist.monitoring.throughput import Throughput
from tfdist.training import callback_sync, checks


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def run_epoch(throughput, clock, seconds, epoch=0):
    throughput.on_epoch_begin(epoch)
    for batch, duration in enumerate(seconds):
        clock.now += duration
        throughput.on_train_batch_end(batch)


def test_before_the_second_step_nothing_is_measured(clock):
    throughput = Throughput(32, clock)
    nothing = {"mean": None, "median": None, "p95": None}
    assert (throughput.steps, throughput.examples_per_second, throughput.step_ms) == (0, None, nothing)
    run_epoch(throughput, clock, [60])
    assert (throughput.steps, throughput.examples_per_second, throughput.step_ms) == (1, None, nothing)


def test_the_first_step_which_compiles_is_left_out(clock):
    throughput = Throughput(32, clock)
    run_epoch(throughput, clock, [60, 0.5, 0.25, 0.25])
    assert throughput.step_seconds == [0.5, 0.25, 0.25]
    assert throughput.examples_per_second == 96
    assert throughput.steps == 4


def strategy(workers):
    spec = tf.train.ClusterSpec({"worker": [f"h:{port}" for port in range(1, workers + 1)]} if workers else {})
    return types.SimpleNamespace(cluster_resolver=tf.distribute.cluster_resolver.SimpleClusterResolver(spec))


def test_each_number_of_workers_has_the_step_at_which_it_began(clock):
    """A number without a step does not count, nor steps that are repeated."""
    state = None
    for workers, steps, saved, sizes in (
        (4, 5, 2, [(0, 4)]),
        (2, 0, None, [(0, 4)]),
        (2, 3, 3, [(0, 4), (2, 2)]),
        (2, 1, None, [(0, 4), (2, 2)]),
        (0, 1, 1, [(0, 4), (2, 2), (5, 1)]),
    ):
        throughput = Throughput(8, clock)
        throughput.set_model(types.SimpleNamespace(distribute_strategy=strategy(workers)))
        if state:
            throughput.load_state_dict(json.loads(state))
        for step in range(steps):
            run_epoch(throughput, clock, [1])
            state = json.dumps(throughput.state_dict()) if step + 1 == saved else state
        assert throughput.sizes == [{"step": step, "workers": number} for step, number in sizes]


def test_the_time_between_epochs_is_left_out(clock):
    throughput = Throughput(8, clock)
    run_epoch(throughput, clock, [60, 1])
    clock.now += 1000  # validation
    run_epoch(throughput, clock, [2, 1], epoch=1)
    assert throughput.step_seconds == [1, 2, 1]
    assert throughput.steps == 4


def test_steps_of_one_execution_share_its_time(clock):
    throughput = Throughput(8, clock)
    throughput.set_params({"steps": 10})
    for _ in range(2):
        throughput.on_epoch_begin(0)
        for last in (3, 7, 11):  # Keras does not say that the last execution has 2 steps
            clock.now += 4
            throughput.on_train_batch_end(last)
    assert throughput.steps == 20
    assert throughput.step_seconds == [1] * 4 + [2] * 2 + [1] * 8 + [2] * 2


def test_mean_median_and_95th_percentile_are_in_milliseconds(clock):
    throughput = Throughput(8, clock)
    run_epoch(throughput, clock, [60] + [step / 1000 for step in range(1, 102)])
    assert throughput.step_ms == {"mean": 51.0, "median": 51.0, "p95": 96.0}


def test_callbacks_that_only_observe_say_so():
    class Own(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    class Watching(Own):
        only_observes = True

    throughput = Throughput(8)
    cluster = ClusterSpec({"worker": ["a:1", "b:1"]})
    observers = [throughput, TensorBoard(), network.WireBytes(cluster, TaskSpec("worker", 0))]
    assert not any(map(callback_sync.acts_on_batches, [*observers, Watching()]))
    assert callback_sync.acts_on_batches(Own()), "what may read or change the model has the statistics of all replicas"


def test_a_writer_that_does_not_have_the_place_it_names_is_refused(tmp_path):
    class Own(keras.callbacks.Callback):
        writes = "path"

    own = Own()
    with pytest.raises(ConfigError, match=r"Own.writes must name the attribute .* 'path', which the callback does not"):
        checks.check_callbacks([own])
    own.path = tmp_path / "own.txt"
    checks.check_callbacks([own])
