"""Options of compressors: the built-in ones', and those of a user's own, which a configuration names."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

from tests.helpers import tiers
from tfdist import ConfigError, Trainer, compression
from tfdist.config import COMPRESSORS, CompressionConfig, flags, train

OWN = "tests.compression.toy_compressor:Sign"


def parse(config, *arguments):
    """Returns the parsed `compression`; `.x=1` stands for `--config.compression.x=1`."""
    written = [f"--{'no' * (a[0] == '!')}config.compression{a.removeprefix('!')}" for a in arguments]
    return flags.parse(["train", f"--config={config}", *written], "")[0].compression


@pytest.mark.parametrize("name", COMPRESSORS)
def test_defaults_of_options_are_those_of_the_compressor(name):
    config = CompressionConfig(name)
    made = compression.create(CompressionConfig(name, **config.all_options()))
    assert made == compression.create(name)
    while hasattr(made, "compressor"):
        made = made.compressor
    if made:
        assert {k: v for k, v in config.all_options().items() if k in vars(made)} == vars(type(made)())


@pytest.mark.parametrize(
    ("config", "arguments", "made"),
    [
        ("digits_topk", [".compress_ratio=0.2"], "ErrorFeedback(TopK(compress_ratio=0.2))"),
        ("digits_topk", [".compress_ratio=0.3", ".compress_ratio=0.01"], "ErrorFeedback(TopK())"),
        ("digits_topk", ["!.use_error_feedback", ".samples=9"], "TopK(compress_ratio=0.1, samples=9)"),
        (
            "digits_powersgd",
            [".warm_start=false", ".start_powerSGD_iter=3"],
            "Warmup(ErrorFeedback(PowerSGD(warm_start=False)), steps=3)",
        ),
        ("digits_multi_worker", [f".name={OWN}"], "Sign()"),
        (
            "digits_multi_worker",
            [".scale=2", f".name={OWN}", "!.symmetric"],
            "scale=2.0, symmetric=False",
        ),
        (
            "digits_multi_worker",
            [f".name={OWN}", ".use_error_feedback", ".warmup_steps=5", ".width=32"],
            "Warmup(ErrorFeedback(Sign(width=32)), steps=5)",
        ),
    ],
)
def test_options_reach_the_compressor(config, arguments, made):
    assert made in compression.create(parse(config, *arguments)).description


def test_a_config_file_and_the_configuration_of_a_run_hold_options(tmp_path):
    (tmp_path / "own.py").write_text(
        "from tfdist import CompressionConfig, TrainConfig\n"
        "def get_config():\n"
        f"    how = CompressionConfig('{OWN}', scale=0.5, width=32)\n"
        "    return TrainConfig(compression=how, global_batch_size=8)\n"
    )
    argv = ["train", f"--config={tmp_path}/own.py", "--config.compression.scale=0.25"]
    config, _ = flags.parse(argv, "")
    assert config.compression == CompressionConfig(OWN, width=32, scale=0.25)
    (tmp_path / "config.json").write_text(json.dumps(train.to_dict(config)))
    assert flags.parse(["train", f"--config={tmp_path}/config.json"], "")[0] == config


def test_with_one_replica_it_is_said_once_that_nothing_is_compressed(capsys):
    trainer = Trainer("mirrored", devices="CPU:0", compression="int8")
    with trainer.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for _ in range(2):
        trainer.fit(model, np.ones((4, 2)), np.ones((4, 1)), batch_size=4, verbose=0)
    assert capsys.readouterr().out.count("compression has no effect: with one replica there is nothing to send") == 1


def test_the_trainer_takes_the_name_of_a_users_own_compressor():
    assert Trainer("mirrored", compression=OWN).compression.description == "Sign()"


@pytest.mark.parametrize(
    ("arguments", "faults"),
    tiers.cases(
        [
            (
                [f".name={OWN}", ".scal=1", ".width=x", ".block=8"],
                [
                    f"--config.compression.scal: compression '{OWN}' takes no 'scal'; did you mean 'scale'?",
                    "--config.compression.width: expected a whole number. Received: 'x'.",
                    f"--config.compression.block: compression '{OWN}' takes no 'block', which is an option of int8. It takes: use_error_",
                ],
            ),
            ([f".name={OWN}", ".scale=0"], ["compression.scale must be more than 0. Received: 0.0."]),
            (
                [f".name={OWN}", ".warmup_steps=-1"],
                ["compression.warmup_steps must be 0 to 2147483647."],
            ),
            ([".name=topk", ".samples=0"], ["compression.samples must be 1 to 2147483647."]),
            ([f".name={OWN}n"], ["Module 'tests.compression.toy_compressor' has no 'Signn'; did you mean 'Sign'?"]),
            (
                [".name=tests.compression.toy_compressor:tf"],
                ["compression 'tests.compression.toy_compressor:tf' is not a subclass"],
            ),
            (
                [".name=tfdist.compression:ErrorFeedback"],
                [
                    "compression 'tfdist.compression:ErrorFeedback' cannot be made: TypeError: ErrorFeedback.__init__() mis"
                ],
            ),
        ],
        quick=4,
    ),
)
def test_faults_of_options_are_found_with_the_others(arguments, faults):
    with pytest.raises(ConfigError) as raised:
        parse("digits_multi_worker", *arguments)
    assert [said.startswith(expected) for said, expected in zip(raised.value.faults, faults, strict=True)] == [
        True
    ] * len(faults), raised.value.faults


def test_an_option_that_is_not_plain_is_set_in_the_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_pair.py").write_text(
        "import dataclasses\nfrom tfdist.compression import NoCompression\n"
        "@dataclasses.dataclass(frozen=True)\nclass Pair(NoCompression):\n    sizes: tuple = (1, 2)\n    names: dict = None\n"
    )
    with pytest.raises(
        ConfigError, match=r"compression.names: a dict cannot be set on the command line; set it in the"
    ):
        parse("digits_multi_worker", ".name=own_pair:Pair", ".names=3")
    assert parse("digits_multi_worker", ".name=own_pair:Pair", ".sizes=3,x").sizes == (3, "x")
    made = compression.create(CompressionConfig("own_pair:Pair", sizes=(3, 4)))
    assert made.description == "Pair(sizes=(3, 4))"
