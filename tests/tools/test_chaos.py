"""`tools.chaos`: its events, and jobs that survive them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.multiprocess import harness
from tools import chaos

# A training of two workers that saves every step, and waits until all events have happened.
SCRIPT = """
import json, os, pathlib, time
from tfdist.runtime.report import progress
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}-{task['index']}"
saved = pathlib.Path(name)
for step in range(int(saved.read_text()) if saved.exists() else 0, 20):
    progress.write(done=step + 1, saved=step)
    while step == int(os.environ.get("HOLD_AT", -1)) and "continues" not in pathlib.Path("output").read_text():
        time.sleep(0.01)
    time.sleep(0.2)
    new = saved.with_suffix(".new")  # a kill must not leave an empty file
    new.write_text(str(step))
    new.rename(saved)
"""


@pytest.mark.parametrize(
    "text", ["", "kil:worker:1@3", "kill:worker:1", "kill:worker:1@-3", "stop:worker:0@200", "term:worker:0@200+10s"]
)
def test_an_invalid_event_is_rejected(text, capsys):
    assert chaos.main([text, "--", "true"]) == 2
    assert f"Received: {text!r}" in capsys.readouterr().err


def run(tmp_path, events, *words):
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "tfdist.launch", "--workers=2", *words, "--", sys.executable, "script.py"]
    command = [sys.executable, "-m", "tools.chaos", events, "--", *launch]
    with (tmp_path / "output").open("w") as output:
        done = subprocess.run(
            command,
            env={**harness.mpi_environ(""), "HOLD_AT": "12"},
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
    return done.returncode, (tmp_path / "output").read_text()


def test_each_event_happens_once(tmp_path):
    code, output = run(tmp_path, "kill:worker:1@5, stop:worker:0@9+1s, kill:worker:0@900", "--max_restarts=2")
    assert code == 0, output
    assert re.search(r"tfdist: worker:1 lost at step [4-7] \(killed by SIGKILL\); restart 1/2", output)
    assert output.count("restart ") == 1
    told = [line.partition(" at step")[0] for line in output.splitlines() if line.startswith("chaos: ")]
    assert told == [
        "chaos: kill:worker:1@5 happened",
        "chaos: stop:worker:0@9+1s happened",
        "chaos: worker:0 continues",
        "chaos: kill:worker:0@900 never happened",
    ]


def test_the_launcher_may_be_the_victim(tmp_path):
    code, output = run(tmp_path, "term:launcher@3")
    assert code == 143, output
    assert "tfdist: SIGTERM: ending all tasks" in output
