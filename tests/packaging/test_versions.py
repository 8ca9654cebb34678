"""The range of versions stands in pyproject.toml; what warns of others and what tests its ends say the same."""

from __future__ import annotations

import pathlib
import re
import sys
import tomllib

import pytest
from packaging import requirements, version

from tfdist.strategies import startup
from tools import versions as tool

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = {each.name: each.specifier for each in map(requirements.Requirement, PROJECT["dependencies"])}


@pytest.mark.parametrize("name", ["tensorflow", "keras"])
def test_the_range_is_one(name):
    first, end = startup.TESTED_VERSIONS[name]
    assert str(DECLARED[name]) == f"<{end},>={first}"
    oldest, newest, following = (release(row, name) for row in ("oldest", "newest", "next"))
    assert oldest == first
    assert newest <= following
    major, minor = map(int, following.split("."))
    assert f"{major}.{minor + 1}" == end


def release(row: str, name: str) -> str:
    packages = [*tool.ROWS[row].packages, *tool.ROWS[row].alone]
    (found,) = filter(None, (re.match(rf"{name}(?:-nightly)?[=>]=(\d+\.\d+)", each) for each in packages))
    return found[1]


def test_pythons_are_those_that_are_declared():
    prefix = "Programming Language :: Python :: "
    declared = [each.removeprefix(prefix) for each in PROJECT["classifiers"] if each.startswith(prefix)]
    numbers = sorted(version.Version(each) for each in declared if each.count("."))
    assert [str(numbers[0]), str(numbers[-1])] == [tool.ROWS[row].pythons[0] for row in ("oldest", "next")]
    assert PROJECT["requires-python"] == f">={numbers[0]}"


def test_a_python_is_found_or_not():
    assert tool.find_python("{}.{}".format(*sys.version_info)) == sys.executable
    assert tool.find_python("3.99") is None
