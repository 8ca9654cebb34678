"""What the package can say to a user: the sentences of its errors and warnings, and those that it logs, found in its source."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

PACKAGE = pathlib.Path(__file__).parents[2] / "tfdist"
ERRORS = {
    "ConfigError",
    "ClusterError",
    "BackupError",
    "CorruptBackupError",
    "UnreadableBackupError",
    "WriteError",
    "FloatingPointError",
}
SAYING = {*ERRORS, "FileExistsError", "TypeError", "ValueError", "RuntimeError", "already_started_error", "check"}
SAYING |= {"warn", "say", "info", "warning", "error", "log", "notify_once"}  # the last five: of a logger
# Functions that yield or return sentences which others raise or log.
_SENTENCES = re.compile(
    "fault|doubts|differences|sentence|message|hint|explain|obstacle|unreachable|cause$|failed$|unknown"
    "|_valid_arguments|_assign$|_field$|_unexpected_peer"
)
_WORDS = 9
_GAP = "\0"  # what is known when the message is made


class Message(NamedTuple):
    """A message: where it is made, and its text, with a gap for each value."""

    where: str
    text: str

    @property
    def beginning(self) -> str:
        """Its first words as a page shows them in a code span: "…" stands for a value."""
        shown = re.sub(rf"[{_GAP}…]+", "…", self.text).replace("`", "").replace("|", "/")
        return " ".join(shown.lstrip(" ;").split()[:_WORDS]).rstrip(" .,:;(")


@functools.cache
def trees() -> dict[pathlib.Path, ast.Module]:
    """Returns the package's files."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def constants() -> dict[str, ast.expr]:
    """Returns what names of whole modules stand for, where that is a text."""
    assigned = [node for tree in trees().values() for node in tree.body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: node.value for node in assigned if isinstance(node.targets[0], ast.Name)}


def texts(node: ast.expr | None, local: dict[str, ast.expr]) -> Iterator[str]:
    """Yields the texts that an expression can be, with gaps."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.sub(r"\{[^}]*\}", _GAP, node.value)  # of a text for `format`
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else _known(part, local) for part in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        lefts, rights = list(texts(node.left, local)) or [_GAP], list(texts(node.right, local)) or [_GAP]
        yield from (left + right for left in lefts for right in rights)
    elif isinstance(node, ast.IfExp):
        yield from (text for each in (node.body, node.orelse) for text in texts(each, local))
    elif isinstance(node, ast.BoolOp):
        yield from (text for each in node.values for text in texts(each, local))
    elif isinstance(node, (ast.List, ast.Tuple)):
        yield from (text for each in node.elts for text in texts(each, local))
    elif isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        yield from texts(node.elt, local)
    elif isinstance(node, ast.Starred):
        yield from texts(node.value, local)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        yield from texts(node.func.value, local)
    elif isinstance(node, ast.Attribute):
        yield from texts(constants().get(node.attr), {})
    elif isinstance(node, ast.Name) and (value := local.get(node.id, constants().get(node.id))):
        yield from texts(value, {name: value for name, value in local.items() if name != node.id})


def _known(part: ast.expr, local: dict[str, ast.expr]) -> str:
    value = part.value if isinstance(part, ast.FormattedValue) else part
    found = list(texts(value, local)) if isinstance(value, ast.Name) else []
    return found[0] if len(found) == 1 else _GAP


def messages() -> list[Message]:
    """Returns every message of the package once."""
    found: dict[str, Message] = {}
    for path, tree in trees().items():
        for line, text in _of_module(tree):
            if len(re.sub(r"[\W_]", "", text)) >= 7:  # letters; fewer are a value with brackets around it
                message = Message(f"{path.relative_to(PACKAGE.parent)}:{line}", text)
                found.setdefault(message.beginning, message)
    return list(found.values())


def beginnings(source: str) -> list[str]:
    """Returns the beginnings of a source's messages."""
    return [Message("", text).beginning for _, text in _of_module(ast.parse(source))]


def raised_without_text() -> Iterator[str]:
    """Yields the arguments of errors, as source, in which no text was found."""
    for tree in trees().values():
        for scope in ast.walk(tree):
            if isinstance(scope, (ast.FunctionDef, ast.Module)):
                for node in _own(scope):
                    called = isinstance(node, ast.Call) and ast.unparse(node.func) in ERRORS and node.args
                    if called and not any(texts(node.args[0], _locals(scope))):
                        yield ast.unparse(node.args[0])


def _of_module(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for scope in ast.walk(tree):
        if isinstance(scope, (ast.FunctionDef, ast.Module)):
            yield from _of_scope(scope)


def _of_scope(scope: ast.FunctionDef | ast.Module) -> Iterator[tuple[int, str]]:
    local = _locals(scope)
    for node in _own(scope):
        said: ast.expr | None = None
        if isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func).rpartition(".")[2]
            owner = ast.unparse(node.func).rpartition(".")[0]
            if name in SAYING or (name == "append" and owner == "faults"):
                said = ast.Tuple(node.args)
        elif isinstance(node, (ast.Yield, ast.Return)):
            said = node.value if _gives_sentences(scope) else None
        elif isinstance(node, (ast.AugAssign, ast.Assign)) and ast.unparse(node).startswith(
            ("faults =", "faults +=", "self._reasons[")
        ):
            said = node.value
        yield from ((node.lineno, text) for text in texts(said, local))


def _locals(scope: ast.FunctionDef | ast.Module) -> dict[str, ast.expr]:
    """Returns what a scope's names stand for: all that they are assigned."""
    found: dict[str, ast.List] = {}
    for node in sorted(_own(scope), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, (ast.Assign, ast.NamedExpr)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                found.setdefault(target.id, ast.List([])).elts.append(node.value)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            constant = isinstance(node.iter, ast.Tuple) and all(isinstance(each, ast.Name) for each in node.iter.elts)
            if constant:
                found.setdefault(node.target.id, ast.List([])).elts.append(node.iter)
    return dict(found)


def _gives_sentences(scope: ast.FunctionDef | ast.Module) -> bool:
    return isinstance(scope, ast.FunctionDef) and bool(_SENTENCES.search(scope.name))


def _own(scope: ast.FunctionDef | ast.Module) -> Iterator[ast.AST]:
    """Yields the nodes of a scope, without those of functions in it."""
    pending: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            pending += ast.iter_child_nodes(node)
