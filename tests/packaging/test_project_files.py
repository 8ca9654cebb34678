"""What stands beside the package: the workflows, the changelog and how to cite."""

from __future__ import annotations

import pathlib
import re

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_only_call_make(path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        matrix = job["strategy"]["matrix"]
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands and not [command for command in commands if not re.match(r"(sudo )?make ", command)]
        named = {command.split("make ")[1].split()[0] for command in commands}
        assert (named - {"${{"}) | set(matrix.get("target", ())) <= targets


def test_the_workflows_run_every_tier():
    text = "".join(path.read_text() for path in WORKFLOWS)
    assert "[test, test-all, docs]" in text and "slice: [1, 2, 3, 4, 5, 6, 7, 8]" in text


def test_the_changelog_is_kept_as_it_says():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^##+ .*", text, re.MULTILINE) == ["## [Unreleased]", "### Added", "### Changed", "### Removed"]
    assert len(text.splitlines()) <= 100, "one version, described by what it has"


def test_the_citation_has_what_its_format_requires():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert 'license = "' + cited["license"] in (ROOT / "pyproject.toml").read_text()
