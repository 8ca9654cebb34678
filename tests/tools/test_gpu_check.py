"""`tools.gpu_check`: without GPUs each row has a verdict, by CPUs that stand in for them; a second call repeats no row."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

COMMAND = [sys.executable, "-m", "tools.gpu_check"]
GIVEN = {"cwd": ROOT, "env": {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, "text": True, "stdout": subprocess.PIPE}


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_each_row_has_a_verdict(tmp_path):
    out = tmp_path / "check.json"
    done = subprocess.run([*COMMAND, f"--out={out}"], timeout=1500, **GIVEN)
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([\d.]*) \| ([\d.]*) \| ([^|]*) \| (\d*) \|$", done.stdout, re.MULTILINE
    )
    verdicts = {row[0]: row[1] for row in rows}
    on_cpus = "spare: a worker is killed, on CPUs"
    expected = dict.fromkeys(verdicts, "ok, on CPUs") | {"mirrored, nccl": "needs 2 GPUs", on_cpus: "ok"}
    assert verdicts == expected and len(verdicts) == 19, done.stdout
    assert {row[0]: row[5] for row in rows if "killed" in row[0]} == {"backups: a worker is killed": "1", on_cpus: "1"}
    assert done.returncode == 0

    kept = json.loads(out.read_text())
    kept.pop("one device")
    out.write_text(json.dumps(kept))
    again = subprocess.run([*COMMAND, f"--out={out}"], timeout=300, stderr=subprocess.STDOUT, **GIVEN)
    assert re.findall(r"^(.*) \.\.\.$", again.stdout, re.MULTILINE) == ["one device"]
