"""A table that is larger than each of its servers: the memory of all tasks, and the bytes of a step."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# A network of its own, where nothing else is sent.
ISOLATED = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_servers_hold_a_table_in_parts_and_a_step_sends_its_rows(tmp_path):
    if subprocess.run([*ISOLATED, "true"], capture_output=True).returncode:
        pytest.skip("a network of its own needs root")
    tfdist = pathlib.Path(sys.executable).with_name("tfdist")
    program = [sys.executable, str(ROOT / "tests/layers/servers_program.py")]
    launch = [*ISOLATED, str(tfdist), "launch", "--workers=1", "--ps=2", "--", *program]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(launch, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(re.search(r"\{.*\}", done.stdout)[0])
    # TensorFlow takes 350 MB of a process that is forked from the spare.
    for task, memory in found["memory"].items():
        assert memory < (700 if task.startswith("ps") else 500), found
    few, many = found["sent"].values()
    assert 1.9 < many / few < 2.1, found
    # A step has 64 x 64 ids, whose rows of 256 bytes come, and whose gradients go.
    assert few < 1.2 * 64 * 64 * 2 * 256, found
