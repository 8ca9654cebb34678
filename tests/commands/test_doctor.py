"""`python -m tfdist.doctor` in real processes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.helpers.terminal import Terminal
from tfdist.doctor.report import shorten

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tfdist.doctor"]


@pytest.fixture
def doctor(tmp_path):
    """Returns a function that runs the command in an empty folder; TensorFlow there would end the process that loads it."""
    poison = tmp_path / "poison"
    poison.mkdir()
    for name in ("tensorflow", "keras"):
        (poison / name).mkdir()
        (poison / name / "__init__.py").write_text("import os\nos._exit(99)\n")

    def run(*flags, poisoned=True, **environ):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "TF_"))}
        kept |= {"PYTHONPATH": f"{poison}:{ROOT}" if poisoned else str(ROOT), "KERAS_HOME": str(tmp_path), **environ}
        done = subprocess.run([*COMMAND, *flags], cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=180)
        assert "Traceback" not in done.stderr
        return done

    return run


def test_where_nothing_is_wrong(doctor):
    done = doctor("--no-devices")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "ok       TensorFlow: 2." in done.stdout
    assert "ok       cluster: none" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("OK: 0 errors, ")


def test_a_broken_tf_config(doctor):
    done = doctor("--no-devices", TF_CONFIG='{"cluster": 3}')
    assert done.returncode == 1
    errors = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert [line.split(" -> ")[0].split()[:4] for line in errors] == [
        ["error", "cluster:", "TF_CONFIG:", "'cluster'"],
        ["error", "cluster:", "TF_CONFIG:", "'task'"],
    ]
    assert done.stdout.splitlines()[-1].startswith("NOT OK: 2 errors, ")


def test_a_folder_of_temporary_files_that_cannot_be_written(doctor, tmp_path):
    (tmp_path / "file").touch()
    done = doctor("--no-devices", TMPDIR=str(tmp_path / "file"))
    assert done.returncode == 0
    assert "cannot be written: Not a directory -> free the disk, or set TMPDIR" in done.stdout


def test_another_backend_in_json(doctor):
    done = doctor("--no-devices", "--json", KERAS_BACKEND="jax")
    said = json.loads(done.stdout)
    assert (done.returncode, said["ok"]) == (1, False)
    assert [each["what"] for each in said["findings"] if each["level"] == "error"] == ["KERAS_BACKEND"]


def test_a_file_that_hides_keras(doctor, tmp_path):
    (tmp_path / "keras.py").touch()
    done = doctor("--no-devices")
    assert done.returncode == 1
    assert f"error    Keras: hidden by {shorten(str(tmp_path / 'keras.py'))}" in done.stdout


def test_in_a_terminal_there_is_a_table(tmp_path):
    terminal = Terminal([*COMMAND, "--no-devices"], tmp_path, {"PYTHONPATH": str(ROOT), "KERAS_BACKEND": "jax"})
    assert terminal.wait(60) == 1
    (row,) = [line for line in terminal.screen.lines if "KERAS_BACKEND" in line and "error" in line]
    assert [cell.strip() for cell in row.split("│")][1:4] == ["error", "KERAS_BACKEND", "jax"]
    assert any(line.startswith("NOT OK: ") for line in terminal.screen.lines)


@pytest.mark.parametrize("argument", ["fast", "--fast"])
def test_a_faulty_command_line(doctor, argument):
    done = doctor(argument)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_devices(doctor):
    done = doctor(poisoned=False)
    assert done.returncode == 0
    assert "\nok       devices: CPU:0" in done.stdout
