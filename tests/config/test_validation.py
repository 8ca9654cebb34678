"""`check`: every fault that shows before TensorFlow is loaded; every file of configs/ and every preset passes."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.config.checking import faults, make
from tfdist import config
from tfdist.config import (
    BackupConfig,
    ClusterConfig,
    OptimizerConfig,
    StrategyConfig,
    TrainConfig,
    flags,
    train,
    validation,
)
from tfdist.config.presets import PRESETS, preset
from tfdist.errors import ConfigError
from tfdist.tasks import digits, synthetic

ROOT = pathlib.Path(__file__).parents[2]
NAN = float("nan")
SERVERS = {"cluster": ClusterConfig(workers=2, ps=1)}


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("name", [*sorted((ROOT / "configs").glob("[!_]*.py")), *PRESETS])
def test_every_file_in_configs_and_every_preset_passes(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    path = pathlib.Path(name)
    parsed, workdir = flags.parse(["train", f"--config={path}"], "")
    assert parsed.task in ("digits", "ratings", "synthetic")
    assert workdir == pathlib.Path("runs") / path.stem
    if path.stem in PRESETS:
        assert parsed == preset(path.stem), "a file to be copied is what its preset is"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"strategy": StrategyConfig("mirrored", devices="9" * 5000)}, "1 to 256 virtual CPUs"),
        ({"backup": BackupConfig("9" * 5000)}, "backup.save_freq must be 'epoch', 'never' or a number of steps"),
        ({"precision": "x" * 5000}, "unknown precision 'xxx"),
        (
            {"task_options": synthetic.Options()},
            "takes task_options of tfdist.tasks.digits.Options. Received: tfdist.tasks.synthetic.Options;",
        ),
        ({"epochs": "3"}, "config.epochs must be int. Received: '3'."),
        ({"epochs": True}, "config.epochs must be int. Received: True."),
        ({"epochs": 3.0}, "config.epochs must be int. Received: 3.0."),
        ({"epochs": Unshowable()}, "config.epochs must be int. Received: a value of type Unshowable."),
        ({"task": []}, "config.task must be str. Received: []."),
        ({"learning_rate": 10**400}, "config.learning_rate must be float. Received: 1000"),
        ({"learning_rate": "fast"}, "config.learning_rate must be float. Received: 'fast'."),
        ({"deterministic": 1}, "config.deterministic must be bool. Received: 1."),
        ({"optimizer": OptimizerConfig(name=3)}, "config.optimizer.name must be str. Received: 3."),
        ({"optimizer": OptimizerConfig("adadelta", rho="x")}, "optimizer.rho must be float. Received: 'x'."),
        ({"optimizer": None}, "config.optimizer must be OptimizerConfig. Received: None."),
        ({"strategy": "mirrored"}, "config.strategy must be StrategyConfig. Received: 'mirrored'."),
        ({"strategy": OptimizerConfig()}, "config.strategy must be StrategyConfig. Received: OptimizerConfig("),
        (
            {"task_options": digits.Options(filters="many")},
            "config.task_options.filters must be int. Received: 'many'.",
        ),
    ],
)
def test_a_value_of_another_type_is_one_sentence(fields, said):
    """Values that no flag gives; those of flags: test_sentences.py."""
    found = faults(make(**fields))
    assert len(found) == 1
    assert said in found[0] and len(found[0]) < 500


def test_every_fault_is_reported_at_once():
    checked = make(
        strategy=StrategyConfig("mirror"), optimizer=OptimizerConfig("sdg"), precision="half", epochs=0, seed=-1
    )
    checked.task_options.filters = 0
    assert len(faults(checked)) == 6
    checked = make(epochs="1", seed="2", strategy=StrategyConfig(name=3), precision="half", learning_rate=-1)
    assert len(faults(checked)) == 5, "what is of its type is judged beside what is not"
    checked = make(
        epochs="1",
        strategy=StrategyConfig("miror"),
        optimizer=OptimizerConfig("adm"),
        task="digts",
        task_options=digits.Options(),
        cluster=ClusterConfig(0),
        global_batch_size=0,
    )
    assert len(faults(checked)) == 6
    assert len(faults(make(strategy="mirrored", cluster=ClusterConfig(2)))) == 1
    checked = make(epochs="1", strategy=StrategyConfig("mirrored", devices=3))
    assert faults(checked)[1:] == ("global_batch_size 32 is not divisible by 3 replicas; use 30 or 33.",)


def test_an_attribute_that_is_no_field_is_a_misspelt_field():
    checked = make()
    checked.epoch = 3
    checked.optimizer.bta_1 = 0.9
    checked.task_options.filter = 3
    checked.strategy._memo = "is nobody's business"
    found = faults(checked)
    assert len(found) == 3
    assert found[0].startswith("config.epoch: unknown config field 'epoch'; did you mean 'epochs'? Known: task, ")
    assert found[1].startswith("config.task_options.filter: unknown config field 'filter'; did you mean 'filters'?")
    assert found[2].startswith("optimizer 'adam' takes no 'bta_1'; did you mean 'beta_1'?")


@pytest.mark.parametrize(
    ("batch", "strategy", "workers", "said"),
    [
        (32, StrategyConfig("mirrored", devices=3), 1, "32 is not divisible by 3 replicas; use 30 or 33."),
        (2, StrategyConfig("mirrored", devices=3), 1, "2 is not divisible by 3 replicas; use 3."),
        (
            9,
            StrategyConfig("central_storage", devices="CPU:0, CPU:1"),
            1,
            "9 is not divisible by 2 replicas; use 8 or 10.",
        ),
        (32, StrategyConfig("multi_worker_mirrored"), 5, "32 is not divisible by 5 replicas; use 30 or 35."),
        (
            33,
            StrategyConfig("multi_worker_mirrored", replicas=6),
            3,
            "33 is not divisible by 6 replicas; use 30 or 36.",
        ),
    ],
)
def test_a_batch_that_known_replicas_do_not_divide_names_the_nearest_that_they_do(batch, strategy, workers, said):
    checked = make(global_batch_size=batch, strategy=strategy, cluster=ClusterConfig(workers))
    assert faults(checked) == (f"global_batch_size {said}",)
    for better in said[:-1].partition("use ")[2].split(" or "):
        checked.global_batch_size = int(better)
        validation.check(checked)


def test_the_workers_of_the_environment_go_before_those_of_the_configuration():
    checked = make(global_batch_size=33, strategy=StrategyConfig("multi_worker_mirrored"), cluster=ClusterConfig(2))
    assert faults(checked) == ("global_batch_size 33 is not divisible by 2 replicas; use 32 or 34.",)
    validation.check(checked, workers=3)
    validation.check(checked, workers=0)
    with pytest.raises(ConfigError, match="33 is not divisible by 4 replicas; use 32 or 36"):
        validation.check(checked, workers=4)


def test_where_the_replicas_are_not_known_a_batch_is_not_judged():
    for strategy in (StrategyConfig("mirrored"), StrategyConfig("tpu"), StrategyConfig()):
        validation.check(make(global_batch_size=7, strategy=strategy))
    validation.check(
        make(global_batch_size=0, per_replica_batch_size=7, strategy=StrategyConfig("mirrored", devices=3))
    )


def test_whole_numbers_become_floats_where_floats_are_declared():
    made = make(learning_rate=1, grace_seconds=3, task_options=digits.Options(dropout=0), epochs=2)
    assert [type(made.learning_rate), type(made.grace_seconds), type(made.task_options.dropout)] == [float] * 3
    assert type(made.epochs) is int


def test_devices_are_a_number_a_text_or_a_list():
    assert StrategyConfig(devices=2).device_names == ["CPU:0", "CPU:1"]
    assert StrategyConfig(devices=["GPU:1", "GPU:3"]).device_names == ["GPU:1", "GPU:3"]
    assert StrategyConfig(devices="GPU:1, GPU:3,").device_names == ["GPU:1", "GPU:3"]
    assert StrategyConfig().device_names == StrategyConfig(devices=None).device_names == []
    assert [StrategyConfig(devices=d).virtual_cpus for d in (3, "3", "GPU:0", "")] == [3, 3, 0, 0]


@pytest.mark.parametrize(
    ("name", "workers", "gpus", "variable", "fields", "devices"),
    [
        ("multi_worker_mirrored", 2, 0, "", {"replicas": 4}, "2"),
        ("multi_worker_mirrored", 1, 0, "", {"replicas": 4}, "4"),
        ("multi_worker_mirrored", 4, 2, "", {"replicas": 4}, "GPU:0"),
        ("multi_worker_mirrored", 2, 2, "", {"replicas": 4}, "GPU:0,GPU:1"),
        ("mirrored", 2, 0, "", {"replicas": 4}, "4"),
        ("multi_worker_mirrored", 2, 0, "4", {}, "2"),
        ("multi_worker_mirrored", 2, 0, "4", {"replicas": 2}, "1"),
        ("multi_worker_mirrored", 2, 0, "4", {"devices": "3"}, "3"),
        ("multi_worker_mirrored", 2, 1, "4", {}, ""),
        ("multi_worker_mirrored", 2, 0, "0", {}, ""),
        ("one_device", 1, 0, "4", {}, ""),
    ],
)
def test_replicas_are_shared_by_the_workers(monkeypatch, name, workers, gpus, variable, fields, devices):
    monkeypatch.setenv("TFDIST_REPLICAS", variable)
    placed = StrategyConfig(name, **fields).on_workers(workers, gpus)
    assert (placed.devices, placed.replicas) == (devices, 0)


@pytest.mark.parametrize(
    ("workers", "gpus", "variable", "replicas", "said"),
    [
        (3, 0, "4", 0, "TFDIST_REPLICAS=4 is not divisible by 3 workers; use 1, 2 or 4 workers, or a multiple of"),
        (2, 0, "four", 0, "the environment variable TFDIST_REPLICAS must be 0 (off) to 2560000. Received: 'four'."),
        (2, 1, "", 4, "=4 needs 2 GPUs of each worker, and this process has 1; use 4 workers, or at most 2 replicas."),
        (1, 0, "9" * 5000, 0, "the environment variable TFDIST_REPLICAS must be"),
    ],
)
def test_replicas_that_workers_cannot_share(monkeypatch, workers, gpus, variable, replicas, said):
    monkeypatch.setenv("TFDIST_REPLICAS", variable)
    with pytest.raises(ConfigError) as raised:
        StrategyConfig("multi_worker_mirrored", replicas=replicas).on_workers(workers, gpus)
    assert said in str(raised.value)


def test_to_dict_is_plain():
    plain = train.to_dict(make(strategy=StrategyConfig("mirrored", devices=2)))
    assert plain["strategy"]["devices"] == "2"
    assert plain["task_options"] == {"filters": 32, "dropout": 0.3, "label_smoothing": 0.0}


def test_central_storage_says_all_that_it_cannot():
    config = TrainConfig(strategy=StrategyConfig("central_storage"), global_batch_size=8)
    config.jit_compile, config.precision, config.optimizer.use_ema = True, "mixed_float16", True
    with pytest.raises(ConfigError) as raised:
        validation.check(config)
    assert [fault.partition(" is not possible with central_storage")[0] for fault in raised.value.faults] == [
        "jit_compile",
        "precision mixed_float16",
        "optimizer.use_ema",
    ]


def test_a_field_that_a_subclass_adds_is_not_fixed():
    @dataclasses.dataclass
    class Later(config.StrategyConfig):
        patience: float = 3.0

    assert train.fixed(config.TrainConfig(strategy=Later(patience=4.0))) == train.fixed(config.TrainConfig())


VALUES = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=300), st.lists(st.integers(), max_size=2)
)


GROUPS = (
    "optimizer",
    "schedule",
    "strategy",
    "backup",
    "monitoring",
    "compression",
    "cluster",
    "task_options",
)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_any_value_of_any_field_is_taken_or_answered_with_printable_sentences(data):
    checked = make(steps_per_epoch=2)
    group = data.draw(st.sampled_from(("", *GROUPS)))
    holder = getattr(checked, group) if group else checked
    names = [field.name for field in dataclasses.fields(holder) if field.name not in GROUPS]
    if group in ("optimizer", "compression") and data.draw(st.booleans()):
        holder.name = data.draw(st.sampled_from(sorted(holder.BUILT_IN)))
        names = [*holder.option_fields(), "misspelt"]
    setattr(holder, data.draw(st.sampled_from(names)), data.draw(VALUES))
    try:
        validation.check(checked)
    except ConfigError as e:
        assert all(fault.isprintable() and len(fault) < 1500 for fault in e.faults)
