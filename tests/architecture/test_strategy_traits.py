"""Only the table of config/strategy_traits.py knows which strategy is which, and `Strategy` declares what is set on one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.sources import MODULES, name, tree
from tfdist import create_strategy
from tfdist.config import STRATEGIES
from tfdist.strategy import Strategy

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
        "strategy.config.name in ('tpu', 'central_storage')",
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


# Where a strategy may be TensorFlow's own.
MAY_ASK = {"tfdist/strategy.py", "tfdist/config/strategy_traits.py", "tfdist/collectives/communicator.py"}
OF_TENSORFLOW = {"cluster_resolver"}


def declared() -> set[str]:
    """Returns the attributes and methods of `Strategy`."""
    return {*Strategy.__annotations__, *(each for each in vars(Strategy) if not each.startswith("_"))}


def loose_attributes(module: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of what `Strategy` does not declare: getattr and hasattr of a strategy, and other attributes set on one."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            attribute = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            is_loose = ast.unparse(node.args[0]).endswith("strategy") and attribute not in OF_TENSORFLOW
            is_loose = is_loose and isinstance(attribute, str)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_loose = ast.unparse(node.value).endswith("strategy") and node.attr not in declared()
        else:
            continue
        if is_loose:
            yield node.lineno, ast.unparse(node)


def test_strategy_declares_what_is_set_on_strategies():
    files = [path for path in MODULES.values() if name(path) not in MAY_ASK]
    found = [f"{name(path)}:{line}: {text}" for path in files for line, text in loose_attributes(tree(path))]
    assert not found, (
        "\n  ".join(found) + "\nDeclare it in tfdist/strategy.py; `as_ours` returns None for TensorFlow's own."
    )


@pytest.mark.parametrize(
    ("source", "is_loose"),
    [
        ("getattr(self._strategy, 'gauges', ())", True),
        ("hasattr(model.distribute_strategy, 'traits')", True),
        ("self._strategy.color = 1", True),
        ("strategy.flags, strategy.color = 1, 2", True),
        ("strategy.flags = None", False),
        ("config.strategy.name", False),
        ("getattr(model, 'distribute_strategy', None)", False),
    ],
)
def test_the_search_finds_loose_attributes(source, is_loose):
    assert bool(list(loose_attributes(ast.parse(source)))) == is_loose


def test_a_strategy_has_what_strategy_declares():
    strategy = create_strategy("one_device")
    assert not [each for each in sorted(declared()) if not hasattr(strategy, each)]
