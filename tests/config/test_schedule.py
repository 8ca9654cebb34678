"""Faults of a schedule that show before TensorFlow is loaded."""

import pytest

from tfdist.config import ClusterConfig, ScheduleConfig, StrategyConfig, TrainConfig, validation
from tfdist.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "cosin"}, "unknown schedule.name 'cosin'; did you mean 'cosine'?"),
        (
            {"name": "step"},
            "schedule 'step' needs schedule.boundaries, such as 3000,6000 updates or 0.5,0.75 of the run.",
        ),
        ({"warmup_steps": -1}, "schedule.warmup_steps must be 0 (off) to 2147483647. Received: -1."),
        ({"warmup_epochs": float("nan")}, "schedule.warmup_epochs must be 0 (off) to 2147483647. Received: nan."),
        (
            {"warmup_steps": 1, "warmup_epochs": 1.0},
            "Only one of schedule.warmup_steps and schedule.warmup_epochs may be",
        ),
        ({"name": "cosine", "end": 2.0}, "schedule.end must be 0 to 1, a share of learning_rate. Received: 2.0."),
        ({"name": "polynomial", "power": 0.0}, "schedule.power must be 0.001 to 1000. Received: 0.0."),
        ({"end": 0.5}, "schedule 'constant' takes no 'end'. It takes: warmup_steps, warmup_epochs."),
        ({"name": "step", "boundaries": "4", "decay_steps": 3}, "schedule 'step' takes no 'decay_steps'. It takes:"),
        ({"name": "step", "boundaries": "x"}, "schedule.boundaries must be numbers, comma separated. Received: 'x'."),
        ({"name": "step", "boundaries": "nan"}, "schedule.boundaries must be"),
        ({"name": "step", "boundaries": "inf"}, "schedule.boundaries must be"),
        ({"name": "step", "boundaries": "6,3"}, "schedule.boundaries must be numbers above 0 that rise, either all"),
        ({"name": "step", "boundaries": "0.5,3"}, "schedule.boundaries must be numbers above 0 that rise, either all"),
        ({"name": "step", "boundaries": "1.5"}, "schedule.boundaries must be whole numbers, or shares below 1."),
        (
            {"name": "step", "boundaries": "3,6", "factor": "1,2,3"},
            "or one for each of schedule.boundaries (2). Received",
        ),
        (
            {"name": "step", "boundaries": "3", "factor": "-1"},
            "schedule.factor must be one number of 0 to 1000, or one",
        ),
    ],
)
def test_a_fault_of_a_schedule_is_one_sentence(fields, said):
    with pytest.raises(ConfigError) as caught:
        validation.check(TrainConfig(global_batch_size=8, schedule=ScheduleConfig(**fields)))
    (found,) = caught.value.faults
    assert said in found


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"learning_rate_scaling": "liner"}, "unknown learning_rate_scaling 'liner'; did you mean 'linear'?"),
        (
            {
                "learning_rate_scaling": "linear",
                "strategy": StrategyConfig("parameter_server"),
                "cluster": ClusterConfig(workers=2, ps=1),
            },
            "learning_rate_scaling 'linear' is not possible under parameter_server, where each step runs on one worker; use none.",
        ),
    ],
)
def test_how_the_rate_is_scaled_is_one_sentence(fields, said):
    with pytest.raises(ConfigError) as caught:
        validation.check(TrainConfig(global_batch_size=8, **fields))
    (found,) = caught.value.faults
    assert said in found
