"""Only the table of config/strategy_traits.py knows which strategy is which: other files ask for its traits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.sources import MODULES, name, tree
from tfdist.config import STRATEGIES

CLASSES = re.compile(r"\w+Strategy(V1|V2|Extended)?|CollectiveAllReduce\w*")
ALL = {"Strategy", "KerasStrategy"}  # whether an object is a strategy at all, or tfdist's own


def decisions(module: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each comparison with a strategy's name, and of each test for its class."""
    for node in ast.walk(module):
        if isinstance(node, ast.Compare):
            sides = [inner for side in (node.left, *node.comparators) for inner in ast.walk(side)]
            is_decision = any(isinstance(side, ast.Constant) and side.value in STRATEGIES for side in sides)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            words = {word for argument in node.args[1:] for word in re.findall(r"\w+", ast.unparse(argument))}
            is_decision = any(CLASSES.fullmatch(word) for word in words - ALL)
        elif isinstance(node, ast.match_case):
            is_decision = any(
                isinstance(inner, ast.Constant) and inner.value in STRATEGIES for inner in ast.walk(node.pattern)
            )
        else:
            continue
        if is_decision:
            yield getattr(node, "lineno", 0), ast.unparse(node)


def test_no_file_asks_which_strategy_it_is():
    found = [f"{name(path)}:{line}: {text}" for path in MODULES.values() for line, text in decisions(tree(path))]
    assert not found, (
        "\n  ".join(found)
        + "\nAsk `strategy.traits` or `config.strategy.traits`; a new trait is a field of StrategyTraits."
    )


@pytest.mark.parametrize(
    "source",
    [
        "config.strategy.name == 'mirrored'",
        "strategy.kind in ('tpu', 'central_storage')",
        "'parameter_server' != summary['strategy']",
        "isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)",
        "isinstance(strategy, (int, tf.distribute.experimental.CentralStorageStrategy))",
        "issubclass(type(x), TPUStrategy)",
        "match name:\n    case 'one_device' | 'mirrored':\n        pass",
    ],
)
def test_the_search_finds_what_asks(source):
    assert len(list(decisions(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    "source",
    ["isinstance(strategy, tf.distribute.Strategy)", "isinstance(made, KerasStrategy)", "config.strategy.name = 'tpu'"],
)
def test_the_search_leaves_what_does_not(source):
    assert not list(decisions(ast.parse(source)))
