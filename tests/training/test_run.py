"""`tfdist.run`: a configuration's training as a call. Its docstring and docs/configuration.md train; here is what it refuses."""

import json

import pytest

import tfdist
from tfdist.config import ClusterConfig


def test_a_call_starts_no_tasks(tmp_path):
    with pytest.raises(tfdist.ConfigError, match=r"cluster.workers=2, .* start tasks with `tfdist train` only"):
        tfdist.run(
            tfdist.TrainConfig(
                cluster=ClusterConfig(workers=2),
                strategy=tfdist.StrategyConfig("multi_worker_mirrored"),
                global_batch_size=64,
            ),
            tmp_path,
        )


def test_all_errors_of_a_call_come_at_once(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 4, "epochs": 1}))
    with pytest.raises(tfdist.ConfigError) as raised:
        tfdist.run(tfdist.TrainConfig(epochs=0, global_batch_size=64, precision="float8"), tmp_path)
    finished, epochs, precision = raised.value.faults
    assert "holds a finished run" in finished and "epochs" in epochs and "precision" in precision
