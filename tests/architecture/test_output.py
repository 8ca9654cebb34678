"""Only commands print; what the library has to say goes to Python's logging, where a user can silence or redirect it."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "tfdist"
# The commands, what they show on request or at their end, and the one place through which all lines go.
PRINTING = {
    "commands/train.py",
    "commands/cluster.py",
    "commands/launch.py",
    "config/flags.py",
    "monitoring/summary_table.py",
}
PRINTING |= {"__main__.py", "commands/doctor.py", "commands/backup.py", "commands/new_task.py", "runtime/log.py"}
MODULES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def printing(source: str) -> Iterator[int]:
    """Yields the lines at which a module prints, or writes to a standard stream."""
    for node in ast.walk(ast.parse(source)):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called == "print" or called in ("sys.stdout.write", "sys.stderr.write"):
            yield node.lineno


@pytest.mark.parametrize("name", sorted(MODULES.keys() - PRINTING))
def test_the_library_does_not_print(name):
    found = [f"tfdist/{name}:{line}" for line in printing(MODULES[name])]
    assert not found, f"{found}: use tfdist.runtime.log.logger"


def test_the_search_for_prints_finds_them():
    assert list(printing("print(1)\nlogger.info(2)\nsys.stderr.write('3')\nfingerprint(4)\ndef f():\n    print()")) == [
        1,
        3,
        6,
    ]
    assert {"runtime/log.py", "config/flags.py"} <= {name for name in MODULES if any(printing(MODULES[name]))}
