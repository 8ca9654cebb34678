"""The console script `tfdist`: what is different from `python -m`."""

from __future__ import annotations

import importlib
import os
import pathlib
import subprocess
import sys
import tomllib

from tfdist import __main__ as command
from tfdist.cluster import task_versions
from tfdist.commands import train as train_lib

SCRIPT = pathlib.Path(sys.executable).parent / "tfdist"
ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_the_console_script_is_the_command():
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["tfdist"]
    module, _, function = target.partition(":")
    assert getattr(importlib.import_module(module), function) is command.main


def test_modules_of_the_current_folder_are_found(tmp_path):
    (tmp_path / "mine.py").write_text("EPOCHS = -3\n")
    (tmp_path / "settings.py").write_text(
        "import mine\nimport tfdist\ndef get_config():\n    return tfdist.TrainConfig(epochs=mine.EPOCHS, global_batch_size=8)\n"
    )
    words = [SCRIPT, "train", "--config=settings.py"]
    done = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "tfdist: epochs must be 1 to 2147483647. Received: -3.\n")


def test_each_task_is_started_by_the_module_whatever_the_commands_name_is(monkeypatch, tmp_path):
    """The console script's path may not be on the hosts' or the tasks' PATH."""
    started = []

    class Launcher:
        def __init__(self, options, host):
            started.append(options.command)

        def run(self):
            return 7

    monkeypatch.setattr(train_lib, "Launcher", Launcher)
    monkeypatch.setattr(task_versions, "script", "")
    flags = ["--config=digits_multi_worker", f"--workdir={tmp_path}"]
    assert command.main(["/somewhere/tfdist", "train", *flags]) == 7
    assert started == [[sys.executable, "-m", "tfdist.train", *flags]]
    # Hosts whose scripts differ by the path of Python in their first line train the same.
    assert task_versions.own()["script"] == task_versions.checksum(pathlib.Path(train_lib.__file__).read_bytes())
