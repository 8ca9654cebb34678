"""Every example runs as its text says."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "existing_script.py")


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.full)])
def test_existing_script(tmp_path, workers):
    command = [sys.executable, SCRIPT]
    if workers > 1:
        command = [sys.executable, "-m", "tfdist.launch", f"--workers={workers}", "--", *command]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"accuracy ([\d.]+) on (\d) replicas", done.stdout)
    assert len(found) == workers
    assert all(float(accuracy) > 0.9 and int(replicas) == workers for accuracy, replicas in found)
    assert (tmp_path / "circle.keras").exists()
