"""`python -m tfdist.doctor` in real processes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.helpers import forked_commands

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
    "another backend": ([], {"KERAS_BACKEND": "jax"}, 1, ["error    KERAS_BACKEND: jax -> export"]),
    "argument": (["fast"], {}, 2, []),
    "flag": (["--fast"], {}, 2, []),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns how each row's command ended, where loading TensorFlow would end it with code 99."""
    folder, poison = tmp_path_factory.mktemp("doctor"), tmp_path_factory.mktemp("poison")
    commands = [([*COMMAND, "--no-devices", *arguments], environ) for arguments, environ, *_ in ROWS.values()]
    return dict(zip(ROWS, forked_commands.run_all(commands, folder, poison), strict=True))


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


def test_devices(tmp_path):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "TF_"))}
    environ |= {"PYTHONPATH": str(ROOT), "KERAS_HOME": str(tmp_path)}
    command = [sys.executable, *COMMAND]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "\nok       devices: CPU:0" in done.stdout
