"""`create_strategy`: options pass through, and mistakes and clusters that do not fit raise an error."""

import json
import re

import pytest
import tensorflow as tf

import tfdist
from tfdist import ClusterSpec, ConfigError, TaskSpec


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


def test_subclasses_keep_the_types_that_keras_looks_for(trainer):
    assert isinstance(trainer.strategy, tf.distribute.MirroredStrategy)
    assert isinstance(tfdist.create_strategy("one_device"), tf.distribute.OneDeviceStrategy)
    central = tfdist.create_strategy("central_storage", devices=2)
    assert isinstance(central, tf.distribute.experimental.CentralStorageStrategy)
    assert (trainer.num_replicas, central.num_replicas_in_sync) == (2, 2)


def test_devices_choose_by_number_name_and_list(trainer):
    for devices in (2, "2", "CPU:0,CPU:1", ["CPU:0", "CPU:1"]):
        strategy = tfdist.create_strategy("mirrored", devices=devices)
        assert [device[-5:] for device in strategy.extended.worker_devices] == ["CPU:0", "CPU:1"]
    one = tfdist.create_strategy("one_device", devices="CPU:1")
    assert one.extended.worker_devices[0].endswith("CPU:1")


def test_communication_options_pass_through(trainer):
    # Alone in its cluster, a multi-worker strategy needs no server.
    strategy = tfdist.create_strategy("multi_worker_mirrored", transport="grpc", bucket_bytes=1000, timeout_seconds=5)
    options = strategy.extended._communication_options
    assert (strategy.config.bucket_bytes, options.timeout_seconds) == (1000, 5)
    assert options.implementation == tf.distribute.experimental.CommunicationImplementation.RING


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["mirrord"], {}, "did you mean 'mirrored'?"),
        (["mirrored"], {"device": 2}, "did you mean 'devices'?"),
        (["multi_worker_mirrored"], {"transport": "grpcs"}, "did you mean 'grpc'?"),
        (
            ["mirrored"],
            {"transport": "mpi"},
            "strategy.transport=mpi is not possible with mirrored, because it is for multi_worker_mirrored",
        ),
        (["multi_worker_mirrored"], {"transport": "ucx"}, "Known: auto, grpc, mpi, nccl, shared_memory, tcp"),
        (["multi_worker_mirrored"], {"devices": "GPU:0"}, "strategy.devices names GPU:0, which is not there"),
        (["parameter_server"], {"devices": 2}, "CUDA_VISIBLE_DEVICES"),
        (
            ["mirrored"],
            {"devices": "GPU:9"},
            "strategy.devices names GPU:9, which is not there. This process has CPU:0, CPU:1.",
        ),
        (["one_device"], {"devices": "GPU:0"}, "strategy.devices names GPU:0, which is not there"),
        (["mirrored"], {"bucket_bytes": -1}, "must be 0 \\(off\\) to 1099511627776"),
        (["one_device"], {"devices": 2}, "use strategy.name=mirrored"),
        (
            ["mirrored"],
            {"devices": 3},
            r"test_create_strategy\.py:\d+: 3 virtual CPUs cannot be made",
        ),
    ],
)
def test_mistakes_are_answered(trainer, arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        tfdist.create_strategy(*arguments, **options)


def test_a_cluster_that_does_not_fit_is_refused(monkeypatch):
    jobs = {"worker": ["a:1", "b:1"]}
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": task}))
    with pytest.raises(ConfigError, match="is worker:0 of 2 training tasks"):
        tfdist.Trainer("mirrored", devices=2)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {**jobs, "chief": ["d:1"], "ps": ["c:1"]}, "task": task}))
    with pytest.raises(ConfigError, match="has no parameter servers"):
        tfdist.create_strategy("multi_worker_mirrored")
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": "evaluator", "index": 0}}))
    with pytest.raises(ConfigError, match="does not train"):
        tfdist.create_strategy("multi_worker_mirrored")


def test_tensorflow_in_use_before_a_multi_worker_strategy_is_named(monkeypatch):
    tf.constant(1)
    cluster = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(ConfigError, match=r"Create the strategy .* first"):
        tfdist.create_strategy("multi_worker_mirrored")


@pytest.mark.parametrize(
    ("jobs", "task", "sentence"),
    [
        (
            None,
            None,
            "parameter_server needs a cluster: start its tasks with a scheduler, with --hosts, with TF_CONFIG",
        ),
        (
            {"worker": ["h:1"]},
            ("worker", 0),
            "add addresses to job 'chief' and 'ps'. Received: worker (1). Under a scheduler, set",
        ),
        ({"chief": ["h:1"], "worker": ["h:2"]}, ("chief", 0), "job 'ps'. Received: chief (1), worker (1)."),
        (
            {"chief": ["h:1"], "worker": ["h:2"], "ps": ["h:3"]},
            ("evaluator", 0),
            "An evaluator does not train: use strategy one_device in its process.",
        ),
    ],
)
def test_parameter_servers_need_a_whole_cluster(monkeypatch, jobs, task, sentence):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    cluster = jobs and (ClusterSpec(jobs), TaskSpec(*task))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        tfdist.create_strategy("parameter_server", cluster)
