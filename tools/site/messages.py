"""The messages of the package, its errors, warnings and logs, found in its source; and the index of them in docs/messages.md.

`make docs` writes the index where the page has `MARK`. A message names its remedy itself, or the page has a row for it.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from tfdist.config.relations import RELATIONS

PACKAGE = pathlib.Path(__file__).parents[2] / "tfdist"
ERRORS = {
    "ConfigError",
    "ClusterError",
    "BackupError",
    "DataError",
    "CorruptBackupError",
    "UnfinishedBackupError",
    "UnreadableBackupError",
    "WriteError",
    "FloatingPointError",
}
SAYING = {
    *ERRORS,
    "FileExistsError",
    "TypeError",
    "ValueError",
    "RuntimeError",
    "already_started_error",
    "check",
    "Loss",
    "Verdict",
}
SAYING |= {"warn", "say", "info", "warning", "error", "log", "notify_once"}  # the last five: of a logger
# Functions that yield or return sentences which others raise or log.
_SENTENCES = re.compile(
    "fault|doubts|differences|sentence|message|hint|explain|obstacle|unreachable|cause$|failed$|unknown"
    "|_valid_arguments|_assign$|_field$|_unexpected_peer"
)
_WORDS = 9
_GAP = "\0"  # what is known when the message is made


# What names a remedy: an imperative at the beginning of a clause, what is expected, or a question that tells what to look at.
_VERBS = (
    "accumulate|add|apply|ask|assign|average|build|call|change|check|choose|compile|compute|correct|create|declare|divide|draw|end|"
    "evaluate|export|free|gather|give|have|increase|install|keep|leave|let|look|lower|make|mount|move|name|number|override|pad|pass|pip|"
    "put|raise|read|remove|rename|repeat|reserve|restore|return|run|save|see|set|shorten|start|stop|train|try|turn|uninstall|unset|use|"
    "wait|write"
)
_IMPERATIVE = re.compile(
    rf"(?:^|[.;:,{_GAP}] |\) |\b(?:and|or|then|either|are|else|save) )(?:(?:and|or|first|then|either|to [^,:;]+,|for [\w-]+ [\w-]+) )?"
    rf"(?:{_VERBS})\b",
    re.IGNORECASE,
)
_EXPECTED = re.compile(
    r"\b(?:must|expected|needs?|may be set|it takes|takes the|at most|Usage|Known|labels go from|It can)\b",
    re.IGNORECASE,
)
_QUESTION = re.compile(r"\b(?:Is|Are|Do|Does) [^?]+\?")

MARK = "<!-- make docs writes the index of all messages here -->\n"
# Parts of the index: the packages whose messages they have.
PARTS = {
    "Command line and configuration": (
        "config",
        "commands",
        "tasks",
        "errors",
        "doctor",
        "verify",
        "__main__",
        "train",
    ),
    "Launcher": ("launch", "ray", "runtime"),
    "Clusters": ("cluster",),
    "Strategies and exchange of gradients": ("strategies", "collectives", "compat", "replicas", "engine"),
    "Models, losses and optimizers": ("step", "gradients", "layers", "sharding", "training", "parameter_server"),
    "Data": ("data",),
    "Compression and measurements": ("compression", "monitoring"),
    "Backups": ("backup",),
}
_LONGEST = 160


class Message(NamedTuple):
    """A message: where it is made, its text, with a gap for each value, and whether it reports only how the run goes."""

    where: str
    text: str
    is_report: bool = False

    @property
    def beginning(self) -> str:
        """Its first words as a page shows them in a code span: "…" stands for a value."""
        shown = re.sub(rf"[{_GAP}…]+", "…", self.text).replace("`", "").replace("|", "/")
        return " ".join(shown.lstrip(" ;").split()[:_WORDS]).rstrip(" .,:;(")

    @property
    def remedy(self) -> str:
        """Its remedy, from the first word that names one to its end; empty if it names none."""
        found = [each for pattern in (_IMPERATIVE, _QUESTION) if (each := pattern.search(self.text))]
        if not found and not (found := [each for each in (_EXPECTED.search(self.text),) if each]):
            return ""
        words = self.text[min(each.start() for each in found) :].split(" Received")[0]
        shown = re.sub(rf"[{_GAP}…]+", "…", words).replace("`", "").replace("|", "/")
        return " ".join(shown.strip(" .;:,)…").split())


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


@functools.cache
def messages() -> list[Message]:
    """Returns every message of the package once."""
    table = [Message("tfdist/config/relations.py", relation.text({})) for relation in RELATIONS]
    found = {message.beginning: message for message in table}
    for path, tree in trees().items():
        for line, text, is_report in _of_module(tree):
            if len(re.sub(r"[\W_]", "", text)) >= 7:  # letters; fewer are a value with brackets around it
                message = Message(f"{path.relative_to(PACKAGE.parent)}:{line}", text, is_report)
                found.setdefault(message.beginning, message)
    return list(found.values())


def rows(page: str) -> dict[str, tuple[str, str]]:
    """Returns the messages that a page's tables have: by beginning, the section and what to do."""
    found: dict[str, tuple[str, str]] = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        title, _, text = section.partition("\n")
        for row in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE):
            shown, _, remedy = row.partition(" | ")
            found |= {each: (title, remedy.strip()) for each in re.findall(r"`([^`]+)`", shown)}
    return found


def index(page: str) -> str:
    """Returns the index of all messages, with the remedy of each, or a link to the section of the page, docs/messages.md, that has its row."""
    known = rows(page)
    lines: list[str] = []
    for part, packages in PARTS.items():
        lines += ["", f"### {part}", "", "| message | do |", "|---|---|"]
        of_part = [each for each in messages() if re.split(r"[/.]", each.where)[1] in packages]
        for each in sorted(of_part, key=lambda each: each.beginning.lstrip("… ").lower()):
            section, _ = known.get(each.beginning, ("", ""))
            lines.append(f"| `{each.beginning}` | {_link(section) if section else _remedy(each)} |")
    return "\n".join(lines[1:]) + "\n"


def _link(section: str) -> str:
    """Returns a link to a section of the page."""
    return f"[{section}](#{re.sub(r'[^a-z0-9 -]', '', section.lower()).replace(' ', '-')})"


def _remedy(message: Message) -> str:
    """Returns the beginning of a message's remedy, in which Markdown sees no markup."""
    text = textwrap.shorten(message.remedy, _LONGEST, placeholder=" …") or "a report of how the run goes"
    return re.sub(r"([*_<>\[\]])", r"\\\1", text)


def beginnings(source: str) -> list[str]:
    """Returns the beginnings of a source's messages."""
    return [Message("", text).beginning for _, text, _ in _of_module(ast.parse(source))]


def raised_without_text() -> Iterator[str]:
    """Yields the arguments of errors, as source, in which no text was found."""
    for tree in trees().values():
        for scope in ast.walk(tree):
            if isinstance(scope, (ast.FunctionDef, ast.Module)):
                for node in _own(scope):
                    called = isinstance(node, ast.Call) and ast.unparse(node.func) in ERRORS and node.args
                    if called and not any(texts(node.args[0], _locals(scope))):
                        yield ast.unparse(node.args[0])


def _of_module(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    for scope in ast.walk(tree):
        if isinstance(scope, (ast.FunctionDef, ast.Module)):
            yield from _of_scope(scope)


def _of_scope(scope: ast.FunctionDef | ast.Module) -> Iterator[tuple[int, str, bool]]:
    local = _locals(scope)
    for node in _own(scope):
        said: ast.expr | None = None
        name = ""
        if isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func).rpartition(".")[2]
            owner = ast.unparse(node.func).rpartition(".")[0]
            if (name in SAYING and owner != "relations") or (name == "append" and owner == "faults"):
                said = ast.Tuple(node.args)
        elif isinstance(node, (ast.Yield, ast.Return)):
            said = node.value if _gives_sentences(scope) else None
        elif isinstance(node, (ast.AugAssign, ast.Assign)) and ast.unparse(node).startswith(
            ("faults =", "faults +=", "self._reasons[")
        ):
            said = node.value
        yield from ((node.lineno, text, name == "info") for text in texts(said, local))


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
