"""TensorFlow's profiler on a range of steps: which steps a trace holds."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tests.helpers import tiers
from tests.multiprocess.models import line
from tfdist.errors import ConfigError
from tfdist.monitoring import TensorBoard

STEP = "/mse/Square:Square"  # each step computes one loss


def fit(folder, steps, epochs=2, execution=1):
    """Trains for 5 steps an epoch."""
    model, x, y = line(keras)
    model.steps_per_execution = execution
    model.fit(x, y, batch_size=10, epochs=epochs, verbose=0, callbacks=[TensorBoard(folder, profile_steps=steps)])


def traced_steps(folder):
    """Returns how many steps each trace below a folder holds."""
    found = []
    for file in folder.rglob("*.xplane.pb"):
        planes = xplane_pb2.XSpace.FromString(file.read_bytes()).planes
        names = [
            plane.event_metadata[e.metadata_id].name for plane in planes for row in plane.lines for e in row.events
        ]
        found.append(sum(name.endswith(STEP) for name in names))
    return found


@pytest.mark.parametrize(
    ("steps", "execution", "expected"),
    tiers.cases(
        [("4:7", 1, [4]), ("9:99", 1, [2]), ("11:12", 1, []), ("3", 1, [1]), ("7:7", 5, [5]), ("5:6", 5, [10])], quick=3
    ),
)
def test_a_trace_holds_the_steps_of_the_range(tmp_path, steps, execution, expected):
    fit(tmp_path, steps, execution=execution)
    assert traced_steps(tmp_path / "train" / "plugins" / "profile") == expected


def test_a_profiler_that_runs_already_costs_one_warning_and_the_profile(tmp_path, capsys):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        fit(tmp_path / "curves", "2:4")
    finally:
        tf.profiler.experimental.stop()
    rows = [row for row in capsys.readouterr().out.splitlines() if "TensorBoard" in row]
    assert len(rows) == 1 and "there is no profile of steps 2 to 4" in rows[0]
    assert traced_steps(tmp_path / "curves") == [] and traced_steps(tmp_path / "other") == [10]
    assert list((tmp_path / "curves" / "train").iterdir()), "the curves are there"


def test_a_profile_that_cannot_be_written_does_not_end_the_training(tmp_path, capsys):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "plugins").write_text("")
    fit(tmp_path, "2:4")
    rows = [row for row in capsys.readouterr().out.splitlines() if "TensorBoard" in row]
    assert len(rows) == 1 and "while the training goes on" in rows[0]
    fit(tmp_path / "next", "2:4")
    assert traced_steps(tmp_path / "next") == [3], "the profiler is free"


@pytest.mark.parametrize("wrong", ["0:3", "5:4", "3:", ":3", "1-3", (1, 3), "٣", "9" * 5000])
def test_a_wrong_range_is_refused(wrong):
    with pytest.raises(ConfigError, match="profile_steps of TensorBoard must be the first and the last step"):
        TensorBoard("x", profile_steps=wrong)
