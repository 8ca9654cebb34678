"""`python -m tfdist.doctor` in real processes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.helpers import forked_commands
from tests.helpers.terminal import Terminal

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = ["-m", "tfdist.doctor"]
# Arguments, environment variables, exit code, and texts of the output.
ROWS = {
    "nothing is wrong": ([], {}, 0, ["ok       TensorFlow: 2.", "ok       cluster: none", "\nOK: 0 errors, "]),
    "broken TF_CONFIG": (
        [],
        {"TF_CONFIG": '{"cluster": 3}'},
        1,
        ["error    cluster: TF_CONFIG: 'cluster'", "error    cluster: TF_CONFIG: 'task'", "\nNOT OK: 2 errors, "],
    ),
    "temporary files": (
        [],
        {"TMPDIR": "file"},
        0,
        ["cannot be written: Not a directory -> free the disk, or set TMPDIR"],
    ),
    "another backend": (["--json"], {"KERAS_BACKEND": "jax"}, 1, ['"ok": false', '"what": "KERAS_BACKEND"']),
    "hidden Keras": ([], {}, 1, ["error    Keras: hidden by "]),
    "argument": (["fast"], {}, 2, []),
    "flag": (["--fast"], {}, 2, []),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns how each row's command ended, where loading TensorFlow would end it with code 99."""
    folder, hidden = tmp_path_factory.mktemp("doctor"), tmp_path_factory.mktemp("hidden")
    poison = tmp_path_factory.mktemp("poison")
    (folder / "file").touch()
    (hidden / "keras.py").touch()
    found = {}
    for where in (folder, hidden):
        names = [name for name in ROWS if (name == "hidden Keras") == (where == hidden)]
        commands = []
        for name in names:
            arguments, environ, *_ = ROWS[name]
            commands.append(([*COMMAND, "--no-devices", *arguments], {"KERAS_HOME": str(folder), **environ}))
        found |= zip(names, forked_commands.run_all(commands, where, poison), strict=True)
    return found


@pytest.mark.parametrize("name", ROWS)
def test_findings_and_exit_code(results, name):
    _, _, code, texts = ROWS[name]
    done = results[name]
    assert done.returncode == code, done.stdout + done.stderr
    assert not [text for text in texts if text not in done.stdout], done.stdout
    if code == 2:
        assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)
    else:
        assert done.stderr == ""


def test_in_a_terminal_there_is_a_table(tmp_path):
    terminal = Terminal(
        [sys.executable, *COMMAND, "--no-devices"], tmp_path, {"PYTHONPATH": str(ROOT), "KERAS_BACKEND": "jax"}
    )
    assert terminal.wait(60) == 1
    (row,) = [line for line in terminal.screen.lines if "KERAS_BACKEND" in line and "error" in line]
    assert [cell.strip() for cell in row.split("│")][1:4] == ["error", "KERAS_BACKEND", "jax"]
    assert any(line.startswith("NOT OK: ") for line in terminal.screen.lines)


def test_devices(tmp_path):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "TF_"))}
    environ |= {"PYTHONPATH": str(ROOT), "KERAS_HOME": str(tmp_path)}
    command = [sys.executable, *COMMAND]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "\nok       devices: CPU:0" in done.stdout
