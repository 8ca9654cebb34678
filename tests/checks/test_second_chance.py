"""Up to three failed tests run again, alone; what passes then is reported as unstable, and does not fail the run."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.helpers import tiers

ROOT = pathlib.Path(__file__).parents[2]
# The runs in these tests, and those that they start, load no plugin but xdist: a third of a second in place of one.
LEAN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin"}
UNSTABLE = """
import pathlib
def test_unstable_{number}():
    file = pathlib.Path(__file__).with_name("ran-{number}")
    if not file.exists():
        file.touch()
        raise AssertionError("one\\ntwo {number}")
"""
STEADY = "\ndef test_steady():\n    pass\n"
BROKEN = "\ndef test_broken():\n    assert False\n"
UNSTABLE_FIXTURE = """
import pathlib, pytest
@pytest.fixture
def folder():
    file = pathlib.Path(__file__).with_name("ran")
    if not file.exists():
        file.touch()
        raise OSError("no folder")
def test_with_folder(folder):
    pass
"""


def unstable(count):
    return "".join(UNSTABLE.format(number=number) for number in range(count))


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs a test file; it returns what ended and was shown."""

    def run(source, *arguments):
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        (tmp_path / "test_file.py").write_text(source)
        command = [sys.executable, "-m", "pytest", "-p", "tests.helpers.second_chance", *arguments]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **LEAN}
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)

    return run


@pytest.mark.parametrize("processes", tiers.cases([0, 2], quick=[2]))
def test_three_unstable_tests_pass_and_are_reported(run, tmp_path, processes):
    done = run(STEADY + unstable(2) + UNSTABLE_FIXTURE, "--second-chance", f"--numprocesses={processes}")
    assert done.returncode == 0, done.stdout
    lines = [f"unstable: test_file.py::test_unstable_{number}: two {number}" for number in range(2)]
    lines.insert(0, "unstable: test_file.py::test_with_folder: OSError: no folder")
    assert set(lines) <= set(done.stdout.splitlines())
    assert sorted((tmp_path / "build/unstable.txt").read_text().splitlines()) == sorted(lines)
    assert "1 passed, 3 unstable" in done.stdout.splitlines()[-1]
    assert "AssertionError: one" in done.stdout  # the first failure is shown whole


@pytest.mark.parametrize(
    ("source", "arguments"),
    tiers.cases(
        [
            (unstable(4), ["--second-chance"]),
            (BROKEN + unstable(1), ["--second-chance"]),
            (BROKEN, ["--second-chance", "--numprocesses=2"]),
            (unstable(1), []),
            (unstable(1) + STEADY, ["--second-chance", "--exitfirst"]),  # not all have run
        ],
        quick=2,
    ),
    ids=["four", "a broken one among them", "a broken one", "not asked for", "stopped"],
)
def test_a_run_fails(run, tmp_path, source, arguments):
    assert run(source, *arguments).returncode in (1, 2)
    assert not (tmp_path / "build").exists()


def test_a_test_that_ends_its_process_fails_the_run(run):
    source = "import os\ndef test_ends():\n    os._exit(3)\n" + STEADY
    assert run(source, "--second-chance", "--numprocesses=1", "--max-worker-restart=0").returncode not in (0, None)
