"""Changes the package at one place and runs the tests that are nearest to it: a change that no test notices is one no test guards.

    python -m tools.mutants --seed=N [--count=60] [--new] [--limit=240]

A *mutant* is one changed statement, as `<` to `<=`. Its name is its file, function, statement and change, so that it is the same mutant
while the statement exists. The seed orders the statements of each package, and each package gives as many as its share of tokens.
The tests run in a copy of this tree, with an environment whose `tfdist` is the copy, until the first one fails or the limit of
seconds is over. The result is a row of the table `tests/mutants.json`: the test that failed, or null if none did. The next run tries that test
first. It fails if a mutant survives that the table has as killed. A row with `equivalent` (the reason, written by hand) is not run, and the
next mutant of its package takes its place.
"""

from __future__ import annotations

import argparse
import ast
import collections
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tokenize
from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil

ROOT = pathlib.Path(__file__).parents[1]
HANG = 90  # seconds that a test may take
Row = dict[str, Any]

_OPPOSITES = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
}
# Their own expressions are decorators, defaults and annotations, or hold the text of an error.
_SKIPPED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)


class Edit(NamedTuple):
    """Bytes of a source that are replaced."""

    start: int
    end: int
    text: str


class Source:
    """A file's text, its syntax tree, and the changes that make mutants of it."""

    def __init__(self, text: bytes):
        self.text = text
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def start(self, node: Any) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: Any) -> int:
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def changes(self) -> Iterator[tuple[str, ast.stmt, Edit]]:
        """Yields the function, the statement and the edit of each mutant."""
        yield from self._visit(ast.parse(self.text), "", None)

    def _visit(self, node: ast.AST, function: str, statement: ast.stmt | None) -> Iterator[tuple[str, ast.stmt, Edit]]:
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".strip(".")
        if _is_ignored(node):
            return
        if statement is not None and not isinstance(statement, _SKIPPED):
            for edit in self._edits(node):
                yield function, statement, edit
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self._visit(child, function, statement)

    def _edits(self, node: Any) -> Iterator[Edit]:
        match node:
            case ast.Compare(ops=[operator]):
                yield from self._swap(operator, node.left, node.comparators[0])
            case ast.BoolOp():
                yield from self._swap(node.op, *node.values[:2])
            case ast.BinOp(op=ast.Add() | ast.Sub()) if not _has_text(node):
                yield from self._swap(node.op, node.left, node.right)
            case ast.Constant(value=bool()):
                yield self._replace(node, str(not node.value))
            case ast.Constant(value=int()):
                yield self._replace(node, str(node.value + 1))
            case ast.Constant(value=float()):
                yield self._replace(node, str(node.value * 2 or 1.0))
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield self._replace(value, "None")
            case ast.Expr(value=ast.Call()):
                yield self._replace(node, "pass")
            case ast.Call():
                last = max(map(self.start, node.args), default=0)
                for keyword in node.keywords:
                    # `*args` may follow a keyword, but not `**{}`.
                    if keyword.arg and self.start(keyword) > last and not _has_text(keyword):
                        yield self._replace(keyword, "**{}")
            case ast.Break():
                yield self._replace(node, "continue")
            case ast.Continue():
                yield self._replace(node, "break")
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            start, end = self.start(node.test), self.end(node.test)
            yield Edit(start, end, f"(not ({self.text[start:end].decode()}))")

    def _replace(self, node: Any, text: str) -> Edit:
        return Edit(self.start(node), self.end(node), text)

    def _swap(self, operator: ast.AST, left: ast.expr, right: ast.expr) -> Iterator[Edit]:
        before, after = _OPPOSITES[type(operator)]
        start, end = self.end(left), self.start(right)
        between = self.text[start:end].decode()
        yield Edit(start, end, between.replace(before, after, 1))

    def row(self, file: str, function: str, statement: Any, edit: Edit) -> Row:
        """Returns the mutant's name: of a compound statement, the text before its body."""
        start, end = self.start(statement), self.end(statement)
        if isinstance(getattr(statement, "body", None), list):
            end = self.start(statement.body[0])
        before = self.text[start:end].decode()
        after = self.text[start : edit.start].decode() + edit.text + self.text[edit.end : end].decode()
        words = {"before": " ".join(before.split()), "after": " ".join(after.split())}
        return {"file": file, "function": function, "line": statement.lineno, **words}

    def apply(self, edit: Edit) -> bytes:
        return self.text[: edit.start] + edit.text.encode() + self.text[edit.end :]


def _is_ignored(node: ast.AST) -> bool:
    """Tells whether a node only serves messages or type checkers, or starts a program."""
    match node:
        case (
            ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "console"))) | ast.Call(func=ast.Name(id="print"))
        ):
            return True
        case ast.Expr(value=ast.Call() as call):
            return _is_ignored(call)
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__"))):
            return True
    return isinstance(node, ast.JoinedStr)


def _has_text(node: ast.AST) -> bool:
    texts = (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.JoinedStr | ast.Constant))
    return any(isinstance(each, ast.JoinedStr) or isinstance(each.value, str) for each in texts)


def name_of(row: Row) -> tuple[str, ...]:
    return tuple(row[key] for key in ("file", "function", "before", "after"))


def read(root: pathlib.Path, package: str) -> dict[tuple[str, ...], tuple[Row, Edit]]:
    """Returns all mutants of a package by their names; of equal statements in a function, the first."""
    found: dict[tuple[str, ...], tuple[Row, Edit]] = {}
    for path in sorted((root / package).rglob("*.py")):
        source = Source(path.read_bytes())
        for function, statement, edit in source.changes():
            row = source.row(str(path.relative_to(root)), function, statement, edit)
            found.setdefault(name_of(row), (row, edit))
    return found


def draw(root: pathlib.Path, package: str, seed: int, count: int, table: list[Row]) -> list[Row]:
    """Returns the sample: the table's mutants that still exist, and as many new ones as each subpackage lacks.

    The order within a subpackage is that of hashes of the names: other statements may come and go, and a mutant keeps its place.
    """
    found = read(root, package)
    known = {name_of(row): {**row, "line": found[name_of(row)][0]["line"]} for row in table if name_of(row) in found}
    sample = list(known.values())

    def order(*words: str) -> str:
        return hashlib.sha256("\0".join([str(seed), *words]).encode()).hexdigest()

    # One mutant of each statement, or statements with many numbers would be drawn more often.
    statements: dict[tuple[str, ...], tuple[str, ...]] = {}
    for name in sorted(found, key=lambda name: order(*name), reverse=True):
        statements[name[:3]] = name
    waiting = collections.defaultdict(list)
    for statement in sorted(statements, key=lambda statement: order(*statement)):
        if statements[statement] not in known:
            waiting[_subpackage(statement[0])].append(found[statements[statement]][0])
    has = collections.Counter(_subpackage(row["file"]) for row in sample if "equivalent" not in row)
    for subpackage, share in _shares(root, package, count).items():
        sample += waiting[subpackage][: max(share - has[subpackage], 0)]
    return sorted(sample, key=lambda row: (row["file"], row["line"]))


def _subpackage(file: str) -> str:
    parts = pathlib.PurePath(file).parts
    return parts[1] if len(parts) > 2 else "."


def _shares(root: pathlib.Path, package: str, count: int) -> dict[str, int]:
    """Returns how many mutants each subpackage gives, by its tokens."""
    tokens: collections.Counter[str] = collections.Counter()
    for path in sorted((root / package).rglob("*.py")):
        subpackage = _subpackage(str(path.relative_to(root)))
        tokens[subpackage] += len(list(tokenize.tokenize(io.BytesIO(path.read_bytes()).readline)))
    exact = {name: count * number / tokens.total() for name, number in tokens.items()}
    shares = {name: int(share) for name, share in exact.items()}
    for name in sorted(exact, key=lambda name: shares[name] - exact[name])[: count - sum(shares.values())]:
        shares[name] += 1
    return shares


def tests_for(root: pathlib.Path, row: Row) -> list[str]:
    """Returns test files, those with the strongest link to the mutant first; a minute of tests costs as much as a weak link."""
    module = pathlib.PurePath(row["file"]).with_suffix("")
    folder, stem = _subpackage(row["file"]), module.name
    imported = re.compile(rf"\b{module.parent.name}(\.| import .*\b){stem}\b")
    function = re.compile(rf"\b{re.escape(row['function'].split('.')[-1] or stem)}\b")
    durations = root / "tests/durations.json"
    seconds: collections.Counter[str] = collections.Counter()
    for test, measured in json.loads(durations.read_text()).items() if durations.exists() else ():
        seconds[test.partition("::")[0]] += measured
    links = {}
    for path in (root / "tests").rglob("test_*.py"):
        file, text = str(path.relative_to(root)), path.read_text()
        link = 4 * bool(imported.search(text)) + 2 * (stem in path.stem)
        link += bool(function.search(text)) + 2 * (folder in path.parts)
        if link or path.parent.name in ("multiprocess", "end_to_end"):
            links[file] = (seconds[file] / 60 - link, file)
    return sorted(links, key=lambda file: links[file])


class Copy:
    """A copy of a tree in which tests run: its environment imports the packages of this one's, and the copy itself."""

    def __init__(self, root: pathlib.Path, folder: pathlib.Path, package: str):
        self.root = folder / "tree"
        self._package = package
        self._original: dict[pathlib.Path, bytes] = {}
        self._faulty: set[str] = set()
        self._sound: set[str] = set()
        ignored = shutil.ignore_patterns(
            ".venv", ".git", "__pycache__", "build", "runs", "logs", ".*_cache", ".hypothesis"
        )
        shutil.copytree(root, self.root, ignore=ignored, symlinks=True)
        environment = self.root / ".venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
        self._python = environment / "bin/python"
        # A path in a .pth file is added without that folder's own .pth files, one of which would import the original.
        packages = pathlib.Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
        (packages / "copy.pth").write_text(f"{self.root}\n{sysconfig.get_path('purelib')}\n")
        for script in pathlib.Path(sys.executable).parent.iterdir():
            target = environment / "bin" / script.name
            if not target.exists() and script.is_file():
                first, newline, rest = script.read_bytes().partition(b"\n")
                shebang = f"#!{self._python}".encode() if b"python" in first[:200] else first
                target.write_bytes(shebang + newline + rest)
                shutil.copymode(script, target)
        where = self._run_python("-c", f"import {package}; print({package}.__file__)")
        assert where.startswith(str(self.root)), f"the tests would import {where}"

    def _run_python(self, *words: str) -> str:
        command = [str(self._python), *words]
        return subprocess.run(command, cwd=self.root.parent, check=True, capture_output=True, text=True).stdout

    def write(self, file: str, text: bytes) -> None:
        path = self.root / file
        path.write_bytes(text)
        # Python compares seconds and sizes, which two mutants may share.
        pathlib.Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def run(self, tests: list[str], limit: float, *options: str) -> list[str] | None:
        """Runs tests; returns those that fail or hang, the word `import` if none could begin, or None if one does not exist."""
        record = self.root / ".pytest_cache/v/cache/lastfailed"
        record.unlink(missing_ok=True)
        output = self.root.parent / "output"
        command = [str(self._python), "-m", "pytest", "-v", "-p", "no:tests.helpers.order", f"--timeout={HANG}"]
        environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environ |= {"MUTANTS": str(self.root), "TMPDIR": str(self.root.parent), "PYTHONUNBUFFERED": "1"}
        environ["PATH"] = f"{self._python.parent}{os.pathsep}{environ['PATH']}"
        with output.open("wb") as stdout:
            process = subprocess.Popen(
                [*command, *options, *tests], cwd=self.root, env=environ, stdout=stdout, stderr=subprocess.STDOUT
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                silent = time.time() - output.stat().st_mtime
            finally:
                self._end_processes()
                process.wait()
        text = output.read_text(errors="replace")
        if code is None:
            last = text.splitlines()[-1].strip() if text else ""
            return [last] if silent > HANG and "::" in last else []
        failed = list(json.loads(record.read_text())) if record.exists() else []
        if code == 4 and ("ERROR: not found" in text or "file or directory not found" in text):
            return None
        return failed if failed or code in (0, 5) else ["import"]

    def _end_processes(self) -> None:
        """Ends what tests have left: all processes with this copy's variable."""
        for process in psutil.process_iter():
            try:
                if process.environ().get("MUTANTS") == str(self.root):
                    process.kill()
            except (psutil.AccessDenied, psutil.NoSuchProcess):
                pass

    def check(self, tests: list[str], limit: float) -> None:
        """Runs tests without a mutant; those that fail kill none."""
        new = [test for test in tests if test not in self._sound | self._faulty and test != "import"]
        if new:
            collected = ["--collect-only"] if all("::" not in test for test in new) else []
            faulty = self.run(new, limit, *collected)
            if faulty is not None:
                self._faulty |= set(faulty)
                self._sound |= set(new) - self._faulty

    def try_mutant(self, row: Row, edit: Edit, limit: float) -> str | None:
        """Returns the test that a mutant fails, if there is one."""
        original = (self.root / row["file"]).read_bytes()
        mutant = Source(original).apply(edit)
        files = tests_for(self.root, row)
        end = time.monotonic() + limit
        first = [row["killed"]] if row.get("killed") not in (None, "import", *self._faulty) else []
        # Few files first: pytest imports all files of a run before the first test.
        for tests in (first, files[:8], files[8:40]):
            while tests and (left := end - time.monotonic()) > 0:
                self.write(row["file"], mutant)
                failed = self.run(tests, left, "-x", *(f"--deselect={test}" for test in self._faulty))
                self.write(row["file"], original)
                if not failed:
                    break
                self.check(failed, limit)
                killers = [test for test in failed if test not in self._faulty]
                if killers:
                    return killers[0]
        return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="another seed begins another table")
    parser.add_argument("--count", type=int, default=60, help="mutants of the sample")
    parser.add_argument("--new", action="store_true", help="only mutants that the table has no result of")
    parser.add_argument("--limit", type=float, default=240, help="seconds of tests for each mutant")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="the tree")
    parser.add_argument("--package", default="tfdist")
    options = parser.parse_args(argv)
    path = options.root / "tests/mutants.json"
    table = json.loads(path.read_text()) if path.exists() else {}
    rows = table["mutants"] if table.get("seed") == options.seed else []
    rows = draw(options.root, options.package, options.seed, options.count, rows)
    mutants = read(options.root, options.package)
    lost = []
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copy = Copy(options.root, pathlib.Path(folder), options.package)
        todo = [row for row in rows if "equivalent" not in row and not (options.new and "seconds" in row)]
        copy.check([row["killed"] for row in todo if row.get("killed")], len(todo) * options.limit)
        for row in todo:
            began = time.monotonic()
            killer = copy.try_mutant(row, mutants[name_of(row)][1], options.limit)
            result = {**row, "killed": killer, "seconds": round(time.monotonic() - began)}
            print(json.dumps(result), flush=True)
            if row.get("killed") and not killer:
                lost.append(result)  # the table keeps what killed it: the next run fails, too
            else:
                row.update(result)
            lines = ",\n".join(json.dumps(each) for each in rows)
            path.write_text(f'{{"seed": {options.seed}, "mutants": [\n{lines}\n]}}\n')
    tried = [row for row in rows if "seconds" in row and "equivalent" not in row]
    surviving = [*lost, *(row for row in tried if not row["killed"])]
    for row in surviving:
        print(f"survives: {row['file']}:{row['line']}: {row['before']} -> {row['after']}")
    print(f"{len(tried) - len(surviving)} of {len(tried)} mutants killed; {len(lost)} survive that did not before")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
