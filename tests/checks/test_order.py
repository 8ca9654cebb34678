"""Test files run longest first; those that mostly wait run in processes kept for them."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.helpers import order

ROOT = pathlib.Path(__file__).parents[2]
LEAN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin --import-mode=importlib"}
# Each test notes the process that runs it.
SOURCE = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(3))
def test(number):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{os.environ['PYTEST_XDIST_WORKER']} {__file__}\\n")
"""


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs test files with xdist; it returns (worker process, file) of each test."""

    def run(files, processes, waiting):
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        for file in files:
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(SOURCE)
        options = [f"--numprocesses={processes}", f"--waiting-processes={waiting}", "--dist=loadfile"]
        command = [sys.executable, "-m", "pytest", "-p", "tests.helpers.order", "--no-loadscope-reorder", *options]
        notes = tmp_path / "notes"
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "NOTES": str(notes), **LEAN}
        environ.pop("PYTEST_XDIST_WORKER", None)
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout
        pairs = [line.split() for line in notes.read_text().splitlines()]
        return [(process, os.path.relpath(file, tmp_path)) for process, file in pairs]

    return run


COMPUTING = [f"tests/step/test_{number}.py" for number in range(3)]
WAITING = [f"tests/launch/test_{number}.py" for number in range(2)]


def test_files_that_wait_run_in_the_kept_processes(run):
    done = run(COMPUTING + WAITING, processes=3, waiting=1)
    assert sorted(file for _, file in done) == sorted(3 * (COMPUTING + WAITING)), "every test runs once"
    assert {process for process, file in done if file in COMPUTING} <= {"gw0", "gw1"}
    kept = {file for process, file in done if process == "gw2"}
    assert WAITING[0] in kept and kept <= set(WAITING)  # the others go to whoever is free first


@pytest.mark.full
@pytest.mark.parametrize(
    ("files", "processes", "waiting"),
    [(COMPUTING, 3, 2), (WAITING, 3, 1), (WAITING[:1] + COMPUTING[:1], 4, 2), (COMPUTING + WAITING, 2, 2)],
    ids=["none that wait", "none that compute", "fewer files than processes", "no process that computes"],
)
def test_every_test_runs_once(run, files, processes, waiting):
    assert sorted(file for _, file in run(files, processes, waiting)) == sorted(files * 3)


class Item:
    def __init__(self, nodeid):
        self.nodeid = nodeid


def test_the_longest_file_is_first_and_tests_of_a_file_stay_together(monkeypatch, tmp_path):
    durations = {"a.py::x": 1.0, "a.py::y": 5.0, "b.py::x": 4.0, "b.py::y": 4.0, "a.py::not_selected": 99.0}
    (tmp_path / "durations.json").write_text(json.dumps(durations))
    monkeypatch.setattr(order, "DURATIONS", tmp_path / "durations.json")
    items = [Item(nodeid) for nodeid in ("a.py::x", "a.py::y", "c.py::new", "b.py::y", "b.py::x")]
    order.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["b.py::y", "b.py::x", "a.py::x", "a.py::y", "c.py::new"]
