"""The picture of the packages in ARCHITECTURE.md shows the imports of the code, without those that follow from others."""

from __future__ import annotations

import re

from tests.architecture.sources import MODULES, ROOT
from tests.architecture.test_layers import imported, row

IMPORTED_EVERYWHERE = {"aliases", "errors", "version", "tfdist"}


def package_imports() -> dict[str, set[str]]:
    """Returns the packages that each package imports."""
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        package = row(module)[1]
        others = {row(name)[1] for name in imported(module) if name.split(".")[0] == "tfdist"}
        graph.setdefault(package, set()).update(others - {package} - IMPORTED_EVERYWHERE)
    return {package: others for package, others in graph.items() if package not in IMPORTED_EVERYWHERE}


def reachable(graph: dict[str, set[str]], package: str) -> set[str]:
    return graph.get(package, set()).union(*(reachable(graph, other) for other in graph.get(package, ())))


def without_implied(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Returns the arrows of an acyclic graph that do not follow from other arrows."""
    return {
        (package, other)
        for package, others in graph.items()
        for other in others
        if not any(other in reachable(graph, between) for between in others)
    }


def drawn(text: str) -> set[tuple[str, str]]:
    """Returns the arrows of a Mermaid flowchart."""
    chart = text.partition("```mermaid\n")[2].partition("```")[0]
    arrows = set()
    for line in chart.splitlines()[1:]:
        start, _, ends = line.partition("-->")
        arrows |= {(re.sub(r"\[.*\]", "", start).strip(), end.strip()) for end in ends.split("&")}
    return arrows


def test_the_picture_shows_the_imports():
    shown, expected = drawn((ROOT / "ARCHITECTURE.md").read_text()), without_implied(package_imports())
    assert shown == expected, f"draw {sorted(expected - shown)}; remove {sorted(shown - expected)}"


def test_an_arrow_that_follows_from_others_is_left_out():
    graph = {"a": {"b", "c"}, "b": {"c"}}
    assert without_implied(graph) == {("a", "b"), ("b", "c")}
    assert drawn("```mermaid\nflowchart TD\n    a[A file] --> b & c\n    b --> c\n```") == {
        ("a", "b"),
        ("a", "c"),
        ("b", "c"),
    }


def test_every_package_stands_in_the_table_of_rows():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    missing = [
        package for package in package_imports() if f"`{package.replace('.', '/')}" not in text.partition("| row |")[2]
    ]
    assert not missing
