"""Only commands print; what the library has to say goes to Python's logging, where a user can silence or redirect it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.sources import MODULES, PACKAGE, name, tree

# The commands, what they show on request or at their end, and the one place through which all lines go.
PRINTING = {
    "commands/train.py",
    "commands/cluster.py",
    "commands/launch.py",
    "config/flags.py",
    "commands/summary_table.py",
}
PRINTING |= {
    "__main__.py",
    "commands/doctor.py",
    "commands/stacks.py",
    "commands/backup.py",
    "commands/new_task.py",
    "commands/presets.py",
    "runtime/log.py",
}


def printing(module: ast.Module) -> Iterator[int]:
    """Yields the lines at which a module prints, or writes to a standard stream."""
    for node in ast.walk(module):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called == "print" or called in ("sys.stdout.write", "sys.stderr.write"):
            yield node.lineno


def test_the_library_does_not_print():
    found = [
        f"{name(path)}:{line}"
        for path in MODULES.values()
        if str(path.relative_to(PACKAGE)) not in PRINTING
        for line in printing(tree(path))
    ]
    assert not found, f"{found}: use tfdist.runtime.log.logger"


def test_the_search_for_prints_finds_them():
    source = "print(1)\nlogger.info(2)\nsys.stderr.write('3')\nfingerprint(4)\ndef f():\n    print()"
    assert list(printing(ast.parse(source))) == [1, 3, 6]


def test_the_files_that_may_print_exist_and_some_do():
    assert all((PACKAGE / file).exists() for file in PRINTING)
    assert all(any(printing(tree(PACKAGE / file))) for file in ("runtime/log.py", "config/flags.py"))
