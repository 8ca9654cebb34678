"""`tfdist train` in this process: what it refuses before it trains. Its training runs are in tests/end_to_end/test_train.py."""

import json

import pytest

from tfdist.commands import train
from tfdist.config import TrainConfig
from tfdist.errors import ConfigError
from tfdist.runtime.folders.workdir import Workdir
from tfdist.runtime.report import progress
from tfdist.training.finished_run import FinishedRun


@pytest.mark.parametrize("where", ["{0}/file", "{0}/file/below", "/proc/nowhere", "{0}/" + "x" * 300])
def test_a_work_directory_that_cannot_be_written_to_is_said(tmp_path, capsys, where):
    (tmp_path / "file").write_text("")
    assert train.main(["train", "--config=digits", f"--workdir={where.format(tmp_path)}"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("tfdist: workdir must be a folder that can be written to. Received: ") and said.count("\n") == 1
    )


FINISHED = {"training": "a", "steps": 6, "epochs": 2}


def of(training, step):
    return {"training": training, "position": {"step": step}}


@pytest.mark.parametrize(
    ("summary", "backups", "epochs", "keeps", "overwrite", "becomes"),
    [
        (None, {}, 2, False, False, "trained"),
        (FINISHED, {}, 2, False, False, "refused"),
        (FINISHED, {}, 3, False, False, "refused"),
        (FINISHED, {}, 2, False, True, "replaced"),
        ({}, {}, 2, False, False, "refused"),
        (FINISHED, {"step-6-end": of("a", 6)}, 2, False, False, "trained"),  # killed before it had removed them
        (FINISHED, {"step-6-end": of("a", 6)}, 2, False, True, "trained"),
        (
            FINISHED,
            {"step-3-end": of("b", 3)},
            2,
            False,
            False,
            "trained",
        ),  # of a run with --overwrite, which was killed
        (FINISHED, {"step-3-end": of("b", 3)}, 2, True, True, "trained"),
        (FINISHED, {"step-6-end": of("a", 6)}, 2, True, False, "refused"),
        (FINISHED, {"step-6-end": of("a", 6)}, 3, True, False, "trained"),  # more epochs
        (FINISHED, {"step-7": of("a", 7), "step-6-end": of("a", 6)}, 3, True, True, "trained"),
        (FINISHED, {"step-6-end": of("a", 6), "step-3-end": of("a", 3)}, 2, True, True, "replaced"),
    ],
)
def test_a_finished_run_is_replaced_only_with_overwrite(
    tmp_path, capsys, summary, backups, epochs, keeps, overwrite, becomes
):
    (tmp_path / "model.keras").write_text("old")
    if summary is not None:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
    for name, manifest in backups.items():
        (tmp_path / "backup" / name).mkdir(parents=True)
        (tmp_path / "backup" / name / "manifest.json").write_text(json.dumps(manifest))
    before = sorted(tmp_path.rglob("*"))
    config = TrainConfig(epochs=epochs)
    config.backup.delete_checkpoint = not keeps
    found = FinishedRun(config, Workdir(tmp_path), overwrite)
    if becomes == "refused":
        flags = [f"--config.epochs={epochs}", f"--config.backup.delete_checkpoint={not keeps}"]
        assert train.main(["train", "--config=digits", f"--workdir={tmp_path}", *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"tfdist: workdir '{tmp_path}' holds a finished run. Choose another --workdir; or ")
        assert "--overwrite" in line and "--config.epochs" in line
        assert ("initial_weights=" in line) == (not keeps), "there is a backup from which more epochs go on"
    else:
        found.check()
        found.replace()
        said = "holds a finished run; training again from the beginning. Its model.keras and summary.json stay until"
        assert (said in capsys.readouterr().out) == (becomes == "replaced")
    if becomes == "replaced":
        assert not [*tmp_path.glob("backup/step-*")] and (tmp_path / "model.keras").read_text() == "old"
    else:
        assert before == sorted(tmp_path.rglob("*")), "nothing was written"


def test_a_task_that_a_supervisor_starts_again_belongs_to_the_run_that_is_there(tmp_path, monkeypatch):
    (tmp_path / "summary.json").write_text(json.dumps(FINISHED))
    progress.write_restarts(tmp_path, 1)
    monkeypatch.setenv("TFDIST_PROGRESS", str(tmp_path))
    FinishedRun(TrainConfig(), Workdir(tmp_path), False).check()


def test_a_finished_run_whose_launcher_was_killed_before_it_removed_the_backups_is_not_trained_again(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(FINISHED))
    (tmp_path / "backup/step-6-end").mkdir(parents=True)
    (tmp_path / "backup/step-6-end/manifest.json").write_text(json.dumps(of("a", 6)))
    (tmp_path / "backup/finished").write_text("process 1 on another (1), begun at 1.0")
    with pytest.raises(ConfigError, match="holds a finished run"):
        FinishedRun(TrainConfig(epochs=2), Workdir(tmp_path), False).check()
