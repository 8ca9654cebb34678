"""The choice of the tests that go to the second tier."""

from tools import tiers

LINES = {
    "a.py::trains": {("step.py", n) for n in range(100)},
    "a.py::compares": {("step.py", 1)},
    "b.py::trains_alike": {("step.py", n) for n in range(98)},
    "b.py::has_a_part_for_itself": {("loop.py", n) for n in range(30)},
    "c.py::is_short": {("step.py", 1)},
}
SECONDS = {"a.py::trains": 20.0, "b.py::trains_alike": 30.0, "b.py::has_a_part_for_itself": 40.0, "c.py::is_short": 0.5}


def test_of_two_that_run_the_same_lines_the_longer_one_is_moved():
    groups = tiers.units(LINES, LINES, SECONDS)
    assert groups[0] == ["a.py::trains", "a.py::compares"]
    assert tiers.choose(groups, LINES, SECONDS, least=0.5) == ["b.py::trains_alike"]


def test_few_lines_are_not_worth_many_seconds():
    groups = tiers.units(LINES, LINES, SECONDS)
    moved = tiers.choose(groups, LINES, SECONDS, least=1.0)
    assert moved == ["b.py::has_a_part_for_itself", "b.py::trains_alike"]
    assert "c.py::is_short" not in tiers.choose(groups, LINES, SECONDS, least=1000.0)


def test_a_test_without_a_measured_line_stays():
    assert tiers.choose([["d.py::reads_pages"]], {}, {"d.py::reads_pages": 50.0}, least=1.0) == []
