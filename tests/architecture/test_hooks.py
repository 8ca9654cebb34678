"""One module registers what runs at the end of a process and in a forked child."""

from __future__ import annotations

import ast

from tests.architecture.sources import MODULES, tree

OF_PYTHON = {"atexit", "register_at_fork"}


def test_one_module_registers_functions_for_the_end_and_for_forks():
    users = set()
    for module, path in MODULES.items():
        for node in ast.walk(tree(path)):
            names = {getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "module", None)}
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.name for alias in node.names}
            if names & OF_PYTHON:
                users.add(module)
    assert users == {"tfdist.runtime.end.hooks"}, "use hooks.at_end and hooks.in_child instead"
