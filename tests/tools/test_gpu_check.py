"""`tools.gpu_check`: on two virtual CPUs each row has a verdict; without GPUs it says so."""

import os
import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

COMMAND = [sys.executable, "-m", "tools.gpu_check"]
GIVEN = {"cwd": ROOT, "env": {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, "text": True, "stdout": subprocess.PIPE}


@pytest.mark.full
def test_without_gpus_it_says_so():
    done = subprocess.run(COMMAND, timeout=120, **GIVEN)
    assert done.returncode == 2
    assert re.fullmatch(
        r"TensorFlow sees fewer than two GPUs here \(.*\): run this on a machine with two\.\n", done.stdout
    )


@pytest.mark.slow
def test_each_row_has_a_verdict():
    done = subprocess.run([*COMMAND, "--devices=cpu"], timeout=1500, **GIVEN)
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([\d.]*) \| ([\d.]*) \| ([^|]*) \| (\d*) \|$", done.stdout, re.MULTILINE
    )
    verdicts = {row[0]: row[1] for row in rows}
    assert len(verdicts) == 12
    # TensorFlow's NCCL sums on GPUs only.
    assert {name for name in verdicts if verdicts[name] != "ok"} == {"mirrored, nccl"}, done.stdout
    assert "NcclAllReduce" in verdicts["mirrored, nccl"]
    assert {row[0]: row[5] for row in rows if "killed" in row[0]} == {
        "backups: a worker is killed": "1",
        "spare: a worker is killed, on CPUs": "1",
    }
    assert done.returncode == 1
