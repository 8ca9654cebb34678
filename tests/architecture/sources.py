"""The modules of tfdist as text and as syntax trees, read once for all rules of this folder."""

from __future__ import annotations

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "tfdist"


def _modules() -> dict[str, pathlib.Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = _modules()


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    """Parses a file; the tree is shared, so that no rule may change it."""
    return ast.parse(path.read_text())


def name(path: pathlib.Path) -> str:
    """Returns a file's path from the root of the project, as failures show it."""
    return str(path.relative_to(ROOT))
