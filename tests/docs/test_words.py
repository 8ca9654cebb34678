"""How plainly the package and its pages are written: ceilings that may only fall, and phrases that must not come back."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.architecture.sources import MODULES, tree
from tests.docs.pages import PAGES

WH = re.compile(
    r"(what|which|where|whether|when|who|whose|whom|how|why|(by|of|to|as) what|(by|of) which|that which|those)\b", re.I
)
WHAT = re.compile(r"\bwhat(ever)?\b", re.I)
# Phrases of a translation, with plain words.
PHRASES = {
    r"\bone's own\b": "custom, your own",
    r"\bof one's own\b": "custom, your own",
    r"\bbut for (?!the)": "except",
    r"\bfor ever\b": "forever, without limit",
    r"\bamid\b": "during",
    r"\bas ever\b": "as usual",
    r"\bsays so\b": "warns, raises an error",
    r"\bby gRPC\b": "over gRPC",
    r"\bbegins? anew\b": "starts again",
    r"\bgo(es|ing)? on from\b": "continues, resumes from",
    r"\bhears?\b": "receives, reads",
    r"\bjudges?\b": "validates, checks",
    r"\bwhat it is for\b": "its purpose",
    r"\ba fault\b": "an error, a problem",
    r"\banew\b": "again",
    r"\blikewise\b": "also, in the same way",
}
# Per cent of docstrings that begin with a wh-word, and "what" in 1,000 words. Lower them when they can be lowered.
CEILINGS = {"wh": 0.3, "docstrings": 0.4, "messages": 0.1, "pages": 0.2}


def docstrings(module: ast.Module) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in ast.walk(module) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def messages(module: ast.Module) -> list[str]:
    """Returns the texts that are raised or logged."""
    calls = [node.exc for node in ast.walk(module) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    calls += [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("info", "warning", "error", "warn", "log")
    ]
    parts = [[part.value for part in ast.walk(call) if isinstance(part, ast.Constant)] for call in calls]
    return [" ".join(part for part in texts if isinstance(part, str)) for texts in parts]


@functools.cache
def texts() -> dict[str, list[str]]:
    """Returns the texts of each kind. Not when pytest collects: each of its processes would read the whole package."""
    return {
        "docstrings": [text for path in MODULES.values() for text in docstrings(tree(path))],
        "messages": [text for path in MODULES.values() for text in messages(tree(path)) if len(text) > 20],
        "pages": [re.sub(r"```.*?```", "", text, flags=re.S) for page, text in PAGES.items() if page != "CHANGELOG.md"],
    }


def per_thousand(found: list[str]) -> float:
    return 1000 * sum(len(WHAT.findall(text)) for text in found) / sum(len(text.split()) for text in found)


def test_docstrings_begin_with_a_verb_or_a_noun():
    every = texts()["docstrings"]
    faulty = [text.splitlines()[0] for text in every if WH.match(text)]
    assert 100 * len(faulty) / len(every) <= CEILINGS["wh"], "\n".join(faulty)


@pytest.mark.parametrize("kind", ["docstrings", "messages", "pages"])
def test_nouns_of_the_field_stand_where_what_could(kind):
    of_kind = texts()[kind]
    assert per_thousand(of_kind) <= CEILINGS[kind], "\n".join(
        line for text in of_kind for line in text.splitlines() if WHAT.search(line)
    )


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_phrase_of_a_translation_comes_back(phrase):
    every = [text for of_kind in texts().values() for text in of_kind]
    found = [line for text in every for line in text.splitlines() if re.search(phrase, line)]
    assert not found, "\n".join([f"write {PHRASES[phrase]}:", *found])
