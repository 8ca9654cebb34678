"""`tools.mutants`: which changes it draws, and whether it sees that tests fail, on a package of two functions."""

from __future__ import annotations

import json

import pytest

from tools import mutants

MODULE = '''"""A module."""
LIMIT = 10


def is_low(value: int = 3) -> bool:
    """Says 4 < 5."""
    if value < 0:
        raise ValueError(f"Received: {value + 1}")
    return value < LIMIT


def grow(values):
    values.append(len(values) + 1)
'''
# One function is tested, in a process that the test starts; the other is not. One test fails in any case.
TWO_FUNCTIONS = """
def is_low(value):
    return value < 10


def grow(values):
    values.append(1)
"""
TESTS = """
import subprocess, sys

def test_is_low():
    program = "from toy import module; print(module.is_low(9), module.is_low(10))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == ["True", "False"]

def test_fails_anyway():
    assert False
"""


@pytest.fixture
def toy(tmp_path):
    for folder in ("toy", "tests/toy"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "toy/__init__.py").touch()
    (tmp_path / "toy/module.py").write_text(MODULE)
    (tmp_path / "tests/toy/test_module.py").write_text(TESTS)
    return tmp_path


def changes(root):
    return {(row["before"], row["after"]) for row, _ in mutants.read(root, "toy").values()}


def test_mutants_change_what_a_module_does_and_not_what_it_says(toy):
    assert changes(toy) == {
        ("LIMIT = 10", "LIMIT = 11"),
        ("if value < 0:", "if value <= 0:"),
        ("if value < 0:", "if value < 1:"),
        ("if value < 0:", "if (not (value < 0)):"),
        ("return value < LIMIT", "return value <= LIMIT"),
        ("return value < LIMIT", "return None"),
        ("values.append(len(values) + 1)", "pass"),
        ("values.append(len(values) + 1)", "values.append(len(values) - 1)"),
        ("values.append(len(values) + 1)", "values.append(len(values) + 2)"),
    }


def test_a_mutant_differs_at_one_place(toy):
    source = mutants.Source(MODULE.encode())
    found = mutants.read(toy, "toy")
    _, edit = found["toy/module.py", "is_low", "return value < LIMIT", "return value <= LIMIT"]
    assert source.apply(edit).decode() == MODULE.replace("value < LIMIT", "value <= LIMIT")


def test_the_sample_is_that_of_its_seed_and_keeps_what_still_exists(toy):
    sample = mutants.draw(toy, "toy", 1, 3, [])
    assert sample == mutants.draw(toy, "toy", 1, 3, []) and len(sample) == 3
    assert any(mutants.draw(toy, "toy", seed, 3, []) != sample for seed in range(2, 9))
    table = [{**row, "killed": "a test"} for row in sample]
    # Lines move, one statement goes, and another mutant takes the place of the one that does nothing.
    (toy / "toy/module.py").write_text("import os\n" + MODULE.replace(f"{sample[0]['before']}\n", "pass\n"))
    table[1]["equivalent"] = "it does nothing"
    moved = mutants.draw(toy, "toy", 1, 2, table)
    assert [row["before"] for row in moved if "killed" in row] == [row["before"] for row in sample[1:]]
    assert moved[0]["line"] > 1 and len(moved) == 3


def test_a_killed_mutant_that_survives_later_is_an_error(toy, capsys):
    (toy / "toy/module.py").write_text(TWO_FUNCTIONS)
    arguments = ["--seed=1", "--count=2", f"--root={toy}", "--package=toy", "--limit=60"]
    assert mutants.main(arguments) == 0
    table = json.loads((toy / "tests/mutants.json").read_text())["mutants"]
    killed = {row["function"]: row["killed"] for row in table}
    assert killed == {"is_low": "tests/toy/test_module.py::test_is_low", "grow": None}
    assert (toy / "toy/module.py").read_text() == TWO_FUNCTIONS
    (toy / "tests/toy/test_module.py").write_text(TESTS.replace('== ["True", "False"]', ""))
    capsys.readouterr()
    assert mutants.main(arguments) == 1
    assert "1 survive that did not before" in capsys.readouterr().out
    table = json.loads((toy / "tests/mutants.json").read_text())["mutants"]
    assert killed == {row["function"]: row["killed"] for row in table}
