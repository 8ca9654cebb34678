"""The tables of calls side by side: what they name of tfdist and Keras exists, and takes those arguments."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfdist
from tests.docs.pages import PAGES, ROOT, commands
from tfdist.config import COMPRESSORS, STRATEGIES

TABLES = ("docs/migrate-from-horovod.md", "docs/migrate-from-tf_keras.md", "docs/from-accelerate.md")
OWNERS = {"tfdist": tfdist, "trainer": tfdist.Trainer, "model": keras.Model, "keras": keras, "tf": tf}
PROGRAMS = {"mpirun", "srun"}
FIELDS = {field.name for field in dataclasses.fields(tfdist.StrategyConfig)}
FIELDS |= {option for name in COMPRESSORS for option in tfdist.CompressionConfig(name).option_fields()}


def spans(page: str) -> list[str]:
    """Returns what the right side of a page's table has in code spans."""
    text = re.sub(r"\]\([^)]*\)", "]", PAGES[page])
    rows = [line.strip("| ").split(" | ", 1)[1] for line in text.splitlines() if line.startswith("| ")]
    found = [span for row in rows for span in re.findall(r"`([^`]+)`", row)]
    return [span for span in found if not span.startswith("--config.")]  # which test_pages.py looks up


def arguments(function: Any) -> set[str]:
    """Returns the names of a function's arguments, with those that its `**options` stand for."""
    names = set(inspect.signature(function).parameters)
    return names | FIELDS if function in (tfdist.Trainer, tfdist.create_strategy) else names


def find(node: ast.expr) -> Any:
    """Returns what an expression like `trainer.scope` stands for; None where it is a name of the reader's own."""
    owner, *path = ast.unparse(node).split(".")
    return functools.reduce(getattr, path, OWNERS[owner]) if owner in OWNERS else None


def check_code(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert find(node) is not None
        elif isinstance(node, ast.Call) and (function := find(node.func)):
            assert {keyword.arg for keyword in node.keywords} <= arguments(function), ast.unparse(node)
            texts = [each.value for each in node.args if isinstance(each, ast.Constant) and each.value is not ...]
            if function in (tfdist.Trainer, tfdist.create_strategy):
                assert set(texts) <= set(STRATEGIES)
            elif function is keras.mixed_precision.set_global_policy:
                assert keras.dtype_policies.get(*texts).name == texts[0]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):  # an argument of the Trainer's
            assert ast.unparse(node.targets[0]) in arguments(tfdist.Trainer)
        if isinstance(node, (ast.keyword, ast.Assign)) and "compression" in ast.unparse(node).split("=")[0]:
            assert ast.literal_eval(node.value) in COMPRESSORS


def is_known(word: str) -> bool:
    """Whether a word is a method of a model or its argument, a field, or a variable of the environment."""
    known = hasattr(keras.Model, word) or word in arguments(keras.Model.fit) | FIELDS | PROGRAMS
    return known or word == keras.backend.backend() or (word.isupper() and word in sources())


@functools.cache
def sources() -> str:
    return "".join(path.read_text() for path in (ROOT / "tfdist").rglob("*.py")) + inspect.getsource(keras.config)


@pytest.mark.parametrize(("page", "span"), [(page, span) for page in TABLES for span in dict.fromkeys(spans(page))])
def test_what_the_right_side_names_exists(page, span):
    if span.startswith("tfdist "):
        assert span in {command.text for command in commands()}  # which test_commands.py runs
    elif span.startswith("--"):
        assert f'"{span[2:]}"' in (ROOT / "tfdist/commands/launch.py").read_text()
    elif re.fullmatch(r"\w+", span):
        assert is_known(span), f"{page}: {span}"
    else:
        check_code(ast.parse(span + " pass" * span.endswith(":")))


@pytest.mark.parametrize(
    "wrong",
    [
        "trainer.size()",
        "tfdist.Strategy('mirrored')",
        "tfdist.Trainer(..., backups=dir)",
        "tfdist.create_strategy('ring')",
        "tfdist.Trainer(..., compression='fp17')",
        "compression='fp17'",
        "backups='x'",
        "model.train()",
        "keras.optimizers.SGD(..., clip=1)",
        "keras.mixed_precision.set_global_policy('float17')",
    ],
)
def test_what_does_not_exist_is_found(wrong):
    with pytest.raises((AssertionError, AttributeError, ValueError)):
        check_code(ast.parse(wrong))
    assert not is_known("horovodrun") and not is_known("HOROVOD_RANK")


def test_the_tables_are_read():
    assert {page: len(spans(page)) > 15 for page in TABLES} == dict.fromkeys(TABLES, True)
